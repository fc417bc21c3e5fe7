"""When is it a hang?

`advance(window, observation, policy) -> (window, events)` is called once for each poll, and once for each
answer of a witness. A communicator is in one of six states:

    Progressing --same record twice--> Frozen --suspect_after_s--> Suspected --confirm time--> Confirmed
         ^                               |                          |    ^                        |
         |                               |       members go on elsewhere |                        |
         |                               |                          v    |                        |
         |                               +----------------------->  Idle                          |
         +-------- any rank launched anything (`recovered` if it had been told of) ---------------+

    Aside: neither healthy nor hung (never launched anything that is counted; or its ranks are leaving)

A freeze is timed from the first report that showed its counts, so failed polls and longer intervals do not
stretch it. The counts of each rank are kept, and a rank is compared with the last report that showed it, so
one that comes and goes is neither progress nor a new freeze. The kinds of freeze, and what each needs to be
confirmed, are in the table of `verdict_of`.

Where counts alone cannot decide, `Window.questions` says which ranks somebody should look at; the answer is
the next observation (`Witness`). A stall that recovered is remembered: the communicator's confirm time grows
with the longest one.

The whole run may be blind: after `blind_after_polls` polls without a report, or at once where asking again
cannot help. One failed poll is neither progress nor freeze.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from tasks.hang.counts import Counts
from tasks.hang.escalation import calm_till, escalated, is_same, learned, released, testify
from tasks.hang.looking import Poll, Seen, goes_on, idle_until, look, moves_elsewhere, restarted
from tasks.hang.policy import HangPolicy
from tasks.hang.states import (
    STOPPED,
    Aside,
    Blank,
    Blind,
    Confirmed,
    Event,
    Freeze,
    Frozen,
    Idle,
    Observation,
    Process,
    Progressing,
    Sighting,
    State,
    Suspected,
    seconds,
)
from tasks.hang.witness import Question, Witness


class Job(Struct, frozen=True, kw_only=True):
    """What all communicators of a report say together.

    Args:
        explained: Whether one stands still for which others may wait.
        extended: Whether a rank was seen to work for which others may wait.
        policy: By which they were judged.
    """

    explained: bool
    extended: bool
    policy: HangPolicy


class Window(Struct, frozen=True, kw_only=True):
    """All that is remembered between two polls of one attempt of a run.

    Args:
        envelopes: The longest stall of a communicator that recovered, in seconds; short ones are left out.
        visible: (ranks of the run that the last report shows, ranks of the run); None where nobody compared.
        nccl_version: Of the last report.
        entries: Rank entries of the last report.
        elsewhere: Counts of the communicators that move, kept while a mismatch lasts.
        active: When a process of a mismatch was last seen launching in another communicator.
        opened_at: The moment of the first freeze among the hangs, from the first confirmation on. It names
            the incident, so a communicator that is confirmed later does not change it.
        still: How many communicators stand still.
        calm_until: Until when nothing can come of a freeze as long as it goes on.
        job: What all communicators said together in the last report.
        partial: Whether it comes from the memory of an earlier process, which leaves out what moves.
    """

    attempt_id: str
    communicators: dict[str, State] = {}
    envelopes: dict[str, float] = {}
    blind: Blind | None = None
    failed_polls: int = 0
    failing_since: datetime | None = None
    last_report_at: datetime | None = None
    visible: tuple[int, int] | None = None
    nccl_version: str = ""
    entries: int = 0
    elsewhere: dict[str, dict[int, Counts]] = {}
    active: dict[Process, datetime] = {}
    opened_at: datetime | None = None
    partial: bool = False
    still: int = 0
    calm_until: dict[str, datetime] = {}
    job: Job | None = None

    @property
    def confirmed(self) -> dict[str, Freeze]:
        """The freezes that are hangs."""
        return {
            key: state.freeze for key, state in self.communicators.items() if isinstance(state, Confirmed)
        }

    @property
    def stalled(self) -> dict[str, Freeze]:
        """All freezes that a second report showed, but for those whose ranks go on elsewhere."""
        return {
            key: state.freeze
            for key, state in self.communicators.items()
            if isinstance(state, Frozen | Suspected | Confirmed) and state.freeze.repeated
        }

    @property
    def moves(self) -> bool:
        """Whether the last report showed something progress."""
        return any(
            isinstance(state, Progressing)
            or (isinstance(state, Frozen) and not state.freeze.repeated and state.freeze.kind != "symmetric")
            for state in self.communicators.values()
        )

    @property
    def questions(self) -> tuple[Question, ...]:
        """What somebody should look at now, until a Witness answers."""
        return tuple(
            Question(communicator=key, ranks=state.freeze.asked, stacks=state.freeze.kind != "unresponsive")
            for key, state in self.communicators.items()
            if isinstance(state, Frozen | Suspected | Idle)
            and state.freeze.asked_at is not None
            and state.freeze.testimony is None
        )

    def freeze(self, key: str) -> Freeze | None:
        """The freeze of a communicator, None where it moves or is not known."""
        state = self.communicators.get(key)
        return state.freeze if isinstance(state, STOPPED) else None


def advance(window: Window, observation: Observation, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    """Take an observation into account.

    Args:
        window: What is remembered of this attempt; `Window(attempt_id=...)` at its start.
        observation: A report, the reason why there is none, or what a witness saw, with its time (UTC).
        policy: How long is too long.

    Returns:
        The window after it, and what changed, in the order of the communicators.

    Raises:
        RasMalformed: a record that had to be looked into is not what NCCL documents.
    """
    match observation:
        case Blank():
            return _without_report(window, observation, policy)
        case Witness():
            return _with_witness(window, observation, policy)
        case Sighting():
            return _with_report(_rebased(window, observation.observed_at), observation, policy)


# ---- a poll without a report --------------------------------------------------------------------------


def _without_report(window: Window, blank: Blank, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    failed = window.failed_polls + 1
    since = window.failing_since or blank.observed_at
    after = replace(window, failed_polls=failed, failing_since=since)
    if window.blind is not None or not (blank.permanent or failed >= policy.blind_after_polls):
        return after, ()
    blind = Blind(since=since, reason=blank.reason, permanent=blank.permanent)
    event = Event(
        at=blank.observed_at, event="blind", stalled_s=seconds(since, blank.observed_at), reason=blank.reason
    )
    return replace(after, blind=blind), (event,)


# ---- an answer of a witness ---------------------------------------------------------------------------


def _with_witness(window: Window, witness: Witness, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    key = witness.communicator
    state = window.communicators.get(key)
    if not isinstance(state, Frozen | Suspected | Idle) or state.freeze.asked_at is None:
        return window, ()  # it moved meanwhile, so the answer is about something that is over
    seen_at = window.last_report_at or witness.observed_at
    extended = _extended(window.communicators.values())
    envelope_s = window.envelopes.get(key, 0.0)
    now, events = testify(key, state, witness, envelope_s, policy, seen_at, extended=extended)
    states = {**window.communicators, key: now}
    calm = {one: until for one, until in window.calm_until.items() if one != key}
    after = replace(
        window, communicators=states, calm_until=calm, opened_at=_opened_at(window.opened_at, states.values())
    )
    return after, tuple(events)


def _extended(states: Iterable[object]) -> bool:
    """Whether a rank was seen to work for which others may wait."""
    freezes = [state.freeze if isinstance(state, STOPPED) else state for state in states]
    return any(type(freeze) is Freeze and freeze.extended for freeze in freezes)


def _opened_at(known: datetime | None, states: Iterable[State]) -> datetime | None:
    """The moment that names the incident: set by the first confirmation, kept until nothing hangs."""
    confirmed = [state.freeze.stalled_since for state in states if isinstance(state, Confirmed)]
    return (known or min(confirmed)) if confirmed else None


# ---- a report -----------------------------------------------------------------------------------------


def _rebased(window: Window, at: datetime) -> Window:
    """A clock that steps back must not hide for how long something stood still: what is being timed steps
    back with it. A confirmed freeze keeps its moment, which names the incident.
    """
    if window.last_report_at is None or at >= window.last_report_at:
        return window
    step = window.last_report_at - at
    states = {key: _moved_back(state, step) for key, state in window.communicators.items()}
    active = {process: moment - step for process, moment in window.active.items()}
    return replace(window, communicators=states, active=active, calm_until={})


def _moved_back(state: State, step: timedelta) -> State:
    match state:
        case Progressing() | Aside():
            return replace(state, since=state.since - step)
        case Confirmed():
            return state
        case _:
            asked_at = state.freeze.asked_at - step if state.freeze.asked_at else None
            until = state.freeze.idle_until - step if state.freeze.idle_until else None
            freeze = replace(
                state.freeze, since=state.freeze.since - step, idle_until=until, asked_at=asked_at
            )
            if isinstance(state, Frozen):
                return Frozen(freeze)
            return replace(state, freeze=freeze, told_at=state.told_at - step)


def _with_report(window: Window, sighting: Sighting, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    poll = Poll(sighting, policy)
    at, records = poll.at, sighting.report.records
    events: list[Event] = []
    if window.blind is not None:
        blind_s = seconds(window.blind.since, at)
        reason = f"reports again; it had none because: {window.blind.reason}"
        events.append(Event(at=at, event="recovered", stalled_s=blind_s, reason=reason))
    looks: dict[str, Seen] = {}
    moved: set[str] = set()
    stands = window.still > 0
    for key, record in records.items():
        before = window.communicators.get(key)
        if type(before) is Progressing and before.digest != record.digest and goes_on(before, record):
            looks[key] = Progressing(record.digest, at, record.size)  # as look() says, and most of all polls
            moved.add(key)
            continue
        looks[key], goes = look(before, record, poll)
        stands = stands or isinstance(looks[key], Freeze)
        if goes:
            moved.add(key)
    if not stands:
        return _all_well(window, looks, poll), tuple(events)
    if moved or _made_or_gone(window, records.keys()):
        looks = {key: restarted(seen, at) for key, seen in looks.items()}
    elsewhere, active = moves_elsewhere(window.elsewhere, window.active, window.communicators, looks, poll)
    idle = _idle(looks, active, poll)
    looks.update(idle)
    job = Job(
        explained=any(map(_explains, looks.values())), extended=_extended(looks.values()), policy=policy
    )
    steps = _Steps(envelopes=dict(window.envelopes), events=events)
    _take_steps(window, looks, moved, idle, poll, job, steps)
    after = Window(
        attempt_id=window.attempt_id,
        communicators=steps.states,
        opened_at=_opened_at(window.opened_at, steps.states.values()),
        envelopes=steps.envelopes,
        last_report_at=at,
        visible=sighting.visible or window.visible,
        nccl_version=sighting.report.nccl_version,
        entries=sighting.report.entries,
        elsewhere=elsewhere,
        active=active,
        calm_until=steps.calm_until,
        job=job,
        still=sum([isinstance(state, STOPPED) for state in steps.states.values()]),
    )
    return after, tuple(sorted(steps.events, key=lambda event: event.communicator))


def _all_well(window: Window, looks: Mapping[str, Seen], poll: Poll) -> Window:
    """The window after a report in which nothing stands still, where nothing did before."""
    report = poll.sighting.report
    return Window(
        attempt_id=window.attempt_id,
        communicators={key: seen for key, seen in looks.items() if not isinstance(seen, Freeze)},
        envelopes=window.envelopes,
        last_report_at=poll.at,
        visible=poll.sighting.visible or window.visible,
        nccl_version=report.nccl_version,
        entries=report.entries,
    )


class _Steps(Struct, kw_only=True):
    """What a report makes of all communicators, while it is being put together."""

    envelopes: dict[str, float]
    events: list[Event]
    states: dict[str, State] = {}
    calm_until: dict[str, datetime] = {}


def _take_steps(  # noqa: PLR0917  all that is known of a report by now
    window: Window,
    looks: Mapping[str, Seen],
    moved: Collection[str],
    idle: Collection[str],
    poll: Poll,
    job: Job,
    steps: _Steps,
) -> None:
    at, calm_until = poll.at, window.calm_until if job == window.job else {}
    for key in [*looks, *(key for key in window.communicators if key not in looks)]:
        before, seen = window.communicators.get(key), looks.get(key)
        until = calm_until.get(key)
        if until is not None and at < until and isinstance(before, STOPPED) and seen is before.freeze:
            steps.states[key], steps.calm_until[key] = before, until
            continue
        if isinstance(seen, (Progressing, Aside)) and not isinstance(before, STOPPED):
            steps.states[key] = seen
            continue
        if isinstance(before, STOPPED) and not is_same(before, seen):
            if key in moved or _is_symmetric(before.freeze, seen):
                steps.envelopes.update(learned(key, before, steps.envelopes, poll))
            steps.events += released(key, before, seen, poll)
            before = None
        if seen is not None:
            envelope_s = steps.envelopes.get(key, 0.0)
            state, told = _stepped(key, before, seen, envelope_s, poll, job, idle=key in idle)
            steps.states[key] = state
            steps.events += told
            if isinstance(before, STOPPED) and seen is before.freeze:
                steps.calm_until[key] = calm_till(state, envelope_s, poll, extended=job.extended)


def _idle(looks: Mapping[str, Seen], active: Mapping[Process, datetime], poll: Poll) -> dict[str, Freeze]:
    """The mismatches whose members all go on in other communicators."""
    if not active:
        return {}
    idle: dict[str, Freeze] = {}
    for key, seen in looks.items():
        until = idle_until(seen, active, poll) if isinstance(seen, Freeze) else None
        if until is not None and isinstance(seen, Freeze):
            idle[key] = replace(seen, idle_until=until)
    return idle


def _stepped(  # noqa: PLR0917  as escalated
    key: str, before: State | None, seen: Seen, envelope_s: float, poll: Poll, job: Job, *, idle: bool
) -> tuple[State, list[Event]]:
    match seen:
        case Freeze(kind="symmetric") if job.explained:
            return _consequence(before, seen), []
        case Freeze():
            return escalated(key, before, seen, envelope_s, poll, idle=idle, extended=job.extended)
        case Progressing() | Aside():
            return seen, []


def _made_or_gone(window: Window, keys: Collection[str]) -> bool:
    """Whether the job made or ended a communicator. What a restart forgot is not new."""
    if any(key not in keys for key in window.communicators):
        return True
    return not window.partial and any(key not in window.communicators for key in keys)


def _explains(seen: Seen) -> bool:
    """Whether it is a freeze for which others may wait; one that is older than their stall is not."""
    return isinstance(seen, Freeze) and seen.kind != "symmetric" and seen.repeated and not seen.idle_until


def _is_symmetric(freeze: Freeze, seen: Seen | None) -> bool:
    return isinstance(seen, Freeze) and freeze.kind == seen.kind == "symmetric"


def _consequence(before: State | None, freeze: Freeze) -> State:
    """Equal counts beside a freeze that explains them: kept, and not told of again."""
    match before:
        case Suspected(_, told_at):
            return Suspected(freeze, told_at)
        case Confirmed(_, confirmed_at):
            return Confirmed(freeze, confirmed_at)
        case _:
            return Frozen(freeze)
