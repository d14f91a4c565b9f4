"""`explain`: numbers against hand calculation, and a reason for everything."""

import json
import resource
import time

import pytest
import torch
from models import MODELS, plain
from torch import Tensor, nn

import tpcompile
from tpcompile import Explanation, InputError
from tpcompile.dims import text_of
from tpcompile.program import operands
from tpcompile.reasons import refusal

transformers = pytest.importorskip("transformers")

BATCH, SEQ = 2, 2048
GPT3 = {"hidden": 12288, "heads": 96, "ffn": 4 * 12288, "vocab": 50304, "layers": 96}
LLAMAS = {
    "8b": {"hidden": 4096, "heads": 32, "kv": 8, "ffn": 14336, "layers": 32},
    "70b": {"hidden": 8192, "heads": 64, "kv": 8, "ffn": 28672, "layers": 80},
    "405b": {"hidden": 16384, "heads": 128, "kv": 8, "ffn": 53248, "layers": 126},
}
VOCAB = 128256


def llama(size: str, layers: int) -> nn.Module:
    """A Llama-3 in bfloat16 without memory."""
    shape = LLAMAS[size]
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
        num_hidden_layers=layers, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def gpt3(layers: int) -> nn.Module:
    """GPT-3 175B in bfloat16 without memory."""
    config = transformers.GPT2Config(
        vocab_size=GPT3["vocab"], n_positions=SEQ, n_embd=GPT3["hidden"], n_head=GPT3["heads"],
        n_layer=layers, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config).to(torch.bfloat16)


