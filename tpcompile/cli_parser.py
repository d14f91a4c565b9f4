"""The command line's words: verbs, options and help."""

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import Any

EXAMPLES = """\
examples:
  tpcompile explain llama/config.json --tp 8                     the plan, tables and totals
  tpcompile explain llama/ --tp 8 --why lm_head.weight           why one thing is as it is
  tpcompile explain llama/ --tp 8 --html plan.html               a page to browse
  tpcompile advise llama/ --hardware a100-nvlink --gpus 64       which degree to use
  tpcompile verify llama/ --tp 2 --set num_hidden_layers=2       sharded equals unsharded, on a CPU
  tpcompile dump package.module:make_model --tp 2 --stage insert_collectives
  tpcompile export llama/ --tp 8 --to hf                         a tp_plan for transformers
  tpcompile lint llama/ --tp 8                                   what is wrong with its own tp_plan
  tpcompile calibrate -o this.json                               measure this machine

A model is a Hugging Face config.json, a folder with one, or package.module:function, where the
function returns a model or (model, example_inputs). No weights are read and nothing is downloaded.

exit code: 0 all is well; 1 verify or lint found something wrong, or an error that is printed;
2 a wrong command line.
"""
_SWITCH = ("auto", "on", "off")


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="tpcompile",
        description="See, check and choose tensor parallel plans for unmodified PyTorch models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"tpcompile {_version()}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="verb")
    _explain(_verb(verbs, "explain", "print the plan: parameters, collectives, memory, time"))
    _advise(_verb(verbs, "advise", "compare degrees and recommend one"))
    _verify(_verb(verbs, "verify", "run all ranks here and compare with one device"))
    _dump(_verb(verbs, "dump", "print the graph after any pass"))
    _export(_verb(verbs, "export", "print the plan for transformers or parallelize_module"))
    _lint(_verb(verbs, "lint", "check a tp_plan and price it against tpcompile's"))
    _calibrate(_verb(verbs, "calibrate", "measure this machine", model=False))
    return top


def _version() -> str:
    try:
        return version("tpcompile")
    except PackageNotFoundError:
        return "(not installed)"


def _verb(verbs: Any, name: str, what: str, *, model: bool = True) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + "."
    )
    if model:
        verb.add_argument("model", help="config.json, its folder, or package.module:function")
        verb.add_argument("--batch", type=_count, metavar="N", help="samples of the example")
        verb.add_argument("--seq", type=_count, metavar="N", help="tokens of a sample")
        verb.add_argument("--dtype", default="", help="such as bfloat16; else the config's")
        verb.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
            help="change the config, such as num_hidden_layers=2",
        )  # fmt: skip
    return verb


def _plan_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tp", type=_count, required=True, metavar="N", help="degree")
    _hardware(verb)
    verb.add_argument(
        "--sequence-parallel", choices=_SWITCH, default="auto", help="auto: the cost decides"
    )
    verb.add_argument(
        "--plan", metavar="FILE", help="JSON: a saved plan, or placements such as Shard(0) by name"
    )


def _hardware(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--hardware", default="h100-nvlink", metavar="NAME|FILE",
        help="profile: h100-nvlink, a100-nvlink, ..., or a file of calibrate",
    )  # fmt: skip


def _json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="as JSON, to a file or stdout"
    )


def _explain(verb: argparse.ArgumentParser) -> None:
    _plan_options(verb)
    verb.add_argument("--optimizer", default="adamw", help="for the memory estimate")
    verb.add_argument("--strict", action="store_true", help="refuse ops without a rule")
    verb.add_argument(
        "--why", action="append", default=[], metavar="NAME",
        help="print the reasons for a parameter, op or collective instead",
    )  # fmt: skip
    verb.add_argument("--html", metavar="FILE", help="write a page to browse")
    verb.add_argument("--svg", metavar="FILE", help="write a drawing")
    verb.add_argument("--save-plan", metavar="FILE", help="write the plan, for shard(plan=FILE)")
    _json(verb)


def _advise(verb: argparse.ArgumentParser) -> None:
    _hardware(verb)
    verb.add_argument(
        "--degrees", type=_counts, metavar="N,N,...", help="default: 1,2,4,8,16,32,64"
    )
    verb.add_argument("--gpus", type=_count, metavar="N", help="devices there are")
    verb.add_argument("--memory", type=float, metavar="GB", help="of one device")
    verb.add_argument("--optimizer", default="adamw", help="for the memory")
    verb.add_argument("--global-batch", type=_count, metavar="N", help="samples of one step")
    verb.add_argument("--plot", metavar="FILE", help="draw memory and throughput (matplotlib)")
    _json(verb)


def _verify(verb: argparse.ArgumentParser) -> None:
    _plan_options(verb)
    verb.add_argument("--seed", type=int, default=0, help="of weights and dropout")
    verb.add_argument("--strict", action="store_true", help="refuse ops without a rule")


def _dump(verb: argparse.ArgumentParser) -> None:
    _plan_options(verb)
    verb.add_argument(
        "--form", default="text", metavar="FORM", help="text, dot, svg, html or json; planned graph"
    )
    verb.add_argument("--block", default="", metavar="PATH", help="one block alone")
    verb.add_argument("--stage", metavar="PASS", help="the text after this pass")
    verb.add_argument("--diff", nargs=2, metavar="PASS", help="what changes between two passes")
    verb.add_argument("--stages", metavar="FOLDER", help="write all stages and forms")
    verb.add_argument("--rank", type=int, default=0, metavar="N", help="whose local stages")
    verb.add_argument("-o", "--output", metavar="FILE", help="else stdout")


def _export(verb: argparse.ArgumentParser) -> None:
    _plan_options(verb)
    verb.add_argument(
        "--to", choices=("hf", "torch"), default="hf",
        help="transformers' tp_plan, or torch's parallelize_module",
    )  # fmt: skip
    _json(verb)


def _lint(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tp", type=_count, required=True, metavar="N", help="degree")
    _hardware(verb)
    verb.add_argument(
        "--plan", metavar="FILE", help="JSON of styles by module name; else the model's own tp_plan"
    )
    _json(verb)


def _calibrate(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--ranks", type=_count, default=2, metavar="N", help="processes (default 2)")
    verb.add_argument("--name", default="", help="of the profile")
    verb.add_argument(
        "-o", "--output", metavar="FILE", help="where to save it, for --hardware FILE"
    )


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
