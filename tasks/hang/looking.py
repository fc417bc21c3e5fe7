"""What a record makes of a communicator, given what it was: the step before any time is counted."""

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from tasks.hang.counts import Counts, sides
from tasks.hang.policy import HangPolicy
from tasks.hang.reading import Reading, read
from tasks.hang.report import Communicator, Record
from tasks.hang.states import (
    STOPPED,
    Aside,
    Confirmed,
    Freeze,
    Frozen,
    Idle,
    Process,
    Progressing,
    Sighting,
    State,
    Suspected,
    seconds,
)

Seen = Progressing | Aside | Freeze


class Poll(Struct, frozen=True):
    """A report on its way through the communicators."""

    sighting: Sighting
    policy: HangPolicy

    @property
    def at(self) -> datetime:
        """When it was received."""
        return self.sighting.observed_at

    @property
    def exact(self) -> bool:
        """Whether all peers answered in time: else it may name healthy ranks as missing."""
        return self.sighting.report.timeouts_count == 0

    def read(self, communicator: Communicator, counts: Mapping[int, Counts]) -> Reading:
        """What a record says; see `reading.read`."""
        return read(communicator, counts, witnesses=self.policy.witnesses)

    def processes(self, communicator: Communicator) -> dict[int, Process]:
        """Which process is which rank; communicators share the values, for there are many."""
        return communicator.processes


def look(  # noqa: PLR0911  a table, one line for each row
    before: State | None, record: Record, poll: Poll
) -> tuple[Seen, bool]:
    """What a communicator is now, and whether it moved since the last report."""
    match before:
        case Frozen(freeze) | Suspected(freeze) | Idle(freeze) | Confirmed(freeze) if (
            freeze.size == record.size
        ):
            return _continued(freeze, record, poll)
        case Aside(digest=digest, size=size) if (digest, size) == (record.digest, record.size):
            return before, False
        case Progressing(digest=digest, size=size) if (digest, size) == (record.digest, record.size):
            communicator = record.decode()
            reading = poll.read(communicator, communicator.counts)
            return _still(communicator, record, reading, poll, since=before.since, repeated=True), False
        case Aside(size=size, counts=counts) if size == record.size and (counts or not record.plain):
            return _beside(before, record, poll)
        case Progressing() | Aside() if goes_on(before, record):
            return _progressing(record, poll), True
        case None:
            return _first(record.decode(), record, poll), False
        case _:
            return _fresh(record.decode(), record, poll), True


def goes_on(before: Progressing | Aside, record: Record) -> bool:
    """Whether a record that changed says that its ranks launched something.

    While all of them run nothing else of it can change. Of a communicator that moved by the last report it is
    taken to be so without a look at the status of each rank, where nobody is missing: should a status be all
    that changed, the next record is the same, and is looked into.
    """
    if before.size != record.size:
        return False
    if isinstance(before, Progressing) and not before.missing and not record.missing_ranks_count:
        return True
    return record.plain


def _first(communicator: Communicator, record: Record, poll: Poll) -> Seen:
    """A communicator that was never seen. Where its ranks are apart, counts are kept at once: the next record
    may lack one of them.
    """
    reading = poll.read(communicator, communicator.counts)
    if reading.kind == "mismatch":
        return _still(communicator, record, reading, poll, since=poll.at, repeated=False)
    return _fresh(communicator, record, poll)


def _beside(before: Aside, record: Record, poll: Poll) -> tuple[Seen, bool]:
    """A communicator that was set aside changes: did anybody launch, or is a member back or missing?"""
    communicator = record.decode()
    shown = communicator.counts
    nothing = before.what == "unobservable" and not any(n for counts in shown.values() for _, n in counts)
    if not nothing and (not before.counts or _moved(before.counts, shown)):
        return _fresh(communicator, record, poll), True
    reading = poll.read(communicator, {**before.counts, **shown})
    known = reading.aside == before.what and (nothing or not shown.keys() - before.counts.keys())
    since = before.since if known else poll.at
    return _still(
        communicator, record, reading, poll, since=since, repeated=False, known=before.counts
    ), False


