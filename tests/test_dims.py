"""Named dims: products and sums that are unified, how a dim is dealt out, and a model's names."""

import doctest

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import planned

from tpcompile import dims
from tpcompile.dims import (
    Atoms,
    Dim,
    align,
    composite,
    contains,
    decompose,
    keep_apart,
    merge,
    refine,
    segments_of,
    text_of,
)
from tpcompile.layout import join, local_length, take


def named(**sizes: int) -> list[Dim]:
    """A leaf of each size, by name."""
    found = []
    for name, size in sizes.items():
        found.append(Dim(size))
        found[-1].name = name
    return found


def product(*parts: Dim) -> Dim:
    """The dim that is the product of parts, major first."""
    dim = composite(parts, product=True)
    assert dim is not None
    return dim


def total(*parts: Dim) -> Dim:
    """The dim that is the sum of parts."""
    dim = composite(parts, product=False)
    assert dim is not None
    return dim


def test_doctests() -> None:
    """The examples in the docstrings."""
    assert doctest.testmod(dims).failed == 0


def test_equal_sizes_merge() -> None:
    """Two dims of one size become one, and keep the first name."""
    a, b = named(a=6, b=6)
    assert merge(a, b)
    assert a.root() is b.root()
    assert text_of(b) == "a"
    assert not merge(a, Dim(7))


def test_a_view_splits_a_dim() -> None:
    """A fused dim unified with [heads, head_dim] is their product."""
    fused, (heads, dim) = Dim(32), named(heads=4, dim=8)
    assert align([fused], [heads, dim])
    assert text_of(fused) == "heads*dim"
    assert segments_of(fused, heads.root()) == ((1, 4, 8),)
    assert segments_of(fused, dim.root()) == ((4, 8, 1),)


def test_two_views_of_one_dim() -> None:
    """Cuts of two views are both kept where their sizes nest."""
    fused, b, c, (a, d) = Dim(48), Dim(12), Dim(8), named(a=4, d=6)
    assert align([fused], [a, b])
    assert align([fused], [c, d])
    assert text_of(fused) == "a*2*d"
    assert text_of(c) == "a*2"
    assert segments_of(fused, a.root()) == ((1, 4, 12),)


def test_cuts_that_do_not_nest() -> None:
    """6*4 against 4*6 has no common factors: nothing is unified at this op."""
    a, b, c, d = named(a=6, b=4, c=4, d=6)
    assert not align([a, b], [c, d])
    assert not align([a], [b])


def test_a_sum_is_dealt_out_by_a_dim_of_every_term() -> None:
    """A fused q, k, v dim: kv heads split all three, query heads only q."""
    kv, repeats, dim = named(kv=2, repeats=3, dim=4)
    query = product(kv, repeats, dim)
    key, value = product(kv, dim), product(kv, dim)
    fused = total(query, key, value)
    assert text_of(fused) == "kv*repeats*dim+2*kv*dim"
    atoms = Atoms()
    assert atoms.leaves(fused) == {kv, repeats, dim}
    assert atoms.splitting(fused) == {kv, dim}
    assert segments_of(fused, kv) == ((1, 2, 12), (1, 2, 4), (1, 2, 4))
    assert segments_of(fused, dim) == ((6, 4, 1), (2, 4, 1), (2, 4, 1))


def test_sums_are_cut_at_each_others_cuts() -> None:
    """8 + 4 against 6 + 6 becomes 6 + 2 + 4."""
    whole, a, d, (b, c) = Dim(12), Dim(8), Dim(6), named(b=4, c=6)
    assert decompose(whole, [a, b], product=False)
    assert refine([a, b], [c, d])
    assert text_of(whole) == "c+2+b"
    assert text_of(d) == "2+b"


def test_a_dim_twice_in_a_product() -> None:
    """Splitting one dim of a square cannot deal out the square."""
    (side,) = named(side=4)
    square = product(side, side)
    assert Atoms().splitting(square) == set()
    assert Atoms().leaves(square) == {side}


