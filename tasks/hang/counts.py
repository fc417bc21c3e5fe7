"""Launch counts of the ranks of one communicator: who is behind, who is ahead.

Everything here takes `{communicator rank: Counts}`. A function that a rank does not name counts as 0 there:
a collective that only one rank ever launched is a mismatch too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import gt, lt

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")

Counts = tuple[tuple[str, int], ...]  # (function, launches), functions in NCCL's order


def launches(counts: Counts, function: str) -> int:
    """Launches of one collective function."""
    return dict(counts).get(function, 0)


def skewed(ranks: Mapping[int, Counts]) -> tuple[str, ...]:
    """The functions of which the ranks launched different numbers, in NCCL's order, others after them."""
    distinct = [dict(counts) for counts, _ in grouped(ranks)]
    named = {function for counts in distinct for function in counts}
    ordered = [*(f for f in FUNCTIONS if f in named), *sorted(named.difference(FUNCTIONS))]
    return tuple(f for f in ordered if len({counts.get(f, 0) for counts in distinct}) > 1)


def minority(ranks: Mapping[int, Counts]) -> tuple[int, ...]:
    """Ranks whose counts differ from the most common ones; empty where all are equal.

    Of equally common ones the higher counts are taken as common.
    """
    tally = Counter(ranks.values())
    if len(tally) <= 1:
        return ()
    common = max(tally, key=lambda counts: (tally[counts], sum(n for _, n in counts), counts))
    return tuple(sorted(rank for rank, counts in ranks.items() if counts != common))


def sides(ranks: Mapping[int, Counts]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tell who is behind from who is ahead.

    Lagging ranks launched fewer of some function than the leaders, and more of none. Where that singles
    nobody out (a rank launched another function than its peers, so that everyone is ahead in one and behind
    in the other), the ranks that differ from the most common counts are the lagging ones.

    Returns:
        (lagging, leading) ranks, both sorted, both empty where all are equal.
    """
    return sides_of(grouped(ranks))


Groups = Sequence[tuple[Counts, Sequence[int]]]  # counts, and the ranks that have them


def grouped(ranks: Mapping[int, Counts]) -> list[tuple[Counts, list[int]]]:
    """The ranks by what they launched, told by the identity of the value: ranks that launched the same mostly
    share it, and to hash each takes longer than all that is done with them. So two groups may be equal.
    """
    found: dict[int, tuple[Counts, list[int]]] = {}
    for rank, counts in ranks.items():
        known = found.get(id(counts))
        if known is None:
            found[id(counts)] = counts, [rank]
        else:
            known[1].append(rank)
    return list(found.values())


def sides_of(groups: Groups) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `sides`, of ranks that are grouped."""
    if len(groups) <= 1:
        return (), ()
    rows = _rows([counts for counts, _ in groups])
    columns = list(zip(*rows, strict=True))
    least, most = [min(column) for column in columns], [max(column) for column in columns]
    if least == most:
        return (), ()
    late = [any(map(lt, row, most)) and not any(map(gt, row, least)) for row in rows]
    lagging = [rank for is_late, (_, ranks) in zip(late, groups, strict=True) if is_late for rank in ranks]
    if not lagging:
        lagging = list(minority({rank: counts for counts, ranks in groups for rank in ranks}))
    behind = set(lagging)
    leading = [rank for _, ranks in groups for rank in ranks if rank not in behind]
    return tuple(sorted(lagging)), tuple(sorted(leading))


def _rows(distinct: Sequence[Counts]) -> list[tuple[int, ...]]:
    """The numbers of each, by function: mostly all name the same ones in the same order."""
    names = [name for name, _ in distinct[0]]
    if all([name for name, _ in counts] == names for counts in distinct):
        return [tuple([number for _, number in counts]) for counts in distinct]
    named = [dict(counts) for counts in distinct]
    every = sorted({name for counts in named for name in counts})
    return [tuple(counts.get(name, 0) for name in every) for counts in named]


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as people do: `0-6, 8`."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != number + 1:
            first = ordered[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = i + 1
    return ", ".join(parts)


def apart(ranks: Mapping[int, Counts]) -> str:
    """How the ranks differ: `AllReduce 236 (rank 1), 237 (ranks 0, 2-3)`; empty where they do not."""
    said: list[str] = []
    for function in skewed(ranks)[:_TOLD]:
        groups: dict[int, list[int]] = {}
        for rank, counts in ranks.items():
            groups.setdefault(launches(counts, function), []).append(rank)
        shown = [f"{number} ({_named(groups[number])})" for number in sorted(groups)[:_TOLD]]
        more = f" and {len(groups) - _TOLD} more" if len(groups) > _TOLD else ""
        said.append(f"{function} {', '.join(shown)}{more}")
    return "; ".join(said)


_TOLD = 3


def _named(ranks: Sequence[int]) -> str:
    text = ranges(ranks)
    if len(text) > 40:  # noqa: PLR2004  beyond that nobody reads it
        return f"{len(ranks)} ranks"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
