"""The forms a program can be written in."""

import json
from collections.abc import Callable

from tpcompile.draw import dot, svg
from tpcompile.dump import dump
from tpcompile.outline import Outline, outline
from tpcompile.page import page
from tpcompile.program import Program


def to_json(of: Outline) -> str:
    """All of it, indented."""
    return json.dumps(of, indent=1) + "\n"


FORMS: dict[str, Callable[[Outline], str] | None] = {
    "text": None,
    "dot": dot,
    "svg": svg,
    "html": page,
    "json": to_json,
}
"""Form -> what writes it from an outline; text is written from the program itself."""


def form_of(program: Program, form: str, block: str = "") -> str:
    """A program in one form; `block` leaves out all but one block."""
    write = FORMS[form]
    if write is None:
        return dump(program, block=block)
    of = outline(program)
    if block:
        of["sections"] = [{**s, "like": None} for s in of["sections"] if s["block"] == block]
    return write(of)
