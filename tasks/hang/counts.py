"""Launch counts of the ranks of one communicator: who is behind, who is ahead.

Everything here takes `{communicator rank: Counts}`. A function that a rank does not name counts as 0 there:
a collective that only one rank ever launched is a mismatch too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")

Counts = tuple[tuple[str, int], ...]  # (function, launches), functions in NCCL's order


def launches(counts: Counts, function: str) -> int:
    """Launches of one collective function."""
    return dict(counts).get(function, 0)


def skewed(ranks: Mapping[int, Counts]) -> tuple[str, ...]:
    """The functions of which the ranks launched different numbers, in NCCL's order, others after them."""
    distinct = [dict(counts) for counts in set(ranks.values())]
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
    functions = skewed(ranks)
    if not functions:
        return (), ()
    most = {f: max(launches(counts, f) for counts in ranks.values()) for f in functions}
    least = {f: min(launches(counts, f) for counts in ranks.values()) for f in functions}
    behind = {rank for rank, counts in ranks.items() if any(launches(counts, f) < most[f] for f in functions)}
    ahead = {rank for rank, counts in ranks.items() if any(launches(counts, f) > least[f] for f in functions)}
    lagging = behind - ahead or set(minority(ranks))
    return tuple(sorted(lagging)), tuple(sorted(set(ranks) - lagging))


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
