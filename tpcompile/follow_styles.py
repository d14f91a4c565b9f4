"""Follow a model's values under a plan of module styles, to see whether and what it computes.

Whether a plan is right is a question about the graph: a value split by one named dim may pass only
ops that can be split by that dim.
"""

import operator
from collections.abc import Mapping

from torch import fx

from tpcompile.cost import CostModel, bytes_of
from tpcompile.dims import Dim, segments_of
from tpcompile.module_styles import GRADIENT, STYLES, Conflict, Flow, Held, Sent, Style
from tpcompile.placement import P
from tpcompile.program import Program, operands, values
from tpcompile.strategies import Choices
from tpcompile.work import Work

_TURNS = ("permute", "transpose", "t")
"""How `x @ weight.T` turns its weight."""


def follow(program: Program, styles: Mapping[str, str], cost: CostModel) -> Flow:
    """Follow every value through a program with named dims, under styles by module name."""
    return _Follower(program, styles, cost).run()


def choices_of(program: Program, cost: CostModel) -> Choices:
    """What each op may do at this degree, tensor parallelism only."""
    extra = program.extra
    return Choices(
        cost,
        extra["sizes"],
        extra["facts"],
        extra["batch"],
        extra["weights"],
        frozenset(extra["widths"]),
        allow_stream=False,
    )


