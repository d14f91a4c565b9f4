"""What `lint` says of plans for a small Llama and others."""

import pytest
from test_exchange import inputs, small

from tpcompile.lint import Finding, LintReport, lint


def found(family: str, tp: int = 2, plan: dict[str, str] | None = None, **changes) -> LintReport:
    """The report on a plan, the model's own if none is given."""
    model = small(family, **changes)
    return lint(plan or model.tp_plan, model, inputs(family), tp=tp)


def changed(**styles: str) -> dict[str, str]:
    """Llama's own plan with other styles for some modules; "" takes one out."""
    plan = dict(small("llama").tp_plan)
    for name, style in styles.items():
        key = next(known for known in plan if known.endswith(name))
        plan.pop(key)
        if style:
            plan[key] = style
    return plan


def test_a_shipped_plan_is_right_and_dearer() -> None:
    """Nothing is wrong with Llama's plan; every q, k and v reduces its own input gradient."""
    report = found("llama")
    assert report.ok
    assert report.findings == ()
    assert report.theirs.weights == report.ours.weights
    # 2 layers: 5 column and 2 row modules; embedding, head's gather and its input's gradient.
    assert report.theirs.collectives == 2 * 7 + 3
    assert report.ours.collectives < report.theirs.collectives
    assert report.theirs.communication > report.ours.communication
    assert str(report).startswith("nothing to say\n\nper rank, tp=2, h100-nvlink")
    assert report.to_json()["theirs"]["collectives"] == 17


def test_weights_left_whole_are_missed() -> None:
    """Without the embedding's entry every rank has all of it."""
    report = found("llama", plan=changed(embed_tokens=""))
    assert report.ok
    text = "left whole: 8.0 KiB more a rank than split"
    assert report.findings == (Finding("warning", "model.embed_tokens.weight", text),)
    assert report.theirs.weights - report.ours.weights == 64 * 32 * 8 // 2


def test_needless_gathers() -> None:
    """Gathering between up and down costs traffic and changes nothing."""
    plan = changed(
        gate_proj="colwise_gather_output",
        up_proj="colwise_gather_output",
        down_proj="rowwise_split_input",
    )
    report = found("llama", plan=plan)
    assert report.ok
    assert {(f.level, f.text) for f in report.findings} == {
        ("warning", "colwise_gather_output is needless: colwise computes the same"),
        ("warning", "rowwise_split_input is needless: rowwise computes the same"),
    }
    assert report.theirs.traffic > found("llama").theirs.traffic


def test_fewer_key_heads_than_ranks_is_an_error() -> None:
    """Two key heads on four ranks: each would get half a head."""
    report = found("llama", tp=4)
    assert not report.ok
    errors = {f.name: f.text for f in report.findings if f.level == "error"}
    name = "model.layers.*.self_attn.k_proj"
    assert errors[name].startswith(
        f"reshape gets 1/4 of the 16 features of {name}, "
        "but 2 of model.layers.*.self_attn.kv_heads cannot be dealt to 4 ranks (modeling_llama.py:"
    )
    assert "this plan, if it ran" in str(report)


def test_a_plan_that_mixes_up_tokens_is_an_error() -> None:
    """OPT's view(b, -1, heads, d) runs on half the heads and takes tokens for them."""
    base = "model.decoder.layers.*.self_attn."
    plan = dict.fromkeys((f"{base}{name}_proj" for name in "qkv"), "colwise")
    report = found("opt", plan=plan | {f"{base}out_proj": "rowwise"})
    assert not report.ok
    assert any(f.text.startswith("its code fails on a rank's part") for f in report.findings)


def test_a_gradient_that_is_not_reduced_is_an_error() -> None:
    """Qwen3's q_norm sees only the rank's heads; without its style its gradient is partial."""
    plan = {name: style for name, style in small("qwen3").tp_plan.items() if "q_norm" not in name}
    report = found("qwen3", plan=plan)
    name = "model.layers.*.self_attn.q_norm"
    assert [(f.level, f.name) for f in report.findings] == [("error", name)]
    assert report.findings[0].text.startswith(f"the gradient of {name}.weight would be a partial")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            {"model.layers.0.mlp.up_proj": "colwise"},
            "matches nothing: layers are named by *, never by number; "
            "write model.layers.*.mlp.up_proj",
        ),
        (
            {"model.layers.*.mlp.uproj": "colwise"},
            "matches no module of LlamaForCausalLM; did you mean model.layers.*.mlp.up_proj?",
        ),
        ({"model.norm": "colwise"}, "colwise does not fit a LlamaRMSNorm"),
        ({"lm_head": "embedding_rowwise"}, "embedding_rowwise does not fit a Linear"),
        (
            {"lm_head": "colwize"},
            "no style is called 'colwize'; there are colwise, colwise_gather_output, colwise_rep, "
            "packed_colwise, rowwise, rowwise_split_input, rowwise_rep, embedding_rowwise, "
            "embedding_colwise, replicated_with_grad_allreduce, replicate, all_reduce, "
            "local_params, mla_kv_a_proj, moe_identity_expert, moe_tp_experts, packed_rowwise, "
            "sequence_parallel",
        ),
    ],
)
def test_entries_that_do_not_fit(entry: dict[str, str], text: str) -> None:
    """Each says what is wrong with it."""
    report = found("llama", plan=dict(small("llama").tp_plan) | entry)
    assert Finding("error", next(iter(entry)), text) in report.findings


def test_styles_that_are_not_followed_are_noted() -> None:
    """A style for experts is not judged, and said not to be."""
    plan = dict(small("llama").tp_plan) | {"model.layers.*.mlp": "moe_tp_experts"}
    report = found("llama", plan=plan)
    note = Finding("note", "model.layers.*.mlp", "moe_tp_experts is not checked here")
    assert report.ok
    assert report.findings == (note,)