def test_rivals_never_merge() -> None:
    """Both dims of a weight matrix stay two dims, also through others."""
    a, b, c = named(a=8, b=8, c=8)
    keep_apart([a, b])
    assert not merge(a, b)
    assert merge(a, c)
    assert not merge(c, b)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Dim, Dim]:
    """A dim made of leaves, and a leaf by which it can be dealt out."""
    leaves = [Dim(draw(st.integers(2, 5))) for _ in range(3)]
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=3, unique=True))
        terms.append(product(*parts))
    dim = total(*terms)
    ways = sorted(Atoms().splitting(dim), key=lambda d: d.serial)
    assume(ways)
    return dim, draw(st.sampled_from(ways))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=dealt(), size=st.integers(1, 4))
def test_dealing_out_and_back(case: tuple[Dim, Dim], size: int) -> None:
    """The parts of all ranks are everything once, and the leaf's index says whose it is."""
    dim, atom = case
    segments = segments_of(dim, atom)
    assert contains(dim, atom)
    assert sum(outer * units * inner for outer, units, inner in segments) == dim.size
    whole = torch.arange(dim.size)
    parts = [take(whole, 0, segments, size, rank) for rank in range(size)]
    assert [len(part) for part in parts] == [local_length(segments, size, r) for r in range(size)]
    assert torch.equal(join(parts, 0, segments), whole)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=4), cut=st.data())
def test_aligned_products_are_equal(shape: list[int], cut: st.DataObject) -> None:
    """After a view to merged neighbours, every merged dim is the product of what it merged."""
    leaves = [Dim(size) for size in shape]
    ends = cut.draw(st.lists(st.booleans(), min_size=len(shape) - 1, max_size=len(shape) - 1))
    groups: list[list[Dim]] = [[leaves[0]]]
    for leaf, joined in zip(leaves[1:], ends, strict=True):
        groups[-1].append(leaf) if joined else groups.append([leaf])
    merged = []
    for group in groups:
        size = 1
        for leaf in group:
            size *= leaf.size
        merged.append(Dim(size))
    assert align(merged, leaves)
    for dim, group in zip(merged, groups, strict=True):
        assert Atoms().leaves(dim) == {leaf.root() for leaf in group}


def parameter_dims(name: str) -> dict[str, str]:
    """Parameter of an architecture -> the named dims of it."""
    program = planned(name)
    return {
        program.leaves[node.name].name: ", ".join(map(text_of, node.meta["dims"][0]))
        for node in program.placeholders("parameter")
    }


def test_names_in_fused_weights() -> None:
    """q, k and v of unequal widths in one weight, gate and up in another."""
    found = parameter_dims("plain")
    query, key = "blocks.1.kv_heads*blocks.1.q_per_kv*head_dim", "blocks.1.kv_heads*head_dim"
    assert found["embed.weight"] == "vocab, hidden"
    assert found["blocks.1.qkv.weight"] == f"{query}+2*{key}, hidden"
    assert found["blocks.1.out.weight"] == f"hidden, {query}"
    assert found["blocks.1.gate_up.weight"] == "2*blocks.1.ffn, hidden"
    assert found["blocks.1.down.weight"] == "hidden, blocks.1.ffn"
    assert found["blocks.1.norm2.weight"] == "hidden"
    assert found["head.weight"] == "head.vocab, hidden"


def test_names_in_llama() -> None:
    """Query heads are kv heads times their repeats; every layer has heads and ffn of its own."""
    found = parameter_dims("llama")
    for layer in ("layers.0", "layers.1"):
        query, key = f"{layer}.kv_heads*{layer}.q_per_kv*head_dim", f"{layer}.kv_heads*head_dim"
        attention, mlp = f"model.{layer}.self_attn", f"model.{layer}.mlp"
        assert found[f"{attention}.q_proj.weight"] == f"{query}, hidden"
        assert found[f"{attention}.k_proj.weight"] == f"{key}, hidden"
        assert found[f"{attention}.v_proj.weight"] == f"{key}, hidden"
        assert found[f"{attention}.o_proj.weight"] == f"hidden, {query}"
        assert found[f"{mlp}.gate_proj.weight"] == f"{layer}.ffn, hidden"
        assert found[f"{mlp}.down_proj.weight"] == f"hidden, {layer}.ffn"


def test_a_tied_head_has_the_embeddings_vocabulary() -> None:
    """In GPT-2 the logits are by the very dim that the tokens index."""
    program = planned("gpt2")
    heads = [n for n in program.calls() if "rule" in n.meta and n.meta["path"] == "lm_head"]
    assert {text_of(node.meta["dims"][0][-1]) for node in heads} == {"vocab"}
