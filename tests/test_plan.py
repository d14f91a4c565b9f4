"""Plans as objects and files, and pins: what they do, what they cost, and when they cannot be."""

import json
from pathlib import Path

import pytest
import torch
from models import MLP, MODELS, plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import tpcompile
from tpcompile import Explanation, Plan, ShardingError

X = torch.randn(2, 6, 8)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("gptj", "neox", "qwen2") else [])
        for name in sorted(MODELS)
    ],
)
def test_loaded_plan_gives_the_same_plan(name: str, tmp_path: Path) -> None:
    """Saved, loaded and asked for again: equal objects, and the same text of a fresh solve."""
    example = MODELS[name]()
    plan = tpcompile.explain(example.model, example.inputs, tp=2).plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.to_json() == plan.to_json()
    assert loaded.parameters == plan.parameters
    again = tpcompile.explain(example.model, example.inputs, tp=2, plan=tmp_path / "plan.json").plan
    assert str(again) == str(plan)
    assert again.seconds == plan.seconds


def test_file_reads_well(tmp_path: Path) -> None:
    """One line a parameter and a collective."""
    x = torch.randn(2, 6, 64)
    plan = tpcompile.explain(MLP(64, 256), (x,), tp=2, sequence_parallel=False).plan
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    seconds = json.loads(text)["seconds"]
    assert text == (
        "{\n"
        '  "version": 1,\n'
        '  "degree": 2,\n'
        '  "hardware": "h100-nvlink",\n'
        '  "sequence_parallel": false,\n'
        f'  "seconds": {seconds},\n'
        '  "parameters": {\n'
        '    "up.weight": {"placement": "Shard(0)", "splits": "S(up.ffn)", "style": "column", '
        '"shape": [256, 64], "local_shape": [128, 64]},\n'
        '    "up.bias": {"placement": "Shard(0)", "splits": "S(up.ffn)", "style": "column", '
        '"shape": [256], "local_shape": [128]},\n'
        '    "down.weight": {"placement": "Shard(1)", "splits": "S(up.ffn)", "style": "row", '
        '"shape": [64, 256], "local_shape": [64, 128]},\n'
        '    "down.bias": {"placement": "Replicate", "splits": "R", "style": "replicated", '
        '"shape": [64], "local_shape": [64]}\n'
        "  },\n"
        '  "collectives": [\n'
        '    {"kind": "all_reduce", "forward": "all_reduce", "backward": "", "path": "down", '
        '"nbytes": 3072, "count": 1}\n'
        "  ],\n"
        '  "replicated_ops": [],\n'
        '  "notes": []\n'
        "}\n"
    )


def explained(plan: object, **options: object) -> Explanation:
    """Of the plain decoder on two ranks."""
    example = plain()
    return tpcompile.explain(example.model, example.inputs, tp=2, plan=plan, **options)


def stored(explanation: Explanation) -> dict[str, str]:
    """Parameter -> placement."""
    return {p.name: p.stored for p in explanation.plan.parameters}


def test_edited_file_is_followed(tmp_path: Path) -> None:
    """What a person writes over a placement counts, also where "splits" then no longer fits."""
    explained(None).plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["parameters"]["head.weight"]["placement"] = "Replicate"
    data["parameters"]["blocks.1.down.weight"]["placement"] = "Shard(0)"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    found = stored(explained(str(tmp_path / "plan.json")))
    assert found["head.weight"] == "Replicate"
    assert found["blocks.1.down.weight"] == "Shard(0)"
    assert found["blocks.0.down.weight"] == "Shard(1)"


