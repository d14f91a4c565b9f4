"""Sizes with a maximum or a division in them, and the guards that make them plain."""

import pytest
import torch
from torch import nn

import tpcompile
from tpcompile.planning import captured
from tpcompile.size_check import size_check


class Sliced(nn.Module):
    """A linear on a part of the input that depends on its length."""

    def __init__(self, part) -> None:
        super().__init__()
        self.part, self.up, self.down = part, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        """[b, s, 8] -> [b, n, 8]."""
        return self.down(self.up(self.part(x)).relu())


CASES = {
    "last, of more": (lambda x: x[:, -4:], 6, [4, 9], [3]),
    "last, of fewer": (lambda x: x[:, -4:], 3, [2], [5]),
    "quotient": (lambda x: x.repeat(1, 2, 1).view(x.shape[0], 2, -1, 8), 6, [3, 9], []),
}


@pytest.mark.parametrize("name", CASES)
def test_lengths_that_fit(name: str) -> None:
    """One capture is for all lengths that take the same way, and is right for them."""
    part, length, fit, other = CASES[name]
    torch.manual_seed(0)
    model = Sliced(part).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    program = captured(model, (x[:, :length],), {})
    assert not [note for note in program.notes if "fixed" in note]
    fits = size_check(program)
    assert [n for n in (*fit, *other) if fits(x[:, :n])] == fit
    assert tpcompile.verify(model, (x[:, :length],), tp=2).ok
