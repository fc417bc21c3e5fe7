"""Which rank did it, and what says so.

Launch counts name the side that is behind; the stacks say who of them is not waiting in a collective. Where
a minority is ahead, counts alone cannot tell whether the few launched one too many or the many are stuck
elsewhere: both are said, unless the stacks decide.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tasks.hang.counts import launches, skewed
from tasks.hang.incident import Incident
from tasks.hang.report import Communicator
from tasks.hang.run import Attempt, Rank
from tasks.hang.stacks import Position
from tasks.hang.window import Freeze

Confidence = Literal["high", "medium", "low"]


class Suspect(Struct, frozen=True, kw_only=True):
    """A rank that the others wait for.

    `world_rank` is None where the process is not known to the run; `rank` is the rank in the communicator.
    `where` is the frame in which its training thread stands, or why that is not known.
    """

    world_rank: int | None
    rank: int
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
    launched different numbers.
    """

    incident_id: str
    attempt_id: str
    kind: str
    communicator: str
    functions: tuple[str, ...]
    headline: str
    reason: str
    suspects: tuple[Suspect, ...]
    waiting: tuple[int, ...]
    confidence: Confidence
    missing_evidence: tuple[str, ...] = ()


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
    ranks, confidence, story = _suspects(freeze, communicator, attempt, positions)
    suspects = tuple(_suspect(rank, freeze, communicator, attempt, positions) for rank in ranks)
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
        headline=f"{names} stands in {where}.",
        reason=f"{story} {_waiting_text(waiting, functions, freeze)}",
        suspects=suspects,
        waiting=tuple(waiting),
        confidence=confidence,
        missing_evidence=(f"no stack of world ranks {ranges(unread)}",) if unread else (),
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
    freeze: Freeze, communicator: Communicator, attempt: Attempt, positions: Mapping[int, Position]
) -> tuple[tuple[int, ...], Confidence, str]:
    """(communicator ranks, confidence, story): the fewer side, unless the stacks say otherwise."""
    behind, ahead = freeze.lagging, freeze.leading
    elsewhere = tuple(
        rank for rank in (*behind, *ahead) if _elsewhere(rank, communicator, attempt, positions)
    )
    function = skewed(freeze.counts)[0]
    if len(behind) <= len(ahead):
        story = (
            f"It launched fewer {function} than the {len(ahead)} others of communicator {communicator.key}."
        )
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


def _elsewhere(
    rank: int, communicator: Communicator, attempt: Attempt, positions: Mapping[int, Position]
) -> bool:
    known = _world_rank(rank, communicator, attempt)
    place = positions.get(known.world_rank) if known else None
    return place is not None and not place.in_collective


def _world_rank(rank: int, communicator: Communicator, attempt: Attempt) -> Rank | None:
    member = communicator.member(rank)
    return attempt.rank_of(member.host, member.pid) if member else None


def _suspect(
    rank: int,
    freeze: Freeze,
    communicator: Communicator,
    attempt: Attempt,
    positions: Mapping[int, Position],
) -> Suspect:
    member = communicator.member(rank)
    known = _world_rank(rank, communicator, attempt)
    place = positions.get(known.world_rank) if known else None
    counts = freeze.counts.get(rank, ())
    others = [c for r, c in freeze.counts.items() if r != rank]
    differences = [
        f"{f} {launches(counts, f)} of {max((launches(c, f) for c in others), default=0)}"
        for f in skewed(freeze.counts)
    ]
    return Suspect(
        world_rank=known.world_rank if known else None,
        rank=rank,
        host=known.node.ip if known else (member.host if member else "unknown"),
        pid=known.pid if known else (member.pid if member else -1),
        node_id=known.node.node_id if known else "",
        where=str(place) if place else "an unknown place (its stack could not be read)",
        why="launched " + ", ".join(differences),
    )


def _waiting_text(waiting: list[int], functions: tuple[str, ...], freeze: Freeze) -> str:
    if not waiting:
        return f"The other {freeze.size - len(freeze.lagging)} ranks launched nothing since."
    plural = "rank waits" if len(waiting) == 1 else "ranks wait"
    return f"{len(waiting)} {plural} in {functions[-1]} (world ranks {ranges(waiting)})."