@pytest.mark.parametrize(
    "plan",
    [
        {"blocks.*.down.weight": Shard(0), "head.weight": Replicate()},
        {"blocks.*.down.weight": "Shard(0)", "head.weight": "Replicate"},
        {"parameters": {"blocks.*.down.weight": "Shard(0)", "head.weight": "Replicate"}},
        {"*": Replicate(), "*.qkv.weight": Shard(0), "*.down.weight": Shard(-2)},
    ],
    ids=["placements", "texts", "dict", "last one counts"],
)  # fmt: skip
def test_pins_by_pattern(plan: dict) -> None:
    """They are met, the rest is solved around them, and each has its price."""
    free, found = explained(None), explained(plan)
    assert stored(found)["blocks.0.down.weight"] == stored(found)["blocks.1.down.weight"]
    assert stored(found)["blocks.0.down.weight"] == "Shard(0)"
    assert stored(found)["head.weight"] == "Replicate"
    assert stored(found)["blocks.0.qkv.weight"] == "Shard(0)"
    assert found.plan.seconds > free.plan.seconds
    prices = {price.pin: price.extra for price in found.pins}
    assert all(extra.price >= 0 for extra in prices.values())
    down = next(extra for pin, extra in prices.items() if "down" in pin)
    assert down.price > 0
    assert str(down) in str(found)


def test_single_pin_costs_the_whole_difference() -> None:
    """The price of the only pin is the difference between the two plans."""
    free, found = explained(None), explained({"head.weight": Replicate()})
    (price,) = found.pins
    assert price.pin == "'head.weight' as Replicate"
    assert price.extra.price == pytest.approx(found.plan.seconds - free.plan.seconds)
    assert price.extra.nbytes == 4 * 8 * 48 * 32 / 2  # it, its gradient, two moments, in float64


def test_pinning_what_is_chosen_costs_nothing() -> None:
    """Neither time nor memory."""
    found = explained({"blocks.*.down.weight": Shard(1)})
    assert str(found.pins[0].extra) == "costs the same"
    assert found.pins[0].extra.price == 0


def test_any_name_of_a_tied_weight_can_be_pinned() -> None:
    """Also the one that is not the first."""
    example = plain(tied=True)
    found = tpcompile.explain(
        example.model, example.inputs, tp=2, plan={"head.weight": Replicate()}
    )
    assert stored(found)["embed.weight"] == "Replicate"


class Merged(nn.Module):
    """A linear layer whose weight is the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[*b, 8] -> [*b, 8]."""
        return nn.functional.linear(x, self.a + self.b)


