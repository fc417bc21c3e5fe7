"""What one record of a communicator says, whatever came before it."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from tasks.hang.counts import Counts, Groups, grouped, ranges, sides_of
from tasks.hang.policy import FreezeKind
from tasks.hang.report import Communicator

_QUIET_ERRORS = (0, 7)  # ncclSuccess and ncclInProgress


class Reading(Struct, frozen=True, kw_only=True):
    """What a communicator would be if it stood still like this.

    Args:
        kind: Of the freeze; None where this is none (`aside` says what it is).
        lagging: Ranks that the others would wait for.
        silent: Members that did not answer.
        departed: Ranks that finish, abort, have left or are gone.
        remark: What is particular about its ranks, in words.
    """

    kind: FreezeKind | None
    aside: Literal["unobservable", "leaving"] | None = None
    lagging: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    departed: tuple[int, ...] = ()
    remark: str = ""


def read(communicator: Communicator, counts: Mapping[int, Counts], *, witnesses: bool) -> Reading:
    """Classify a record.

    Args:
        communicator: The decoded record.
        counts: Launches of each rank, also of missing ones that an earlier report showed.
        witnesses: Whether somebody can look at a process that does not answer. Where nobody can, one that
            RAS considers dead is taken as gone.
    """
    if counts is not communicator.counts or communicator.missing:
        return _read(communicator, counts, witnesses=witnesses)
    memo = communicator.said.memo
    known: Reading | None = memo.get(Reading)
    if known is None:
        known = memo[Reading] = _read(communicator, counts, witnesses=witnesses)
    return known


def _read(communicator: Communicator, counts: Mapping[int, Counts], *, witnesses: bool) -> Reading:
    state = _states(communicator, witnesses=witnesses)
    present = sorted(communicator.members.numbers)
    starting = state.get("INIT", ())
    departed = tuple(sorted(rank for word in _DEPARTED for rank in state.get(word, ())))
    silent = state.get("SILENT", ())
    remark = _remark(communicator, state)
    if starting:
        # A rank that has not come to the exchange of its peers yet is no member for RAS.
        lagging = tuple(sorted({*starting, *state.get("LEFT", ())}))
        leading = tuple(rank for rank in present if rank not in lagging)
        return Reading(kind="init", lagging=lagging, leading=leading, silent=silent, remark=remark)
    if counts is communicator.counts:
        groups: Groups = [(told.counts, ranks) for told, ranks in communicator.said.groups]
    else:
        groups = grouped(counts)
    if not any(launched for each, _ in groups for _, launched in each):
        return Reading(kind=None, aside="unobservable", departed=departed, silent=silent, remark=remark)
    if silent and present:
        leading = tuple(rank for rank in present if rank not in departed)
        return Reading(
            kind="unresponsive",
            lagging=silent,
            leading=leading,
            silent=silent,
            departed=departed,
            remark=remark,
        )
    lagging, leading = sides_of(groups)
    if lagging:
        return Reading(kind="mismatch", lagging=lagging, leading=leading, departed=departed, remark=remark)
    if departed or not present:
        return Reading(kind=None, aside="leaving", departed=departed, silent=silent, remark=remark)
    return Reading(kind="symmetric", leading=tuple(present), remark=remark)


_DEPARTED = ("FINALIZE", "ABORT", "LEFT", "GONE")
_WORDS = {  # one rank, several ranks
    "INIT": ("is still in its init", "are still in their init"),
    "FINALIZE": ("shuts this communicator down (FINALIZE)", "shut this communicator down (FINALIZE)"),
    "ABORT": ("aborted this communicator (ABORT)", "aborted this communicator (ABORT)"),
    "LEFT": ("is no member any more, or not yet", "are no members any more, or not yet"),
    "GONE": ("is gone: RAS considers its process dead", "are gone: RAS considers their processes dead"),
    "SILENT": ("does not answer RAS", "do not answer RAS"),
}


def _states(communicator: Communicator, *, witnesses: bool) -> dict[str, tuple[int, ...]]:
    """The ranks that are not plainly running, by what they are."""
    found: dict[str, list[int]] = {}
    for told, numbers in communicator.said.groups:
        if told.status not in ("RUNNING", "UNKNOWN"):
            found.setdefault(told.status, []).extend(numbers)
    for absent in communicator.missing:
        if not absent.unresponsive:
            word = "LEFT"
        else:
            word = "GONE" if absent.considered_dead and not witnesses else "SILENT"
        found.setdefault(word, []).append(absent.rank)
    return {word: tuple(sorted(ranks)) for word, ranks in found.items()}


def _remark(communicator: Communicator, state: Mapping[str, tuple[int, ...]]) -> str:
    parts = [_clause(ranks, *_WORDS[word]) for word, ranks in state.items()]
    errors: dict[int, list[int]] = {}
    for told, numbers in communicator.said.groups:
        if told.async_error not in _QUIET_ERRORS:
            errors.setdefault(told.async_error, []).extend(numbers)
    for error, ranks in errors.items():
        text = f"in asynchronous error {error}"
        parts.append(_clause(ranks, f"is {text}", f"are {text}"))
    return "; ".join(parts)


def _clause(ranks: Sequence[int], one: str, several: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {ranges(ranks)} {several}"
