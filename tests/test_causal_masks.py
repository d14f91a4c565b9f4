"""Which masks attention is told to be causal, and that the numbers stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpcompile
from tpcompile import pipeline
from tpcompile.planning import captured

SDPA = torch.ops.aten.scaled_dot_product_attention.default


class Attention(nn.Module):
    """One head on the input, with a mask of its own making."""

    def __init__(self, mask) -> None:
        super().__init__()
        self.mask = mask
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        """[b, s, 8] -> [b, s, 8]."""
        rows = torch.arange(x.shape[1])[:, None]
        h = x[:, None]
        return self.out(F.scaled_dot_product_attention(h, h, h, self.mask(rows, rows.mT, x))[:, 0])


def least(allowed):
    """A float mask: 0 where allowed."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))


MASKS = {
    "causal": (lambda rows, columns, x: columns <= rows, True),
    "of floats": (lambda rows, columns, x: least(columns <= rows), True),
    "expanded": (lambda rows, columns, x: (columns <= rows).expand(x.shape[0], 1, -1, -1), True),
    "window": (lambda rows, columns, x: (columns <= rows) & (columns > rows - 4), False),
    "wide window": (lambda rows, columns, x: (columns <= rows) & (columns > rows - 900), False),
    "wider than tried": (
        lambda rows, columns, x: (columns <= rows) & (rows - columns < 9e4),
        False,
    ),
    "all": (lambda rows, columns, x: columns < x.shape[1], False),
    "strict": (lambda rows, columns, x: (columns < rows) | (columns == 0), False),
    "of the input": (lambda rows, columns, x: (columns <= rows) & (x[:, None, :, :1] > -9), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    """Only what is causal at every length is called so; one device gives the same numbers."""
    mask, causal = MASKS[name]
    torch.manual_seed(0)
    model = Attention(mask).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    program = captured(model, (x,), {})
    assert pipeline.NORMALIZE[-1].__name__ == "find_causal_masks"
    (attention,) = program.calls(SDPA)
    assert (attention.args[3:] == (None, 0.0, True)) == causal
    assert tpcompile.verify(model, (x,), tp=2).ok