class _Follower:
    def __init__(self, program: Program, styles: Mapping[str, str], cost: CostModel) -> None:
        self.program, self.cost = program, cost
        self.styles = {module: STYLES[style] for module, style in styles.items() if style in STYLES}
        self.partial = {module for module, style in styles.items() if style == GRADIENT}
        self.choices = choices_of(program, cost)
        self.flow = Flow()

    def run(self) -> Flow:
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.flow.held[node] = self._visit(node)
            elif node.op == "output":
                self._leave(node)
        return self.flow

    def _held(self, source: fx.Node, reader: fx.Node) -> Held | None:
        """What a reader gets of a value: a gathering module hands out all of it."""
        if source.target is operator.getitem:
            origin, index = source.args
            found = self.flow.held[origin][index]  # type: ignore[index]
        else:
            found = self.flow.held.get(source, [None])[0]
        path = source.meta.get("path", "")
        style = self.styles.get(path)
        inside = reader.op != "output" and reader.meta.get("path", "") == path
        return None if style and style.gathers() and not inside else found

    def _visit(self, node: fx.Node) -> list[Held | None]:
        path = node.meta.get("path", "")
        if node.target is operator.getitem:
            return [self._held(node, node)]
        style = self.styles.get(path)
        if style is not None and style.dim is not None and _weight_of(node, self.program)[1]:
            return self._apply(node, path, style)
        return self._pass(node, path, style)

    def _apply(self, node: fx.Node, path: str, style: Style) -> list[Held | None]:
        """The styled module's own op: a linear or a lookup."""
        slot, weight = _weight_of(node, self.program)
        assert weight is not None
        assert style.dim is not None
        data = next(source for i, source in enumerate(operands(node)) if i != slot)
        given, lookup = self._held(data, node), _is_lookup(node)
        atom = self._atom(weight.meta["dims"][0][style.dim], style.outer)
        own = Held(atom, frozenset((path,)))
        self.flow.applied.add(path)
        if atom is None:
            self.flow.unequal[path] = self._inequality(weight.meta["dims"][0][style.dim], path)
        self._count(node, path, style, data)
        row = style.dim == 1 and not lookup
        split = [own if i == slot or row else None for i in range(len(operands(node)))]
        self._work(node, split, [own if style.dim == 0 and not lookup else None])
        if style.takes == "part":
            self._take_part(node, path, given, atom)
        elif given is not None:
            self._conflict(node, given.sources, f"{path} takes a whole value")
        if lookup:
            return [None]
        self.flow.atoms[path] = atom
        return [own if style.dim == 0 else None]

    def _take_part(self, node: fx.Node, path: str, given: Held | None, atom: Dim | None) -> None:
        """A row parallel module computes with the rank's part of its input."""
        if given is None:
            reason = "it takes its part of the input, but every rank has the whole input"
            self._conflict(node, frozenset((path,)), reason, "input")
        elif given.atom is not atom or atom is None:
            self._conflict(node, given.sources, f"{path} is split by other units")

    def _atom(self, dim: Dim, outer: int) -> Dim | None:
        """The named dim that equal contiguous chunks of `dim` deal out in whole units."""
        choices = self.choices
        for atom in sorted(choices.atoms.splitting(dim), key=lambda a: a.serial):
            parts = segments_of(dim, atom)
            pieces = parts[0][0] if len(parts) == 1 else len(parts) if len(set(parts)) == 1 else 0
            if pieces == outer and not choices.hint(atom) % self.cost.size:
                return atom
        return None

    def _inequality(self, dim: Dim, path: str) -> str:
        """What the equal chunks of a dim are that are not whole units of it."""
        size = self.cost.size
        share = f"1/{size} of the {self.choices.hint(dim)} features of {path}"
        for atom in sorted(self.choices.atoms.splitting(dim), key=lambda a: a.serial):
            parts = segments_of(dim, atom)
            if len(parts) == 1 and parts[0][0] == 1:
                units = f"{self.choices.hint(atom)} of {_name_of(atom)}"
                return f"{share}, but {units} cannot be dealt to {size} ranks"
        return f"{share}, which cuts across the parts it is fused of"

    def _pass(self, node: fx.Node, path: str, style: Style | None) -> list[Held | None]:
        """Any other op: as it is, on what its operands are."""
        inputs = operands(node)
        given = [self._held(source, node) for source in inputs]
        outs: list[Held | None] = [None] * max(1, len(values(node)))
        parts = [held for held in given if held is not None]
        if not parts:
            self._work(node, given, outs)
            return outs
        sources = frozenset[str]().union(*(held.sources for held in parts))
        atom = parts[0].atom
        if style is not None and path in sources:  # the module's bias, split like its weight
            outs = [Held(atom, sources)] * len(outs)
            self._work(node, given, outs)
            return outs
        reason = self._refusal(node, inputs, given)
        if reason:
            self._conflict(node, sources, reason)
            return outs
        self._check_gradients(node, path, inputs, given, sources)
        leaves = self.choices.atoms.leaves
        outs = [
            Held(atom, sources) if any(atom in leaves(d) for d in dims) else None
            for dims in node.meta["dims"]
        ]
        self._work(node, given, outs)
        return outs

    def _refusal(self, node: fx.Node, inputs: list[fx.Node], given: list[Held | None]) -> str:
        """Why an op cannot run on these parts, or ""."""
        op, rule = _op_name(node), node.meta.get("rule")
        atoms = {held.atom for held in given if held is not None}
        atom = next(iter(atoms))
        if len(atoms) > 1:
            return f"{op} meets values that are split by different dims"
        if atom is None:
            return f"{op} gets {' and '.join(sorted(self._chunks(given)))}"
        if rule is None:
            return f"{op} has no sharding rule"
        in_dims = [n.meta["dims"][0] for n in inputs]
        if atom not in self.choices.candidates(node, rule, in_dims, node.meta["dims"]):
            return f"{op} needs all {self.choices.hint(atom)} of {_name_of(atom)}"
        for source, held, dims in zip(inputs, given, in_dims, strict=True):
            if held is None and any(atom in self.choices.atoms.leaves(d) for d in dims):
                whole, units = _value_name(source, self.program), self.choices.hint(atom)
                return f"{op} meets {whole} with all {units} of {_name_of(atom)}"
        chosen = next(s for s in self.choices.strategies(node) if s.split is atom)
        if P in chosen.outs:
            return f"{op} sums over {_name_of(atom)}, and no style reduces its result"
        if any(self._bound_has(node, name, atom) for name in rule.inner):
            return f"{op} reduces over {_name_of(atom)} on each rank alone"
        return ""

    def _chunks(self, given: list[Held | None]) -> set[str]:
        """What is wrong with parts that are equal chunks of a module's output."""
        sources = frozenset[str]().union(*(held.sources for held in given if held is not None))
        return {self.flow.unequal.get(source, f"a part of {source}") for source in sources}

    def _bound_has(self, node: fx.Node, name: str, atom: Dim) -> bool:
        bound = node.meta["bound"].get(name)
        return bound is not None and atom in self.choices.atoms.leaves(bound)

    def _check_gradients(
        self,
        node: fx.Node,
        path: str,
        inputs: list[fx.Node],
        given: list[Held | None],
        sources: frozenset[str],
    ) -> None:
        """A whole operand of an op on parts gets only its share of the gradient."""
        trained = self.program.extra["facts"].trained
        for source, held in zip(inputs, given, strict=True):
            if held is not None or source not in trained:
                continue
            name = _value_name(source, self.program)
            if source.op != "placeholder" or name.rpartition(".")[0] != path:
                self._conflict(node, sources, f"the gradient of {name} would be a partial sum")
                continue
            part = next(i for i, h in enumerate(given) if h is not None)
            dims, atom = inputs[part].meta["dims"][0], given[part].atom  # type: ignore[union-attr]
            leaves = self.choices.atoms.leaves
            self.flow.gradients[path] = next(i for i, d in enumerate(dims) if atom in leaves(d))
            self._send(path, "all_reduce", "backward", bytes_of(source.meta["val"]))
            if path not in self.partial:
                reason = f"the gradient of {name} would be a partial sum"
                self._conflict(node, frozenset((path,)), reason, "gradient")

    def _leave(self, node: fx.Node) -> None:
        for source in operands(node):
            held = self._held(source, node)
            if held is not None:
                self._conflict(
                    node, held.sources, "the model returns it, so the caller needs it whole"
                )

    def _count(self, node: fx.Node, path: str, style: Style, data: fx.Node) -> None:
        taken, given = bytes_of(data.meta["val"]), bytes_of(node.meta["val"])
        trained = data in self.program.extra["facts"].trained
        if style.dim == 1 or _is_lookup(node):
            kind = "all_gather" if _is_lookup(node) and style.dim == 1 else "all_reduce"
            self._send(path, kind, "forward", given)
            if trained and style.takes == "whole":
                self._send(path, "all_gather", "backward", taken)
            return
        if trained:
            self._send(path, "all_reduce", "backward", taken)
        if style.gives == "whole":
            self._send(path, "all_gather", "forward", given)

    def _send(self, module: str, kind: str, direction: str, nbytes: int) -> None:
        self.flow.sent.append(Sent(module, kind, direction, nbytes))
        self.flow.communication += self.cost.collective(kind, nbytes)

    def _work(self, node: fx.Node, given: list[Held | None], outs: list[Held | None]) -> None:
        """Count the seconds of one op on the rank's parts."""
        if not values(node) or "rule" not in node.meta:
            return
        trained = node in self.program.extra["facts"].trained
        work = Work(node, node.meta["rule"], self.cost, trained)
        has_in, has_out = [h is not None for h in given], [h is not None for h in outs]
        fraction = 1 / self.cost.size if any(has_in) or any(has_out) else 1.0
        self.flow.compute += work.seconds(fraction, has_in, has_out)

    def _conflict(
        self, node: fx.Node, modules: frozenset[str], reason: str, kind: str = "part"
    ) -> None:
        path, where = node.meta.get("path", ""), node.meta.get("where", "")
        self.flow.conflicts.append(Conflict(path, where, reason, modules, kind))


def _is_lookup(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.embedding")


def _weight_of(node: fx.Node, program: Program) -> tuple[int, fx.Node | None]:
    """(slot, parameter) of the matrix that a linear, matmul or lookup reads; (0, None): none."""
    if str(node.target).startswith(("aten.linear", "aten.matmul", "aten.mm", "aten.embedding")):
        for slot, source in enumerate(operands(node)):
            while source.op != "placeholder" and _op_name(source) in _TURNS:
                source = operands(source)[0]
            leaf = program.leaves.get(source.name) if source.op == "placeholder" else None
            if leaf is not None and leaf.kind == "parameter" and source.meta["val"].ndim == 2:
                return slot, source
    return 0, None


def _op_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _value_name(node: fx.Node, program: Program) -> str:
    leaf = program.leaves.get(node.name) if node.op == "placeholder" else None
    return leaf.name if leaf is not None else f"the value of a {_op_name(node)}"


def _name_of(atom: Dim) -> str:
    return atom.root().name or "an unnamed dim"