def _moved(known: Mapping[int, Counts], shown: Mapping[int, Counts]) -> bool:
    return any(known.get(rank, counts) != counts for rank, counts in shown.items())


def _fresh(communicator: Communicator, record: Record, poll: Poll) -> Seen:
    """A communicator that was not seen like this before.

    Counts are kept from the first sight on where a member is missing or in its init: the next record may
    differ without anybody having moved. Of any other one the digest tells.
    """
    reading = poll.read(communicator, communicator.counts)
    if reading.aside is not None or reading.kind == "init" or record.missing_ranks_count:
        return _still(communicator, record, reading, poll, since=poll.at, repeated=False)
    return _progressing(record, poll)


def _progressing(record: Record, poll: Poll) -> Progressing:
    missing = record.missing_ranks_count
    return Progressing(digest=record.digest, since=poll.at, size=record.size, missing=missing)


def _still(
    communicator: Communicator,
    record: Record,
    reading: Reading,
    poll: Poll,
    *,
    since: datetime,
    repeated: bool,
    known: Mapping[int, Counts] = {},
) -> Aside | Freeze:
    """A communicator that stands still as its record reads."""
    missing = tuple([member.rank for member in communicator.missing])
    if reading.kind is None:
        return Aside(
            what=reading.aside or "leaving",
            digest=record.digest,
            since=since,
            size=record.size,
            missing=len(missing),
            remark=reading.remark,
            counts={} if record.plain else {**known, **communicator.counts},
        )
    return Freeze(
        kind=reading.kind,
        since=since,
        repeated=repeated,
        digest=record.digest,
        size=record.size,
        counts={**known, **communicator.counts} if known else communicator.counts,
        lagging=reading.lagging,
        leading=reading.leading,
        missing=missing,
        silent=reading.silent if reading.kind == "unresponsive" else (),
        exact=poll.exact,
        departed=reading.departed,
        remark=reading.remark,
        processes=poll.processes(communicator),
    )


def _continued(freeze: Freeze, record: Record, poll: Poll) -> tuple[Seen, bool]:
    """A freeze goes on, changes, or ends."""
    if freeze.digest == record.digest:
        if freeze.processes and freeze.repeated and (freeze.exact or not poll.exact):
            return freeze, False  # the same value: what was concluded from it still holds
        if freeze.processes:
            return replace(freeze, repeated=True, exact=freeze.exact or poll.exact), False
        return _refilled(freeze, record.decode(), poll), False
    communicator = record.decode()
    if _moved(freeze.counts, communicator.counts):
        return _fresh(communicator, record, poll), True
    counts = {**freeze.counts, **communicator.counts}
    reading = poll.read(communicator, counts)
    if communicator.counts.keys() - freeze.counts.keys():
        # A rank that no report of this freeze showed before: it may have moved unseen, so time starts anew.
        return _still(
            communicator, record, reading, poll, since=poll.at, repeated=False, known=freeze.counts
        ), False
    return _gone_on(freeze, communicator, record, reading, poll, counts)


def _gone_on(  # noqa: PLR0917  the record in all forms in which it is known by now
    freeze: Freeze,
    communicator: Communicator,
    record: Record,
    reading: Reading,
    poll: Poll,
    counts: dict[int, Counts],
) -> tuple[Seen, bool]:
    """Nobody launched anything, but the record is another one: a member is missing, or back, or leaves."""
    missing = tuple(member.rank for member in communicator.missing)
    silent = tuple(rank for rank in freeze.silent if rank in missing)
    now = replace(
        freeze,
        repeated=True,
        digest=record.digest,
        counts=counts,
        missing=missing,
        departed=reading.departed,
        remark=reading.remark,
        processes=poll.processes(communicator),
        exact=freeze.exact or poll.exact,
    )
    match freeze.kind:
        case "mismatch":
            lagging, leading = sides(counts)
            return replace(now, lagging=lagging, leading=leading), False
        case "unresponsive" if silent:
            # RAS considers a process dead after a minute: that flag says nothing new about a freeze.
            departed = tuple(rank for rank in reading.departed if rank not in silent)
            leading = tuple(sorted(communicator.counts.keys() - set(departed)))
            return replace(
                now, silent=silent, lagging=silent, leading=leading, departed=departed, remark=freeze.remark
            ), False
        case "init" if _still_starting(freeze, reading, missing) == freeze.lagging:
            return now, False
        case "symmetric" if not reading.departed:
            return now, False
        case _:
            return _still(
                communicator, record, reading, poll, since=poll.at, repeated=False, known=counts
            ), True


