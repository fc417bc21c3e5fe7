"""When is it a hang?

`advance(window, observation, policy) -> (window, events)` is called once for each poll. Each communicator
is in one of four states:

    Progressing --same counts twice, ranks disagree--> Frozen --suspect_after_s--> Suspected
         ^                                               |                            |
         |                                               |                     confirm_duration_s
         +-------- any rank launched anything -----------+----------------------------v
                   (a `recovered` event if it had been suspected)                 Confirmed

A freeze is timed from the first report that showed its counts, so failed polls and longer intervals do not
stretch it. It is confirmed only while every rank that answers is running and none of them launched
anything: the counts of each rank are kept, and a rank is compared with the last report that showed it, so
one that comes and goes is neither progress nor a new freeze.

The whole run may be blind: after `blind_after_polls` polls without a report, or at once where asking again
cannot help. One failed poll is neither progress nor freeze.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tasks.hang.counts import Counts, sides
from tasks.hang.policy import HangPolicy
from tasks.hang.report import Communicator, RasReport, Record

FreezeKind = Literal["mismatch"]
EventKind = Literal["suspected", "still_suspected", "confirmed", "recovered", "blind", "sighted"]


class Freeze(Struct, frozen=True, kw_only=True):
    """Counts that do not move.

    Args:
        since: When a report first showed these counts.
        polls: Reports that showed them again since then.
        digest: Of the last record; the same digest proves that nothing moved.
        counts: Launches of each communicator rank, from the last report that showed it.
        missing: Communicator ranks that the last report did not show.
    """

    kind: FreezeKind
    since: datetime
    polls: int
    digest: str
    size: int
    counts: dict[int, Counts]
    lagging: tuple[int, ...]
    leading: tuple[int, ...]
    missing: tuple[int, ...]


class Progressing(Struct, frozen=True, tag="progressing"):
    """The last record of a communicator whose ranks agree or move, and when it was first seen like that."""

    digest: str
    since: datetime
    size: int
    missing: int = 0


class Frozen(Struct, frozen=True, tag="frozen"):
    """Ranks disagree and nobody moves, for less than the suspect time."""

    freeze: Freeze


class Suspected(Struct, frozen=True, tag="suspected"):
    """Frozen for the suspect time; `told_at` is when that was last said."""

    freeze: Freeze
    told_at: datetime


class Confirmed(Struct, frozen=True, tag="confirmed"):
    """Frozen for the confirm time: a hang."""

    freeze: Freeze
    confirmed_at: datetime


State = Progressing | Frozen | Suspected | Confirmed


class Blind(Struct, frozen=True):
    """Nothing is known about the run. `permanent`: asking again in this attempt cannot help."""

    since: datetime
    reason: str
    permanent: bool


class Window(Struct, frozen=True, kw_only=True):
    """All that is remembered between two polls of one attempt of a run."""

    attempt_id: str
    communicators: dict[str, State] = {}
    blind: Blind | None = None
    failed_polls: int = 0
    failing_since: datetime | None = None
    last_report_at: datetime | None = None

    @property
    def confirmed(self) -> dict[str, Freeze]:
        """The freezes that are hangs."""
        return {
            key: state.freeze for key, state in self.communicators.items() if isinstance(state, Confirmed)
        }

    @property
    def stalled(self) -> dict[str, Freeze]:
        """All freezes, from the first repeated report on."""
        return {
            key: state.freeze
            for key, state in self.communicators.items()
            if not isinstance(state, Progressing)
        }


class Sighting(Struct, frozen=True):
    """A poll that brought a report."""

    observed_at: datetime
    report: RasReport


class Blank(Struct, frozen=True):
    """A poll that brought none, and why."""

    observed_at: datetime
    reason: str
    permanent: bool = False


Observation = Sighting | Blank


class Event(Struct, frozen=True, kw_only=True):
    """A change of state that somebody may want to hear of.

    Ranks are ranks of the communicator. `communicator` is empty and `kind` None where the whole run is
    meant (blind, sighted).
    """

    at: datetime
    event: EventKind
    communicator: str = ""
    kind: FreezeKind | None = None
    lagging: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    size: int = 0
    stalled_s: float = 0.0
    reason: str = ""


def advance(window: Window, observation: Observation, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    """Take one poll into account.

    Args:
        window: What is remembered of this attempt; `Window(attempt_id=...)` at its start.
        observation: A report, or the reason why there is none, with its time (UTC).
        policy: How long is too long.

    Returns:
        The window after it, and what changed, in the order of the communicators.

    Raises:
        RasMalformed: a record that had to be looked into is not what NCCL documents.
    """
    match observation:
        case Blank():
            return _without_report(window, observation, policy)
        case Sighting():
            return _with_report(window, observation, policy)


def _without_report(window: Window, blank: Blank, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    failed = window.failed_polls + 1
    since = window.failing_since or blank.observed_at
    after = replace(window, failed_polls=failed, failing_since=since)
    if window.blind is not None or not (blank.permanent or failed >= policy.blind_after_polls):
        return after, ()
    blind = Blind(since=since, reason=blank.reason, permanent=blank.permanent)
    event = Event(
        at=blank.observed_at, event="blind", stalled_s=_seconds(since, blank.observed_at), reason=blank.reason
    )
    return replace(after, blind=blind), (event,)


def _with_report(window: Window, sighting: Sighting, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    at, records = sighting.observed_at, sighting.report.records
    events: list[Event] = []
    if window.blind is not None:
        blind_s = _seconds(window.blind.since, at)
        events.append(Event(at=at, event="sighted", stalled_s=blind_s, reason=window.blind.reason))
    states: dict[str, State] = {}
    for key in sorted(records.keys() | window.communicators.keys()):
        before = window.communicators.get(key)
        if key not in records:
            events += _release(key, before, at, "the communicator is gone")
            continue
        states[key], changes = _step(key, before, records[key], at, policy)
        events += changes
    after = Window(attempt_id=window.attempt_id, communicators=states, last_report_at=at)
    return after, tuple(events)


def _step(
    key: str, before: State | None, record: Record, at: datetime, policy: HangPolicy
) -> tuple[State, Iterable[Event]]:
    """Where a communicator stands after a record, and what is to be told of it."""
    freeze = _next_freeze(before, record, at)
    if freeze is None:
        same = isinstance(before, Progressing) and _matches(before, record)
        state = before if same and before else _progressing(record, at)
        return state, _release(key, before, at, "its ranks moved or agree again")
    events: list[Event] = []
    if isinstance(before, Suspected | Confirmed) and before.freeze.since != freeze.since:
        events += _release(key, before, at, "its ranks moved or a missing one came back")
        before = None
    if isinstance(before, Confirmed):
        return Confirmed(freeze, before.confirmed_at), events
    stalled_s = _seconds(freeze.since, at)
    confirmed = freeze.polls > 0 and stalled_s >= policy.confirm_duration_s
    suspected = freeze.polls > 0 and (confirmed or stalled_s >= policy.suspect_after_s)
    told_at = before.told_at if isinstance(before, Suspected) else None
    if suspected and told_at is None:
        events.append(_event("suspected", key, freeze, at))
        told_at = at
    elif told_at is not None and not confirmed and _seconds(told_at, at) >= policy.repeat_every_s:
        events.append(_event("still_suspected", key, freeze, at))
        told_at = at
    if confirmed:
        return Confirmed(freeze, at), [*events, _event("confirmed", key, freeze, at)]
    return (Suspected(freeze, told_at) if told_at is not None else Frozen(freeze)), events


def _progressing(record: Record, at: datetime) -> Progressing:
    missing = record.missing_ranks_count
    return Progressing(digest=record.digest, since=at, size=record.size, missing=missing)


def _next_freeze(before: State | None, record: Record, at: datetime) -> Freeze | None:
    """The freeze that a record goes on with or begins; None where there is progress or agreement."""
    if isinstance(before, Progressing) and _matches(before, record):
        return _freeze(record.decode(), record, before.since, polls=1)
    if before is None or isinstance(before, Progressing) or before.freeze.size != record.size:
        return _first_sight(record, at)
    freeze = before.freeze
    if freeze.digest == record.digest:
        return replace(freeze, polls=freeze.polls + 1)
    communicator = record.decode()
    if any(freeze.counts.get(rank, counts) != counts for rank, counts in communicator.counts.items()):
        return _first_sight(record, at)
    if communicator.counts.keys() - freeze.counts.keys():
        # A rank that no report of this freeze showed before: it may have moved unseen, so time starts anew.
        return _freeze(communicator, record, at, polls=0, known=freeze.counts)
    return _freeze(communicator, record, freeze.since, polls=freeze.polls + 1, known=freeze.counts)


def _matches(before: Progressing, record: Record) -> bool:
    return (before.digest, before.size) == (record.digest, record.size)


def _first_sight(record: Record, at: datetime) -> Freeze | None:
    """Counts are kept from the first sight on where a member is missing.

    The next record of such a communicator may differ without anybody having moved. Of any other one the
    digest tells, and looking into each record of a healthy job would cost too much.
    """
    return _freeze(record.decode(), record, at, polls=0) if record.missing_ranks_count else None


def _freeze(
    communicator: Communicator,
    record: Record,
    since: datetime,
    *,
    polls: int,
    known: Mapping[int, Counts] = {},
) -> Freeze | None:
    """A freeze where the ranks disagree and all that answer are running; a rank that is missing now counts
    with what it last showed.
    """
    counts = {**known, **communicator.counts}
    lagging, leading = sides(counts)
    if not lagging or not communicator.all_running:
        return None
    return Freeze(
        kind="mismatch",
        since=since,
        polls=polls,
        digest=record.digest,
        size=record.size,
        counts=counts,
        lagging=lagging,
        leading=leading,
        missing=tuple(member.rank for member in communicator.missing),
    )


def _release(key: str, before: State | None, at: datetime, reason: str) -> Iterable[Event]:
    if isinstance(before, Suspected | Confirmed):
        return [_event("recovered", key, before.freeze, at, reason)]
    return []


def _event(event: EventKind, key: str, freeze: Freeze, at: datetime, reason: str = "") -> Event:
    return Event(
        at=at,
        event=event,
        communicator=key,
        kind=freeze.kind,
        lagging=freeze.lagging,
        leading=freeze.leading,
        missing=freeze.missing,
        size=freeze.size,
        stalled_s=_seconds(freeze.since, at),
        reason=reason,
    )


def _seconds(since: datetime, at: datetime) -> float:
    return max(0.0, (at - since).total_seconds())
