"""A model from the words of a command line: a Hugging Face config, or a function that makes one."""

import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpcompile.errors import InputError, TpcompileError
from tpcompile.hf import example_inputs_for, positions_of

TOKENS = 2048
"""Of a sample, where nothing else is asked for or possible."""


@dataclass(frozen=True)
class Wanted:
    """What of a model is asked for."""

    source: str
    """Path of a config.json or its folder, or "package.module:factory"."""
    batch: int = 1
    seq: int | None = None
    dtype: str = ""
    """Name of a torch dtype; "": the config's."""
    changes: Sequence[str] = ()
    """"key=value" for the config."""
    weights: bool = False
    """Random weights instead of the meta device."""


def load_model(wanted: Wanted) -> tuple[nn.Module, Any]:
    """(model, example inputs; None where tpcompile makes them).

    Raises:
        InputError: The source names no config and no function, or what it names makes no model.
    """
    path = Path(wanted.source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(path, wanted)
    if ":" in wanted.source:
        return _from_factory(wanted)
    raise InputError(
        f"the model {wanted.source!r}",
        "no config.json or folder with one has that path, and nothing is downloaded",
        "pass such a path, or package.module:factory",
    )


def _from_config(path: Path, wanted: Wanted) -> tuple[nn.Module, Any]:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"the model {wanted.source!r}",
            "it is a Hugging Face config, and transformers is not installed",
            'pip install "tpcompile[hf]"',
        ) from error
    transformers.logging.set_verbosity_error()
    try:
        fields = json.loads(path.read_text())
        changed = fields | _changes(wanted.changes, fields, path)
        config = transformers.AutoConfig.for_model(**changed)
        model = _built(_kind_for(config, wanted), config, _dtype(wanted.dtype, config), wanted)
    except TpcompileError:
        raise
    except Exception as error:  # configs and models raise what they like on odd values
        raise InputError(
            f"the model {wanted.source!r}",
            f"transformers makes no model of {path.name}: {_first_line(error)}",
            "pass a config as save_pretrained writes it, of values that go together",
        ) from error
    return model, example_inputs_for(model, wanted.batch, _tokens(model, wanted))


def _kind_for(config: Any, wanted: Wanted) -> Any:
    """The model class that a config names."""
    import transformers

    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    kind = getattr(transformers, name, None)
    if kind is not None:
        return kind
    raise InputError(
        f"the model {wanted.source!r}",
        f"its architecture {name} is not in transformers {transformers.__version__}",
        "update transformers, or pass package.module:factory",
    )


def _tokens(model: nn.Module, wanted: Wanted) -> int | None:
    """Tokens of a sample: as asked, or as many as it has positions, up to `TOKENS`."""
    if wanted.seq is not None or wanted.weights:
        return wanted.seq
    return min(TOKENS, positions_of(model) or TOKENS)


def _built(kind: Any, config: Any, dtype: torch.dtype, wanted: Wanted) -> nn.Module:
    make = getattr(kind, "from_config", kind)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = make(config)
        if not wanted.weights:
            return model
        _check_room(model, wanted)
        return make(config).to(dtype)
    finally:
        torch.set_default_dtype(before)


def _check_room(model: nn.Module, wanted: Wanted) -> None:
    """Real weights are made for checks, which hold them, their gradients and their parts."""
    count = sum(p.numel() for p in model.parameters())
    need = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if need > free:
        raise InputError(
            f"the model {wanted.source!r} with weights",
            f"{count / 1e9:.1f}e9 parameters need {need / 1e9:.0f} GB here, "
            f"and {free / 1e9:.0f} GB are free",
            "make it smaller, such as --set num_hidden_layers=2 --set vocab_size=1000",
        )


def _changes(changes: Iterable[str], fields: dict[str, Any], path: Path) -> dict[str, Any]:
    found = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            near = ", ".join(sorted(k for k, v in fields.items() if isinstance(v, (int, float))))
            raise InputError(
                f"--set {change}",
                f"{path.name} has no {key!r}" if equals else "it is not key=value",
                f"its numbers are {near}",
            )
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def _from_factory(wanted: Wanted) -> tuple[nn.Module, Any]:
    module_name, _, name = wanted.source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"the model {wanted.source!r}",
            _first_line(error),
            "pass package.module:factory, importable from here",
        ) from error
    made = factory() if not isinstance(factory, nn.Module) else factory
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model {wanted.source!r}",
            f"{name}() returns {type(made).__name__}",
            "return a torch.nn.Module, or (module, example_inputs)",
        )
    if wanted.dtype:
        model = model.to(_dtype(wanted.dtype, None))
    if inputs is None:
        inputs = example_inputs_for(model, wanted.batch, _tokens(model, wanted))
    return model, inputs


def _dtype(name: str, config: Any) -> torch.dtype:
    given = name or str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    found = getattr(torch, given, None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise InputError(
        f"--dtype {given}", "it is no floating-point dtype", "use float32, bfloat16 or float16"
    )


def _first_line(error: BaseException) -> str:
    said = error.__cause__ or error
    return (str(said).strip().splitlines() or [type(said).__name__])[0]