REFUSED = {
    "no such parameter": (
        {"blocks.*.up.weight": Shard(0)},
        "plan= places 'blocks.*.up.weight'.\n"
        "  no parameter of Plain has that name.\n"
        "  fix: names look like 'position'; * matches any part of a name",
    ),
    "no placement": (
        {"head.weight": 1},
        "plan= places 'head.weight' as 1.\n"
        "  a parameter can be Shard(dim) or Replicate().\n"
        "  fix: use one of torch.distributed.tensor's Shard and Replicate",
    ),
    "no text": (
        {"head.weight": "column"},
        "cannot read the placement 'column'.\n"
        '  it is neither "Shard(dim)" nor "Replicate".\n'
        '  fix: write "Shard(0)" to split dim 0, "Shard(1)" to split dim 1, or "Replicate"',
    ),
    "no such dim": (
        {"head.weight": Shard(2)},
        "plan= asks for 'head.weight' as Shard(2) on 2 ranks.\n"
        "  it is [48, 32], which has 2 dims.\n"
        "  fix: use a degree that divides it, or drop it from plan= and let tpcompile choose",
    ),
    "an op refuses": (
        {"embed.weight": Shard(1)},
        "plan= asks for 'embed.weight' as Shard(1) on 2 ranks.\n"
        "  embedding in embed refuses S(hidden): hidden, the width of the residual stream, is "
        "split by linear layers only.\n"
        "  fix: drop it from plan= and let tpcompile choose",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pins_that_cannot_be_met(case: str) -> None:
    """The error names the pin, and the op or the size that refuses it."""
    plan, message = REFUSED[case]
    with pytest.raises(ShardingError) as error:
        explained(plan)
    assert str(error.value) == message


def test_pin_that_does_not_divide() -> None:
    """Units of heads, not elements, are what a degree has to share."""
    example = plain(heads=4, kv_heads=1)
    with pytest.raises(ShardingError) as error:
        tpcompile.explain(example.model, example.inputs, tp=64, plan={"*.gate_up.weight": Shard(0)})
    assert str(error.value) == (
        "plan= asks for '*.gate_up.weight' as Shard(0) on 64 ranks.\n"
        "  it is [96, 32]; blocks.0.ffn: 48 units cannot be shared by 64 ranks.\n"
        "  fix: use a degree that divides it, or drop it from plan= and let tpcompile choose"
    )


def test_pins_that_contradict_each_other() -> None:
    """Each can be met alone; the error says where they meet, and names only the two."""
    plan = {"a": Shard(0), "b": Shard(1)}
    for name, placement in plan.items():
        tpcompile.explain(Merged(), (X,), tp=2, plan={name: placement})
    with pytest.raises(ShardingError) as error:
        tpcompile.explain(Merged(), (X,), tp=2, plan=plan)
    assert str(error.value) == (
        "plan= asks for 'a' as Shard(0) and 'b' as Shard(1) on 2 ranks.\n"
        "  each can be met alone, but not all of them; they meet at add.\n"
        "  fix: drop one of them from plan= and let tpcompile choose"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes"),
        ("{}", "KeyError: 'parameters'"),
        ('{"parameters": []}', "TypeError: parameters is not a dict by name"),
    ],
)
def test_file_that_is_no_plan(text: str, found: str, tmp_path: Path) -> None:
    """The error says what the file has."""
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ShardingError) as error:
        Plan.load(path)
    first, second, third = str(error.value).split("\n")
    assert first == f"cannot read a plan from {path}."
    assert second.startswith(f"  {found}")
    assert third == "  fix: pass a file that Plan.save wrote, or placements by parameter name"


def test_plan_of_another_version() -> None:
    """It is refused, not misread."""
    with pytest.raises(ShardingError, match="cannot read a plan of version 9"):
        Plan.from_json({"version": 9, "parameters": {}})


def test_plan_keeps_sequence_parallelism() -> None:
    """A plan made with it forced is followed so, unless the call says otherwise."""
    plan = explained(None, sequence_parallel=True).plan
    assert str(explained(plan).plan) == str(plan)
    assert str(explained(plan, sequence_parallel=False).plan) != str(plan)


def test_verify_takes_a_plan() -> None:
    """Numbers are right under a plan that is not the cheapest."""
    example = plain()
    plan = explained({"blocks.*.down.weight": Shard(0), "head.weight": Replicate()}).plan
    report = tpcompile.verify(example.model, example.inputs, tp=2, plan=plan)
    assert report.ok
    assert [p.stored for p in report.plan.parameters] == [p.stored for p in plan.parameters]


def shard_with(path: str) -> tuple[str, str, str]:
    """(plan, its explanation, the explanation of the loaded plan), on a rank."""
    example = plain()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    want = tpcompile.explain(example.model, example.inputs, tp=2, plan=path)
    model = tpcompile.shard(example.model, mesh, example.inputs, plan=path)
    got = model.explain()
    keep = slice(5, None)  # all but the seconds that planning took
    return (
        str(model.plan),
        "\n".join(str(got).split("\n")[keep]),
        "\n".join(str(want).split("\n")[keep]),
    )


def test_shard_follows_a_file_and_explains_itself(ranks, tmp_path: Path) -> None:
    """The sharded model's explanation is the one that `explain` gives for the plan."""
    plan = explained({"blocks.*.down.weight": Shard(0)}).plan
    plan.save(tmp_path / "plan.json")
    for text, got, want in ranks("test_plan:shard_with", 2, str(tmp_path / "plan.json")):
        assert text == str(plan)
        assert got == want
