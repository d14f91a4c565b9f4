"""An `Explanation` as text: totals, then one table each of parameters, traffic, memory and time.

The explanation is `Any` here, as its module imports this one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from tpcompile.formulas import bytes_text, seconds_text
from tpcompile.traffic import folded

_PLAIN: dict[str, Any] = {"disable_numparse": True}


def full_text(explanation: Any) -> str:
    """All sections."""
    sections = [
        _totals(explanation),
        _parameters(explanation),
        _collectives(explanation),
        _against_megatron(explanation),
        _memory(explanation),
        _times(explanation),
        _pins(explanation),
        _replicated(explanation),
    ]
    return "\n\n".join(section for section in sections if section)


def _totals(e: Any) -> str:
    solver, graph = e.certificate
    agreed = "the same" if solver == graph else seconds_text(graph)
    elements = sum(_numel(row.shape) for row in e.parameters)
    sizes = ", ".join(f"{k} = {v}" for k, v in e.symbols.values.items())
    slow = sorted(e.phases.items(), key=lambda item: -item[1])
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in slow[:4])
    lines = [
        f"{e.size} ranks of {e.hardware.name}, {elements:,} parameters in {len(e.blocks)} blocks",
        f"sizes: {sizes}",
        f"sequence parallelism: {e.sequence_parallel}",
        f"certificate: {seconds_text(solver)} by the solver, {agreed} added up over the graph "
        "(time, and what memory is worth)",
        f"planned in {sum(e.phases.values()):.2f} s of CPU time: {phases}",
        *(f"note: {note}" for note in e.program.notes),
    ]
    return "\n".join(lines)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _parameters(e: Any) -> str:
    counts: Counter[tuple[str, ...]] = Counter(
        (
            folded(row.name),
            *(_shape(row.shape), _shape(row.local), row.style),
            *(folded(row.placement), folded_words(row.reason)),
        )
        for row in e.parameters
    )  # fmt: skip
    rows = [(*key, f"x {n}" if n > 1 else "") for key, n in counts.items()]
    headers = ["parameter", "global", "local", "style", "placement", "why", ""]
    return tabulate(rows, headers, **_PLAIN)


def folded_words(text: str) -> str:
    """A sentence with `*` for the numbers of blocks in its paths.

    >>> folded_words("makes layers.3.ffn of 2.5 MiB")
    'makes layers.*.ffn of 2.5 MiB'
    """
    return " ".join(folded(w) if not w[:1].isdigit() else w for w in text.split(" "))


def _collectives(e: Any) -> str:
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    homes: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for s in e.collectives:
        key = (
            s.kind, s.direction, folded_words(s.tensor), folded(s.path), s.formula, s.nbytes,
            folded_words(s.reason),
        )  # fmt: skip
        groups[key].append(s.calls)
        homes[key].add(s.block)
    rows = []
    for key, calls in groups.items():
        kind, direction, tensor, path, formula, nbytes, reason = key
        inside = homes[key] - {""}
        each = f"{sum(calls) / len(inside):g}" if inside and homes[key] == inside else ""
        rows.append(
            (
                kind,
                direction,
                tensor,
                path,
                str(formula),
                bytes_text(nbytes),
                each,
                sum(calls),
                reason,
            )
        )
    headers = ["collective", "pass", "tensor", "module", "bytes a rank sends", "here", "a block",
               "all", "because"]  # fmt: skip
    return tabulate(rows, headers, **_PLAIN)


def _against_megatron(e: Any) -> str:
    theirs: Counter[tuple[str, str]] = Counter()
    for counts in e.megatron.values():
        theirs.update(counts)
    if not e.counts and not theirs:
        return ""
    ours, first = typical(_by_block(e)), typical(e.megatron)
    rows = [
        (kind, direction, ours[direction, kind], first[direction, kind],
         e.counts[direction, kind], theirs[direction, kind])
        for direction, kind in sorted(e.counts.keys() | theirs.keys(), reverse=True)
    ]  # fmt: skip
    recipe = "with sequence parallelism" if e.scattered else "without sequence parallelism"
    headers = ["collective", "pass", "a block", "Megatron's", "all", "Megatron's"]
    note = (
        f"Megatron's: what Megatron-LM {recipe} sends for the same weights. Beside that, it too\n"
        "reduces gradients of norms, three times in its cross entropy, and what leaves the model."
    )
    return f"{tabulate(rows, headers, **_PLAIN)}\n{note}"


def _by_block(e: Any) -> dict[str, Counter[tuple[str, str]]]:
    found: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for s in e.collectives:
        found[s.block][s.direction, s.kind] += s.calls
    return found


def typical(blocks: Mapping[str, Counter[tuple[str, str]]]) -> Counter[tuple[str, str]]:
    """What most blocks have: the first may also gather what the embedding gave."""
    kinds = Counter(tuple(sorted(c.items())) for block, c in blocks.items() if block)
    most = max(kinds.values(), default=0)
    usual = [dict(each) for each, n in kinds.items() if n == most]
    return Counter(min(usual, key=lambda each: sum(each.values()), default={}))


def _memory(e: Any) -> str:
    memory = e.memory
    rows = []
    for kind in memory.single:
        one, rank = memory.single[kind], memory.rank[kind]
        label = f"optimizer ({memory.optimizer})" if kind == "optimizer" else kind
        label = "saved activations" if kind == "activations" else label
        rows.append((label, bytes_text(one), bytes_text(one / e.size), bytes_text(rank)))
    whole, ideal = bytes_text(memory.single_total), bytes_text(memory.single_total / e.size)
    rows.append(("total", whole, ideal, bytes_text(memory.total)))
    blocks = {folded(b): n for b, n in memory.by_block.items() if b}
    per = "".join(
        f"\n{block} saves {bytes_text(n)} of activations each" for block, n in blocks.items()
    )
    return tabulate(rows, ["memory", "one device", f"1/{e.size} of it", "a rank"], **_PLAIN) + per


def _times(e: Any) -> str:
    times = e.times
    kinds = ", ".join(f"{k} {seconds_text(v)}" for k, v in times.by_kind.items() if k)
    rows = [
        ("compute", seconds_text(times.compute), ""),
        ("communication", seconds_text(times.communication), kinds),
        ("exposed communication", seconds_text(times.communication), "ranks wait for each of them"),
        ("forward and backward", seconds_text(times.step), ""),
    ]
    return tabulate(rows, ["predicted time", "", ""], **_PLAIN)


def _pins(e: Any) -> str:
    if not e.pins:
        return ""
    rows = [(p.pin, str(p.extra)) for p in e.pins]
    return tabulate(rows, ["pinned by plan=", "against the cheapest plan without it"], **_PLAIN)


def _replicated(e: Any) -> str:
    counts = Counter((op, folded(path), reason) for op, path, reason in e.replicated)
    rows = [(*key, n) for key, n in counts.items()]
    return tabulate(rows, ["whole on every rank", "module", "why", ""], **_PLAIN) if rows else ""
