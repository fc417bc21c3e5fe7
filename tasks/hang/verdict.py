"""Which rank did it, and what says so.

Launch counts name the side that is behind; the stacks say who of them is not waiting in a collective. Where
a minority is ahead, counts alone cannot tell whether the few launched one too many or the many are stuck
elsewhere: both are said, unless the stacks decide.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tasks.hang.counts import launches, skewed
from tasks.hang.incident import Incident
from tasks.hang.report import Communicator, MissingRank, RankState
from tasks.hang.run import Attempt
from tasks.hang.stacks import Position
from tasks.hang.window import Freeze

Confidence = Literal["high", "medium", "low"]


class Standing(Struct, frozen=True, kw_only=True):
    """Where one rank of the hung communicator stands.

    `world_rank` is None where the process is not known to the run; `rank` is the rank in the communicator.
    `where` is the frame in which its training thread stands, or why that is not known; `why` compares its
    launches with those of most ranks.
    """

    world_rank: int | None
    rank: int
    side: Literal["behind", "ahead"]
    host: str
    pid: int
    node_id: str
    where: str
    why: str

    @property
    def name(self) -> str:
        """How people are told about it."""
        known = (
            f"rank {self.world_rank}" if self.world_rank is not None else f"unknown rank (comm {self.rank})"
        )
        return f"{known} ({self.host}, pid {self.pid})"


class Verdict(Struct, frozen=True, kw_only=True):
    """What happened, in two lines, and what it rests on.

    `waiting` are world ranks that stand in the collective; `functions` the collectives of which the ranks
    launched different numbers; `suspects` those of `ranks` that the others wait for.
    """

    incident_id: str
    attempt_id: str
    kind: str
    communicator: str
    functions: tuple[str, ...]
    headline: str
    reason: str
    suspects: tuple[Standing, ...]
    waiting: tuple[int, ...]
    confidence: Confidence
    missing_evidence: tuple[str, ...] = ()
    ranks: tuple[Standing, ...] = ()


def judge(
    incident: Incident,
    attempt: Attempt,
    members: Mapping[str, tuple[Freeze, Communicator]],
    positions: Mapping[int, Position],
) -> Verdict:
    """Name the suspects of an incident.

    Args:
        incident: The incident; its first member is taken as the root, since it stood still first.
        attempt: Which process is which world rank.
        members: Freeze and decoded record of each member that the last report still showed.
        positions: Where the training thread of each world rank stands, as far as it could be read.

    Returns:
        The verdict. What could not be read is in `missing_evidence`, and it lowers the confidence.
    """
    key = next(key for key in incident.members if key in members)
    freeze, communicator = members[key]
    functions = skewed(freeze.counts)
    standings = _standings(freeze, communicator, attempt, positions)
    places = {
        standing.rank: positions[standing.world_rank]
        for standing in standings
        if standing.world_rank is not None and standing.world_rank in positions
    }
    ranks, confidence, story = _suspects(freeze, key, places)
    suspects = tuple(standing for standing in standings if standing.rank in ranks)
    waiting = sorted(world for world, position in positions.items() if position.in_collective)
    unread = [rank.world_rank for rank in attempt.ranks if rank.world_rank not in positions]
    names = ", ".join(suspect.name for suspect in suspects)
    where = suspects[0].where if len(suspects) == 1 else "; ".join(s.where for s in suspects[:3])
    return Verdict(
        incident_id=incident.incident_id,
        attempt_id=incident.attempt_id,
        kind=freeze.kind,
        communicator=key,
        functions=functions,
        headline=f"{names[0].upper()}{names[1:]} {'stands' if len(suspects) == 1 else 'stand'} in {where}.",
        reason=f"{story} {_waiting_text(waiting, functions, freeze)}",
        suspects=suspects,
        waiting=tuple(waiting),
        confidence=confidence,
        missing_evidence=(f"no stack of world ranks {ranges(unread)}",) if unread else (),
        ranks=standings,
    )


def ranges(numbers: list[int] | tuple[int, ...]) -> str:
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


def _suspects(
    freeze: Freeze, key: str, places: Mapping[int, Position]
) -> tuple[tuple[int, ...], Confidence, str]:
    """(communicator ranks, confidence, story): the fewer side, unless the stacks say otherwise.

    `places` tells where a communicator rank stands, as far as that is known.
    """
    behind, ahead = freeze.lagging, freeze.leading
    elsewhere = tuple(rank for rank, place in places.items() if not place.in_collective)
    function = skewed(freeze.counts)[0]
    if len(behind) <= len(ahead):
        story = f"It launched fewer {function} than the {len(ahead)} others of communicator {key}."
        if set(behind) <= set(elsewhere):
            return behind, "high", story
        return behind, "medium", story + " Its stack does not contradict, and does not prove it."
    if elsewhere and len(elsewhere) < len(behind) and set(elsewhere) <= set(behind):
        story = f"{len(behind)} ranks are behind in {function}; only these are not waiting in a collective."
        return elsewhere, "medium", story
    story = (
        f"Ranks {ranges(ahead)} launched more {function} than the {len(behind)} others: either they launched "
        f"one too many, or the others are stuck elsewhere."
    )
    return ahead, "low", story


def _standings(
    freeze: Freeze, communicator: Communicator, attempt: Attempt, positions: Mapping[int, Position]
) -> tuple[Standing, ...]:
    """Every rank of the communicator that ever showed its counts, in order."""
    functions = skewed(freeze.counts)
    common = Counter(freeze.counts.values()).most_common(1)[0][0]
    everyone: tuple[RankState | MissingRank, ...] = (*communicator.ranks, *communicator.missing)
    members = {member.rank: member for member in everyone}
    standings: list[Standing] = []
    for rank, counts in sorted(freeze.counts.items()):
        member = members.get(rank)
        known = attempt.rank_of(member.host, member.pid) if member else None
        place = positions.get(known.world_rank) if known else None
        launched = [f"{f} {launches(counts, f)} (most ranks: {launches(common, f)})" for f in functions]
        standings.append(
            Standing(
                world_rank=known.world_rank if known else None,
                rank=rank,
                side="behind" if rank in freeze.lagging else "ahead",
                host=known.node.ip if known else (member.host if member else "unknown"),
                pid=member.pid if member else -1,
                node_id=known.node.node_id if known else "",
                where=str(place) if place else "an unknown place (its stack could not be read)",
                why="launched " + ", ".join(launched),
            )
        )
    return tuple(standings)


def _waiting_text(waiting: list[int], functions: tuple[str, ...], freeze: Freeze) -> str:
    if not waiting:
        return f"The other {freeze.size - len(freeze.lagging)} ranks launched nothing since."
    plural = "rank waits" if len(waiting) == 1 else "ranks wait"
    return f"{len(waiting)} {plural} in {functions[-1]} (world ranks {ranges(waiting)})."