def _still_starting(freeze: Freeze, reading: Reading, missing: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks in their init; one that does not answer is where it was."""
    seen = reading.lagging if reading.kind == "init" else ()
    return tuple(sorted({*seen, *(rank for rank in freeze.lagging if rank in missing)}))


def _refilled(freeze: Freeze, communicator: Communicator, poll: Poll) -> Freeze:
    """After a restart: what was not remembered is in the record."""
    counts = {**freeze.counts, **communicator.counts}
    lagging, leading = freeze.lagging, freeze.leading
    if not freeze.counts:
        reading = poll.read(communicator, counts)
        lagging, leading = reading.lagging, reading.leading
    return replace(
        freeze,
        repeated=True,
        exact=freeze.exact or poll.exact,
        counts=counts,
        lagging=lagging,
        leading=leading,
        processes=poll.processes(communicator),
    )


def restarted(seen: Seen, at: datetime) -> Seen:
    """Equal counts that stand still mean something only while the whole job does."""
    if isinstance(seen, Freeze) and seen.kind == "symmetric":
        return replace(seen, since=at, repeated=False, asked_at=None, testimony=None)
    return seen


# ---- whether the ranks of a freeze go on elsewhere ----------------------------------------------------


def moves_elsewhere(
    elsewhere: Mapping[str, Mapping[int, Counts]],
    active: Mapping[Process, datetime],
    states: Mapping[str, State],
    looks: Mapping[str, Seen],
    poll: Poll,
) -> tuple[dict[str, dict[int, Counts]], dict[Process, datetime]]:
    """What the processes of a mismatch do in other communicators. Only while there is a mismatch: looking
    into records that move is what a healthy poll saves.

    Args:
        elsewhere: Counts of the communicators that moved, by the last report.
        active: When a process of a mismatch was last seen launching in one of them.
        states: What each communicator was: one that stood still has its counts there.
        looks: What each communicator is now.
        poll: The report.

    Returns:
        `elsewhere` and `active` after this report.
    """
    if not active and not any(type(seen) is Progressing for seen in looks.values()):
        return {}, {}
    watched = {
        process
        for seen in looks.values()
        if isinstance(seen, Freeze) and seen.kind == "mismatch" and seen.repeated
        for process in seen.processes.values()
    }
    if not watched:
        return {}, {}
    now: dict[str, dict[int, Counts]] = {}
    moments = {process: moment for process, moment in active.items() if process in watched}
    for key, seen in looks.items():
        if not isinstance(seen, Progressing):
            continue
        communicator = poll.sighting.report.records[key].decode()
        before, now[key] = elsewhere.get(key) or _counts_of(states.get(key)), communicator.counts
        processes = poll.processes(communicator)
        for rank, counts in communicator.counts.items():
            if processes[rank] in watched and before.get(rank, counts) != counts:
                moments[processes[rank]] = poll.at
    return now, moments


def _counts_of(state: State | None) -> Mapping[int, Counts]:
    return state.freeze.counts if isinstance(state, STOPPED) else {}


def idle_until(freeze: Freeze, active: Mapping[Process, datetime], poll: Poll) -> datetime | None:
    """Until when every member of a mismatch went on in other communicators; None where one of them did not,
    or not lately.
    """
    if freeze.kind != "mismatch" or not freeze.processes or not active:
        return None
    known = []
    for process in freeze.processes.values():
        moment = active.get(process)
        if moment is None or moment <= freeze.since:
            return None
        known.append(moment)
    lately_s = max(poll.policy.suspect_after_s, 3 * poll.policy.poll_interval_s)
    return min(known) if seconds(min(known), poll.at) <= lately_s else None
