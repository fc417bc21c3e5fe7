"""Which rank did it, and what says so.

Launch counts name the side that is behind; the stacks say who of them is not waiting in a collective. Where
a minority is ahead, counts alone cannot tell whether the few launched one too many or the many are stuck
elsewhere: both are said, unless the stacks decide.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from tasks.hang.counts import Counts, launches, ranges, skewed
from tasks.hang.incident import Incident
from tasks.hang.report import Communicator, MissingRank, RankState
from tasks.hang.run import Attempt
from tasks.hang.stacks import Position
from tasks.hang.states import Freeze

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
    return Verdict(
        incident_id=incident.incident_id,
        attempt_id=incident.attempt_id,
        kind=freeze.kind,
        communicator=key,
        functions=functions,
        headline=_headline(freeze, key, suspects, waiting),
        reason=f"{story} {_waiting_text(waiting, functions, freeze)}".strip(),
        suspects=suspects,
        waiting=tuple(waiting),
        confidence=confidence,
        missing_evidence=(f"no stack of world ranks {ranges(unread)}",) if unread else (),
        ranks=standings,
    )


def _headline(freeze: Freeze, key: str, suspects: Sequence[Standing], waiting: Sequence[int]) -> str:
    if not suspects:
        stand = f"{len(waiting)} of them wait in a collective" if waiting else "where they stand is not known"
        return f"The {freeze.size} ranks of communicator {key} stand still ({freeze.kind}); {stand}."
    names = ", ".join(suspect.name for suspect in suspects)
    where = suspects[0].where if len(suspects) == 1 else "; ".join(s.where for s in suspects[:3])
    name = f"{names[0].upper()}{names[1:]}"
    if freeze.kind == "unresponsive":
        verb = "does" if len(suspects) == 1 else "do"
        said = f" ({freeze.testimony.reason})" if freeze.testimony else ""
        return f"{name} {verb} not answer{said}; last seen in {where}."
    verb = "stands" if len(suspects) == 1 else "stand"
    return f"{name} {verb} in {where}."


def _suspects(
    freeze: Freeze, key: str, places: Mapping[int, Position]
) -> tuple[tuple[int, ...], Confidence, str]:
    """(communicator ranks, confidence, story): the fewer side, unless the stacks say otherwise.

    `places` tells where a communicator rank stands, as far as that is known.
    """
    elsewhere = tuple(rank for rank, place in places.items() if not place.in_collective)
    match freeze.kind:
        case "unresponsive":
            return _silent(freeze, key)
        case "init":
            return _starting(freeze, key)
        case "symmetric":
            return _alike(key, places, elsewhere)
        case "mismatch":
            return _apart(freeze, key, elsewhere)


def _silent(freeze: Freeze, key: str) -> tuple[tuple[int, ...], Confidence, str]:
    story = f"It does not answer RAS, and nobody else of communicator {key} moves"
    if freeze.testimony is None or freeze.testimony.finding != "stuck":
        return freeze.silent, "medium", f"{story}."
    return freeze.silent, "high", f"{story}; {freeze.testimony.reason}."


def _starting(freeze: Freeze, key: str) -> tuple[tuple[int, ...], Confidence, str]:
    story = f"The creation of communicator {key} does not end"
    if not freeze.leading:
        return (), "low", f"{story}: all ranks that RAS shows are still in it."
    return (
        freeze.lagging,
        "medium",
        f"{story}: {freeze.remark}, the {len(freeze.leading)} others are through.",
    )


def _alike(
    key: str, places: Mapping[int, Position], elsewhere: tuple[int, ...]
) -> tuple[tuple[int, ...], Confidence, str]:
    """Launch counts blame nobody: the stacks do, or nobody can be named."""
    story = f"All ranks of communicator {key} launched the same and none of them moves"
    inside = len(places) - len(elsewhere)
    if inside and elsewhere and len(elsewhere) < inside:
        return elsewhere, "medium", f"{story}; only these do not wait in a collective."
    if inside and not elsewhere:
        return (
            (),
            "medium",
            f"{story}: all wait in the collective that they entered, so network, driver or kernel.",
        )
    return (), "low", f"{story}."


def _apart(freeze: Freeze, key: str, elsewhere: tuple[int, ...]) -> tuple[tuple[int, ...], Confidence, str]:
    behind, ahead = freeze.lagging, freeze.leading
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
    """Every rank of the communicator that a report showed, in order."""
    functions = skewed(freeze.counts)
    common = Counter(freeze.counts.values()).most_common(1)[0][0] if freeze.counts else ()
    everyone: tuple[RankState | MissingRank, ...] = (*communicator.ranks, *communicator.missing)
    members = {member.rank: member for member in everyone}
    standings: list[Standing] = []
    for rank in sorted(members.keys() | freeze.counts.keys()):
        member, counts = members.get(rank), freeze.counts.get(rank)
        known = attempt.rank_of(member.host, member.pid) if member else None
        place = positions.get(known.world_rank) if known else None
        standings.append(
            Standing(
                world_rank=known.world_rank if known else None,
                rank=rank,
                side="behind" if rank in freeze.lagging else "ahead",
                host=known.node.ip if known else (member.host if member else "unknown"),
                pid=member.pid if member else -1,
                node_id=known.node.node_id if known else "",
                where=str(place) if place else "an unknown place (its stack could not be read)",
                why=_why(counts, common, functions),
            )
        )
    return tuple(standings)


def _why(counts: Counts | None, common: Counts, functions: tuple[str, ...]) -> str:
    if counts is None:
        return "did not answer RAS, so its launches are not known"
    if not functions:
        return "launched as many as the others"
    launched = [f"{f} {launches(counts, f)} (most ranks: {launches(common, f)})" for f in functions]
    return "launched " + ", ".join(launched)


def _waiting_text(waiting: Sequence[int], functions: tuple[str, ...], freeze: Freeze) -> str:
    if not waiting:
        others = freeze.size - len(freeze.lagging)
        return f"The other {others} ranks launched nothing since." if freeze.kind == "mismatch" else ""
    plural = "rank waits" if len(waiting) == 1 else "ranks wait"
    inside = functions[-1] if functions else "a collective"
    return f"{len(waiting)} {plural} in {inside} (world ranks {ranges(waiting)})."
