"""Scaled dot product attention."""

from typing import Any

from torch import randn

from tpcompile.ops.equations import Shaped, aten, equation
from tpcompile.rule import Rule, rule


@rule(
    *aten("scaled_dot_product_attention"),
    samples=[
        lambda: (randn(2, 4, 6, 8), randn(2, 4, 5, 8), randn(2, 4, 5, 3)),
        lambda: (randn(2, 4, 6, 8), randn(2, 4, 6, 8), randn(2, 4, 6, 8), None, 0.0, True),
        lambda: (randn(2, 4, 6, 8), randn(2, 4, 6, 8), randn(2, 4, 6, 8), randn(2, 1, 6, 6)),
        lambda: (randn(2, 4, 6, 8), randn(2, 4, 6, 8), randn(2, 4, 6, 8), randn(6, 6)),
        lambda: (
            *(randn(2, 8, 6, 4), randn(2, 4, 6, 4), randn(2, 4, 6, 4), randn(2, 8, 6, 6) > -1),
            {"enable_gqa": True, "scale": 0.3},
        ),
        lambda: (
            *(randn(2, 4, 6, 4), randn(2, 1, 6, 4), randn(2, 1, 6, 4)),
            {"enable_gqa": True, "is_causal": True},
        ),
        lambda: (randn(4, 6, 8), randn(4, 6, 8), randn(4, 6, 8)),
        lambda: (randn(8, 6, 4), randn(4, 6, 4), randn(4, 6, 4), {"enable_gqa": True}),
    ],
)
def scaled_dot_product_attention(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    attn_mask: Shaped | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Rule | None:
    """query: [*b, h, s, d], key: [*b, h, t, d], value: [*b, h, t, e] -> [*b, h, s, e].

    With grouped queries the query heads are (h r). Heads split freely, queries where no causal
    mask counts them; keys never do.
    """
    if dropout_p:
        return None
    grouped = kwargs.get("enable_gqa", False) and key.shape[-3] not in (1, query.shape[-3])
    lead = "*b h " if query.ndim > 3 or grouped else "*b "
    q_lead = lead.replace("h", "(h r)") if grouped else lead
    masks = [] if attn_mask is None else [attn_mask]
    if attn_mask is None:
        mask = ""
    elif attn_mask.ndim <= 2:
        mask = ", s t" if attn_mask.ndim == 2 else ", t"
    else:
        mask = f", {q_lead}s t"
    text = f"{q_lead}s d, {lead}t d, {lead}t e{mask} -> {q_lead}s e"
    return equation(
        text,
        *(query, key, value, *masks),
        whole="t d e s" if is_causal else "t d e",
        sizes={"r": query.shape[-3] // key.shape[-3]} if grouped else {},
        linear=((2,),),
    )
