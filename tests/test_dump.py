"""Dumps: the text after any pass, its golden form for known models, files, and emitted graphs."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import models
import pytest
import ranks as rank_pools
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import tpcompile
from tpcompile.errors import InputError, TpcompileError

PASSES = [
    "capture", "inline_regions", "functionalize", "normalize", "find_causal_masks", "name_dims",
    "find_dims",
    "assign_placements", "insert_collectives", "eliminate_redundant", "certify_cost",
    "mark_blocks", "localize", "bucket_gradients", "fuse_linears", "overlap_collectives",
    "split_blocks",
]  # fmt: skip


def on_meta(name: str, layers: int = 3) -> tuple[nn.Module, dict]:
    """A model of real width without weights, and its inputs."""
    import transformers

    with torch.device("meta"):
        if name == "llama":
            config = transformers.LlamaConfig(
                vocab_size=32000, hidden_size=4096, intermediate_size=11008,
                num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.GPT2Config(n_embd=2048, n_layer=layers, n_head=32)
            model = transformers.GPT2LMHeadModel(config).eval()
        ids = torch.zeros(2, 1024, dtype=torch.long)
    return model.bfloat16(), {"input_ids": ids, "labels": ids, "use_cache": False}


@cache
def explained(name: str, layers: int = 3) -> tpcompile.Explanation:
    """The plan of an `on_meta` model on 4 ranks."""
    model, inputs = on_meta(name, layers)
    return tpcompile.explain(model, inputs, tp=4)


@cache
def small(**config: int) -> tpcompile.Stages:
    """The stages of a small model on 2 ranks."""
    example = models.plain(**config)
    return tpcompile.stages(example.model, example.inputs, tp=2)


def counts(text: str) -> dict[str, int]:
    """Number of each collective in a dump."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return {kind: n for kind in kinds if (n := text.count(f"= {kind}("))}


def test_llama_block(golden) -> None:
    """Megatron's sequence parallel layer: two gathers, two reduce-scatters, nothing else."""
    text = tpcompile.dump(explained("llama"), block="model.layers.1")
    assert counts(text) == {"all_gather": 2, "reduce_scatter": 2}
    # What column parallel projections make is never communicated.
    assert len(re.findall(r"# column parallel", text)) == 5
    assert len(re.findall(r" P = linear.*# row parallel", text)) == 2
    golden("llama_block", text)


def test_gpt2_block(golden) -> None:
    """A fused projection is dealt out by head: 3 * heads * head_dim."""
    text = tpcompile.dump(explained("gpt2"), block="transformer.h.1")
    assert counts(text) == {"all_gather": 2, "reduce_scatter": 2}
    assert "attn.c_attn.weight : bf16[hidden, 3*heads*head_dim] S(heads) = parameter" in text
    golden("gpt2_block", text)


def test_blocks_read_alike() -> None:
    """But for the names of values, a block reads as the next: names are relative to it."""
    texts = [
        re.sub(r"%\w+", "%", tpcompile.dump(explained("llama"), block=f"model.layers.{i}"))
        for i in (1, 2)
    ]
    assert texts[0] == texts[1]


def test_text_is_the_same_in_every_process() -> None:
    """Nothing in a dump depends on hash seeds or addresses: ranks compare it."""
    code = (
        "import models, tpcompile; e = models.plain()\n"
        "print('\\n'.join(tpcompile.stages(e.model, e.inputs, tp=2).values()))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert "0x" not in texts[0]
    assert texts[0].rstrip("\n") == "\n".join(small().values()).rstrip("\n")


def test_stages_are_the_passes() -> None:
    """One text a pass, after that of the capture."""
    assert list(small()) == PASSES
    assert len(small()) == len(PASSES)
    assert "capture" in small()


def test_diff_shows_what_a_pass_did() -> None:
    """insert_collectives adds conversions and rewires their readers, and does nothing else."""
    diff = small().diff("assign_placements", "insert_collectives")
    added = {line.split(" ")[0][1:] for line in diff.splitlines() if re.match(r"\+[%\w]", line)}
    removed = {line.split(" ")[0][1:] for line in diff.splitlines() if re.match(r"-[%\w]", line)}
    new = [line for line in diff.splitlines() if line.split(" ")[0][1:] in added - removed]
    assert new
    assert all(re.search(r"= (copy|all_reduce|all_gather|split)\(", line) for line in new)
    assert removed - added == set()
    assert small().diff("normalize", "normalize") == "\n"


def test_local_shapes_are_written() -> None:
    """After localize a split dim shows its share; one that does not divide, how many units."""
    text = small()["localize"]
    assert text.startswith("# rank 0 of 2\n")
    assert "blocks.0.down.weight : f64[hidden, ffn/2] S(ffn) = parameter" in text
    assert re.search(r"= all_reduce\(%\w+, tp\)", text)
    odd = small(vocab=49)["localize"]
    assert "embed.weight : f64[vocab[25 of 49], hidden] S(vocab) = parameter" in odd


def test_shares_of_a_fused_dim_are_written() -> None:
    """`by=` says in brackets what a collective deals out, where it is not one equal chunk."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Unflatten(-1, (4, 3)), nn.Flatten(-2))
    found = tpcompile.stages(model, torch.ones(2, 4, 8), tp=2, plan={"0.weight": Shard(0)})
    assert re.search(r"all_gather\(%\w+, tp, dim=2, by=\[4\]\*3\)", found["localize"])


def test_split_off_blocks_are_sections() -> None:
    """Blocks that read alike are one section, with parameters under names relative to it."""
    example = models.vit()
    text = tpcompile.stages(example.model, example.inputs, tp=2)["split_blocks"]
    assert re.findall(r"^block (.*):$", text, re.MULTILINE) == ["vit.layers.0, vit.layers.1"]
    assert "  mlp.fc2.weight : f64[hidden, ffn/2] S(ffn) = parameter\n" in text
    assert re.search(r"= call_block\(vit\.layers\.0, %", text)


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    """With labels=ids, ids=ids the embedding reads ids."""
    example = models.plain()
    ids = example.inputs["ids"]
    text = tpcompile.stages(example.model, {"ids": ids, "labels": ids}, tp=2)["capture"]
    assert re.search(r"= embedding\(embed\.weight, ids\)", text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: small()["fuse"],
            f"the stage 'fuse'\n  no pass has that name\n  fix: the stages are {', '.join(PASSES)}",
        ),
        (
            lambda: tpcompile.dump(small(), "pdf"),
            "dump in the form 'pdf'\n  it is not one\n  fix: use text, dot, svg, html, json",
        ),
        (
            lambda: tpcompile.dump(small(), block="blocks.7"),
            "dump of the block 'blocks.7'\n  no block of the program has that path\n"
            "  fix: the blocks are blocks.0, blocks.1",
        ),
        (
            lambda: tpcompile.stages(nn.Linear(2, 2), torch.ones(2, 2), tp=2, rank=2),
            "stages(tp=2, rank=2)\n  ranks are 0 to 1\n  fix: pass one",
        ),
        (
            lambda: tpcompile.dump(nn.Linear(2, 2)),
            "dump of Linear\n  the model has no plan\n"
            "  fix: shard it first, or dump(tpcompile.explain(model, inputs, tp=...))",
        ),
        (
            lambda: tpcompile.graph_module(nn.Linear(2, 2)),
            "the graphs of Linear\n  the model is not sharded\n"
            "  fix: shard it first; tpcompile.stages shows what that would do",
        ),
    ],
)
def test_errors_say_what_there_is(call, text: str) -> None:
    """Each names what was asked, and what could be."""
    with pytest.raises((InputError, TpcompileError)) as error:
        call()
    assert str(error.value) == text


def test_every_run_writes_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TPCOMPILE_DUMP a file a pass, per rank from localize on, and the plan in all forms."""
    monkeypatch.setenv("TPCOMPILE_DUMP", str(tmp_path))
    example = models.Example(models.MLP().double(), {"x": models.token_ids().double()[..., None]})
    example.inputs["x"] = example.inputs["x"].expand(2, 8, 8).contiguous()
    assert tpcompile.verify(example.model, example.inputs, tp=2).ok
    (folder,) = tmp_path.iterdir()
    assert folder.name == "MLP"
    shared = [f"{i:02}_{name}.txt" for i, name in enumerate(PASSES[:12])]
    forms = [f"planned.{form}" for form in ("dot", "html", "json", "svg")]
    own = [f"{i}_{name}.txt" for i, name in enumerate(PASSES[12:-1], 12)]
    assert sorted(p.name for p in folder.iterdir()) == [*shared, *forms, "rank0", "rank1"]
    assert [sorted(p.name for p in (folder / f"rank{r}").iterdir()) for r in (0, 1)] == [own, own]
    text = (folder / "rank1" / "12_localize.txt").read_text()
    assert text.startswith("# rank 1 of 2\n")
    tpcompile.explain(example.model, example.inputs, tp=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MLP", "MLP-2"]


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable a run makes no texts."""
    monkeypatch.delenv("TPCOMPILE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    explained = tpcompile.explain(models.MLP(), torch.ones(2, 4, 8), tp=2)
    assert {stage.dump for stage in explained.program.extra["stages"]} == {""}
    assert list(tmp_path.iterdir()) == []


def test_save_writes_what_the_variable_would(tmp_path: Path) -> None:
    """Stages and forms under the same names."""
    small().save(tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names[:2] == ["00_capture.txt", "01_inline_regions.txt"]
    assert names[-4:] == ["planned.dot", "planned.html", "planned.json", "planned.svg"]
    assert (tmp_path / "out" / "16_split_blocks.txt").read_text() == small()["split_blocks"]


def emitted() -> dict[str, str]:
    """What a rank can print of a sharded model. Runs on ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    example = models.gpt2()
    model = tpcompile.shard(example.model, mesh, example.inputs)
    blocks = model.blocks
    own = tpcompile.shard(models.plain().model, mesh, models.plain().inputs)
    return {
        "root": model.graph_module.print_readable(print_output=False),
        "block": blocks["transformer.h.1"].print_readable(print_output=False),
        "paths": " ".join(blocks),
        "again": tpcompile.blocks(model)["transformer.h.1"].print_readable(print_output=False),
        "dump": tpcompile.dump(model, block="transformer.h.1"),
        "kept": type(own.blocks).__name__,
        "asked": " ".join(tpcompile.blocks(own)),
        "runs": str(bool(model(**example.inputs).loss.isfinite())),
    }


@pytest.fixture(scope="module")
def printed() -> list[dict[str, str]]:
    """What each of two ranks prints."""
    return rank_pools.run_on_ranks("test_dump:emitted", 2)


def test_emitted_graphs_read_well(printed) -> None:
    """`graph_module` and `blocks` print this rank's shapes, modules and placements."""
    found, other = printed
    assert found["paths"] == "transformer.h.0 transformer.h.1"
    assert 'mlp_c_fc_weight: "f64[32, 64]"' in found["block"]  # [hidden, ffn / 2]
    assert re.search(r"in mlp\.c_fc, code: S\(ffn\), column parallel", found["block"])
    assert "tpcompile_runtime_call_block(model, ('transformer', 'h', '0'), 0" in found["root"]
    assert found["block"] == found["again"]
    assert found["dump"] == other["dump"]
    assert found["runs"] == "True"


def test_a_model_keeps_its_own_blocks(printed) -> None:
    """A model with a child called blocks still has it; the function gives the graphs."""
    assert printed[0]["kept"] == "ModuleList"
    assert printed[0]["asked"] == "blocks.0 blocks.1"


def disagree(folder: str) -> str:
    """Shard another model on each rank, and say what is raised. Runs on ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    os.environ["TPCOMPILE_DUMP"] = folder
    try:
        tpcompile.shard(models.MLP(ffn=12 + 4 * dist.get_rank()), mesh, torch.ones(2, 4, 8))
    except TpcompileError as error:
        return type(error).__name__
    finally:
        del os.environ["TPCOMPILE_DUMP"]
    return ""


def test_ranks_that_disagree_each_write_their_plan(ranks, tmp_path: Path) -> None:
    """So that the stages of two ranks can be compared."""
    assert ranks("test_dump:disagree", 2, str(tmp_path)) == ["RankMismatchError"] * 2
    (folder,) = tmp_path.iterdir()
    texts = [(folder / f"rank{r}" / "05_name_dims.txt").read_text() for r in (0, 1)]
    assert ["[12, 8]" in text for text in texts] == [True, False]
