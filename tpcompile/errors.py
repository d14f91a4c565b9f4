"""Every error a user can meet: what was asked, what was found, how to fix it."""


class TpcompileError(Exception):
    """Base of all errors raised for a user's model, mesh, inputs or plan.

    The message has three parts: what was asked, what was found, and a line that starts with
    `fix:`.  Nothing has been changed when it is raised.
    """

    def __init__(self, asked: str, found: str, fix: str) -> None:
        self.asked, self.found, self.fix = asked, found, fix
        super().__init__(f"{asked}\n  {found}\n  fix: {fix}")


class CaptureError(TpcompileError):
    """The model could not be traced into one graph."""


class MeshError(TpcompileError):
    """The device mesh does not suit the model."""


class InputError(TpcompileError):
    """The inputs do not suit the model."""


class ShardingError(TpcompileError):
    """A placement asked for in `plan=` cannot be met."""


class RankMismatchError(TpcompileError):
    """Ranks of one mesh axis hold different models, inputs or plans."""


class UnsupportedOpError(TpcompileError):
    """`strict=True` met an op that has no rule."""


class CheckpointError(TpcompileError):
    """A state dict does not fit the model."""


class HardwareError(TpcompileError):
    """`hardware=` names no machine that is known."""


class RuleError(TpcompileError):
    """A rule says of its op what execution shows to be wrong."""