def explained(model: nn.Module, tp: int, **options: object) -> Explanation:
    """With a loss, and no cache."""
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return tpcompile.explain(model, inputs, tp=tp, **options)


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_llama_by_hand(size: str) -> None:
    """Weights of a rank, bytes of every all-reduce, and Megatron's two and two a block."""
    shape, layers, t = LLAMAS[size], 2, 8
    hidden, head_dim = shape["hidden"], shape["hidden"] // shape["heads"]
    e = explained(llama(size, layers), t, sequence_parallel=False)
    attention = hidden * head_dim * (2 * shape["heads"] + 2 * shape["kv"])
    matrices = layers * (attention + 3 * hidden * shape["ffn"]) + 2 * VOCAB * hidden
    norms = (2 * layers + 1) * hidden
    assert e.memory.single["weights"] == 2 * (matrices + norms)
    assert e.memory.rank["weights"] == 2 * (matrices // t + norms)
    assert e.memory.rank["optimizer"] == 2 * e.memory.rank["weights"]
    volume = 2 * BATCH * SEQ * hidden * (t - 1) / t * 2
    inside = [s for s in e.collectives if s.block]
    assert {(s.kind, s.nbytes) for s in inside} == {("all_reduce", volume)}
    assert {str(s.formula) for s in inside} == {"4*b*hidden*s*(t - 1)/t"}
    assert e.counts["forward", "all_reduce"] == 2 * layers + 1 + 2  # embedding, cross entropy
    assert e.counts["backward", "all_reduce"] == 2 * layers + 1  # head
    for block in e.blocks:
        wanted = {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
        assert e.megatron[block] == wanted
    names = {str(symbol): n for symbol, n in e.symbols.values.items()}
    known = {"b": BATCH, "s": SEQ, "hidden": hidden, "ffn": shape["ffn"], "vocab": VOCAB, "t": t}
    assert known.items() <= names.items()


def test_gpt3_by_hand() -> None:
    """A fused qkv, biases, learned positions and a tied head; eight ranks."""
    layers, t, hidden = 2, 8, GPT3["hidden"]
    e = explained(gpt3(layers), t, sequence_parallel=False)
    tables = (GPT3["vocab"] + SEQ) * hidden  # rows of both are split
    matrices = layers * 12 * hidden**2 + tables
    split = layers * (3 * hidden + GPT3["ffn"])  # biases of qkv and of the first half of the MLP
    whole = layers * (2 * hidden + 4 * hidden) + 2 * hidden
    assert e.memory.single["weights"] == 2 * (matrices + split + whole)
    assert e.memory.rank["weights"] == 2 * ((matrices + split) // t + whole)
    volume = 2 * BATCH * SEQ * hidden * (t - 1) / t * 2
    assert {s.nbytes for s in e.collectives if s.block} == {volume}
    assert e.counts["backward", "all_reduce"] == 2 * layers + 1


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    """A reduce-scatter and an all-gather send what an all-reduce sends, and keep less."""
    model = llama("8b", 2)
    plainly = explained(model, 8, sequence_parallel=False)
    scattered = explained(model, 8, sequence_parallel=True)
    assert scattered.sequence_parallel == "yes"
    sent = [
        sum(s.nbytes * s.calls for s in e.collectives if "gradient" not in s.tensor)
        for e in (plainly, scattered)
    ]
    assert sent[0] == sent[1]
    assert scattered.memory.rank["activations"] < plainly.memory.rank["activations"]
    for block in scattered.blocks:
        assert set(scattered.megatron[block].values()) == {2}


@pytest.mark.slow
def test_405b_is_explained_on_a_laptop() -> None:
    """126 layers in 120 s of CPU time and 8 GiB, of which less than a tenth is the solver's."""
    begin = time.process_time()
    e = explained(llama("405b", 126), 8)
    text = str(e)
    spent = time.process_time() - begin
    assert spent < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20
    assert e.phases["assign_placements"] < 0.1 * spent
    assert "405,853,388,800 parameters in 126 blocks" in text
    assert "x 126" in text
    assert len(text.splitlines()) < 80


@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name in sorted(MODELS) for tp in (2, 64)])
def test_nothing_is_replicated_without_a_reason(name: str, tp: int) -> None:
    """Every row says why, and the text has every row."""
    example = MODELS[name]()
    e = tpcompile.explain(example.model, example.inputs, tp=tp)
    assert len(e.parameters) == len(list(example.model.parameters()))
    assert all(row.reason for row in e.parameters)
    text = str(e)
    assert all(row.style in text for row in e.parameters)
    if tp == 64:
        weights = [r for r in e.parameters if len(r.shape) > 1 and r.style == "replicated"]
        assert all("64 ranks" in row.reason or "no weight" in row.reason for row in weights)


def test_text_of_a_small_model(golden) -> None:
    """All sections; a golden text, but for the seconds that planning took."""
    example = plain()
    e = tpcompile.explain(
        example.model,
        example.inputs,
        tp=2,
        sequence_parallel=False,
        plan={"head.weight": "Replicate"},
    )
    lines = [line for line in str(e).splitlines() if not line.startswith("planned in")]
    golden("explain_plain", "\n".join(line.rstrip() for line in lines))


def test_json_has_all_of_it() -> None:
    """It can be written, and says what the attributes say."""
    example = plain()
    e = tpcompile.explain(example.model, example.inputs, tp=2)
    data = json.loads(json.dumps(e.to_json()))
    assert data["degree"] == 2
    assert data["memory"]["total"] == e.memory.total
    assert len(data["traffic"]) == len(e.collectives)
    assert data["parameters"].keys() == data["parameter_reasons"].keys()
    assert data["times"]["step"] == e.times.step


def test_op_without_a_rule_is_listed_with_its_reason() -> None:
    """Also in the row of the parameter that it keeps whole; strict=True refuses it."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.linalg.qr(self.weight)[0]

    with pytest.warns(UserWarning, match="no rule"):
        e = tpcompile.explain(Odd(), (torch.randn(2, 4, 8),), tp=2)
    (op, _, reason) = e.replicated[0]
    assert op.startswith("aten.linalg_qr")
    assert reason == "a decomposition of whole matrices"
    assert e.parameters[0].reason == "linalg_qr a decomposition of whole matrices"
    with pytest.raises(tpcompile.UnsupportedOpError):
        tpcompile.explain(Odd(), (torch.randn(2, 4, 8),), tp=2, strict=True)


@pytest.mark.parametrize(
    ("seq", "option", "reason"),
    [
        (7, True, "no: seq: 7 is not divisible by 2"),
        (8, False, "no: sequence_parallel=False"),
        (8, True, "yes"),
    ],
)
def test_why_there_is_no_sequence_parallelism(seq: int, option: bool, reason: str) -> None:
    """Not divisible, or not asked for."""
    example = plain(seq=seq)
    e = tpcompile.explain(example.model, example.inputs, tp=2, sequence_parallel=option)
    assert e.sequence_parallel == reason
    assert f"sequence parallelism: {reason}" in str(e)


def plain_explained(**options: object) -> Explanation:
    """Of the plain decoder on two ranks."""
    example = plain()
    return tpcompile.explain(example.model, example.inputs, tp=2, **options)


def test_why_of_a_parameter() -> None:
    """Its chain leads from the column to the row; alternatives have exact prices."""
    e = plain_explained(sequence_parallel=False)
    reason = e.why("blocks.0.out.weight")
    assert reason.choice == "S(blocks.0.kv_heads)"
    assert reason.chain[0].endswith("blocks.0.qkv")
    assert reason.chain[-1] == "linear (sums over blocks.0.kv_heads) in blocks.0.out"
    replicated = next(a for a in reason.alternatives if a.text == "R")
    pinned = plain_explained(sequence_parallel=False, plan={"blocks.0.out.weight": "Replicate"})
    assert replicated.extra.price == pytest.approx(pinned.plan.seconds - e.plan.seconds)
    assert "more on a rank" in replicated.reason
    assert str(reason).startswith("blocks.0.out.weight: S(blocks.0.kv_heads)\n  tied to: ")


def test_why_of_a_pinned_parameter() -> None:
    """It says by what, and what that costs."""
    e = plain_explained(plan={"head.weight": "Replicate"})
    assert e.why("head.weight").choice == (
        f"R, pinned by plan= as 'head.weight' as Replicate: {e.pins[0].extra}"
    )
    assert e.why("head.weight").alternatives[0].reason == "plan= pins it elsewhere"


def test_why_of_what_an_op_refuses() -> None:
    """The embedding cannot be split by its width, and says so."""
    reasons = [a.reason for a in plain_explained().why("embed.weight").alternatives]
    assert any("embedding in embed refuses S(hidden)" in reason for reason in reasons)


def test_why_of_every_collective_and_op() -> None:
    """Each has a reason; what passes removed beside it is told."""
    example = MODELS["llama"]()  # q, k and v of one value
    e = tpcompile.explain(example.model, example.inputs, tp=2)
    removed = []
    for name in dict.fromkeys(s.name for s in e.collectives):
        reason = e.why(name)
        assert str(reason).startswith(f"{name}: ")
        assert reason.alternatives
        removed += reason.removed
    assert removed
    assert all(line in e.program.extra["removed"] for line in removed)
    for node in e.program.extra["assignment"].strategies:
        refused = [a for a in e.why(node.name).alternatives if a.extra is None]
        assert all(a.reason for a in refused)
        break


def test_why_of_something_unknown() -> None:
    """The error knows what was meant."""
    with pytest.raises(InputError) as error:
        plain_explained().why("blocks.0.outt.weight")
    assert str(error.value).startswith(
        "why('blocks.0.outt.weight').\n"
        "  the plan has no parameter, op or collective of that name.\n"
        "  fix: did you mean blocks.0.out.weight"
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_refusals_are_those_of_the_choice(name: str) -> None:
    """An op refuses a dim in words exactly where it has no strategy that splits it."""
    example = MODELS[name]()
    e = tpcompile.explain(example.model, example.inputs, tp=2)
    plan = e.program.extra["assignment"]
    for node, strategies in plan.problem.strategies.items():
        if node.meta["rule"] is None:
            continue
        splits = {s.split for s in strategies} - {None}
        dims = [d for n in operands(node) for d in n.meta["dims"][0]]
        dims += [d for each in node.meta["dims"] for d in each]
        leaves = {leaf for d in dims for leaf in plan.choices.atoms.leaves(d)}
        for leaf in leaves:
            assert (refusal(node, leaf, plan.choices) == "") == (leaf in splits), text_of(leaf)
