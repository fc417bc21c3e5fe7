"""From frozen to suspected to confirmed: what time makes of a freeze, and what witnesses are asked for."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from tasks.hang.counts import apart
from tasks.hang.looking import Poll, Seen
from tasks.hang.policy import ENVELOPE_FACTOR, HangPolicy
from tasks.hang.states import (
    Aside,
    Confirmed,
    Event,
    EventKind,
    Freeze,
    Frozen,
    Idle,
    State,
    Stopped,
    Suspected,
    seconds,
)
from tasks.hang.testimony import weigh
from tasks.hang.witness import Witness

_TOLD = (Suspected, Idle, Confirmed)
_NEVER = datetime.max.replace(tzinfo=UTC)
_ASK_AT_MOST = 64  # ranks behind that are looked at: beyond that the others say nothing new


def is_same(before: Stopped, seen: Seen | None) -> bool:
    """Whether a freeze goes on."""
    return isinstance(seen, Freeze) and seen.since == before.freeze.since and seen.kind == before.freeze.kind


def learned(key: str, before: Stopped, envelopes: Mapping[str, float], poll: Poll) -> Mapping[str, float]:
    """The envelope of a communicator after a stall that recovered; empty where it changes nothing."""
    stalled_s = seconds(before.freeze.stalled_since, poll.at)
    worth = ENVELOPE_FACTOR * stalled_s > poll.policy.confirm_s(before.freeze.kind)
    if isinstance(before, Idle) or not worth or stalled_s <= envelopes.get(key, 0.0):
        return {}
    return {key: stalled_s}


def released(key: str, before: Stopped, seen: Seen | None, poll: Poll) -> Iterable[Event]:
    """A freeze is over: say so if it had been told of."""
    if not isinstance(before, _TOLD):
        return []
    match seen:
        case None:
            reason = "the communicator is gone"
        case Aside(remark=remark):
            reason = f"its ranks are leaving: {remark}"
        case Freeze(kind="symmetric"):
            reason = "other communicators of the job move"
        case Freeze():
            reason = "its ranks moved or a missing one came back"
        case _:
            reason = "its ranks moved or agree again"
    stalled_s = stalled(before.freeze, poll.at, idle=isinstance(before, Idle))
    return [_Step(key, before, before.freeze, poll.at, stalled_s, 0.0, reason).event("recovered")]


def due_of(freeze: Freeze, envelope_s: float, policy: HangPolicy, *, extended: bool) -> float:
    """Seconds of standing still after which a freeze is a hang.

    Args:
        freeze: What does not move.
        envelope_s: Its longest stall that recovered.
        policy: How long is too long.
        extended: Whether a rank of another freeze was seen to work: ranks that only wait are given its time.
    """
    waits = freeze.testimony is not None and freeze.testimony.waits
    return policy.due_s(freeze.kind, envelope_s=envelope_s, extended=freeze.extended or (extended and waits))


def escalated(
    key: str,
    before: State | None,
    freeze: Freeze,
    envelope_s: float,
    poll: Poll,
    *,
    idle: bool,
    extended: bool,
) -> tuple[State, list[Event]]:
    """Where a freeze stands after a report, and what is to be told of it.

    Args:
        key: The communicator.
        before: Its last state, None where this freeze is new.
        freeze: What does not move.
        envelope_s: Its longest stall that recovered.
        poll: The report.
        idle: Whether its members go on in other communicators.
        extended: Whether a rank of any freeze was seen to work.
    """
    at, policy = poll.at, poll.policy
    if isinstance(before, Confirmed):
        return Confirmed(freeze, before.confirmed_at), []
    if not freeze.repeated:
        return Frozen(freeze), []
    idle = idle and not _seen_stuck(freeze)
    if isinstance(before, Idle) and not idle:
        freeze = replace(freeze, asked_at=None, testimony=None)  # what was seen then was no stall
    stalled_s = stalled(freeze, at, idle=idle)
    due_s = due_of(freeze, envelope_s, policy, extended=extended)
    if before is None and stalled_s < _nothing_before(due_s, freeze, policy):
        return Frozen(freeze), []
    freeze = _asked(freeze, stalled_s, due_s, poll, idle=idle)
    confirmed, reason = verdict_of(freeze, stalled_s, due_s, at, policy, idle=idle)
    step = _Step(key, before, freeze, at, stalled_s, due_s, reason, policy.confirm_s(freeze.kind))
    if confirmed:
        return confirm(step)
    return _as_idle(step, policy) if idle else _as_suspect(step, policy)


def _nothing_before(due_s: float, freeze: Freeze, policy: HangPolicy) -> float:
    """Seconds of a new stall before which nobody is asked and nothing is told."""
    first_s = min(due_s, policy.fast_confirm_s or due_s) - policy.lead_s(freeze.kind)
    return min(policy.suspect_after_s, first_s)


class _Step(Struct, frozen=True):
    """A freeze that is not confirmed yet, with all that is known of it at a moment."""

    key: str
    before: State | None
    freeze: Freeze
    at: datetime
    stalled_s: float
    due_s: float
    reason: str
    confirm_s: float = 0.0

    def event(self, name: EventKind, why: str = "") -> Event:
        """What is told of it. `confirm_s` is its confirm time without what was learned or seen; 0 leaves out
        by what it grew.
        """
        freeze = self.freeze
        counts = apart(freeze.counts) if freeze.kind == "mismatch" and name != "recovered" else ""
        grown = ""
        if self.confirm_s and self.due_s > self.confirm_s and not freeze.extended:
            grown = f"its confirm time is {self.due_s:g} s, since an earlier stall of it recovered"
        return Event(
            at=self.at,
            event=name,
            communicator=self.key,
            kind=freeze.kind,
            lagging=freeze.lagging,
            leading=freeze.leading,
            missing=freeze.missing,
            size=freeze.size,
            stalled_s=self.stalled_s,
            reason=_join(counts, why or self.reason, grown),
            due_s=self.due_s,
        )


def testify(  # noqa: PLR0917  as escalated, of which it is the other half
    key: str,
    state: Frozen | Suspected | Idle,
    witness: Witness,
    envelope_s: float,
    policy: HangPolicy,
    seen_at: datetime,
    *,
    extended: bool,
) -> tuple[State, list[Event]]:
    """Where a freeze stands after a witness answered.

    Args:
        key: The communicator.
        state: Its state; a witness was asked.
        witness: The answer.
        envelope_s: Its longest stall that recovered.
        policy: How long is too long.
        seen_at: When a report last showed the freeze: so long is sure, however long the answer took.
        extended: Whether a rank of any freeze was seen to work.
    """
    idle = isinstance(state, Idle)
    testimony = weigh(state.freeze, witness, idle=idle or state.freeze.idle_until is not None)
    freeze = replace(state.freeze, testimony=testimony)
    extend = testimony.finding == "moves" and _may_extend(freeze, envelope_s, policy, idle=idle)
    freeze = replace(freeze, extended=freeze.extended or extend)
    stalled_s = stalled(freeze, seen_at, idle=idle)
    due_s = due_of(freeze, envelope_s, policy, extended=extended)
    confirmed, reason = verdict_of(freeze, stalled_s, due_s, seen_at, policy, idle=idle)
    confirm_s = policy.confirm_s(freeze.kind)
    step = _Step(key, state, freeze, witness.observed_at, stalled_s, due_s, reason, confirm_s)
    if confirmed:
        return confirm(step)
    match state:
        case Frozen():
            return Frozen(freeze), []
        case Idle(_, told_at) if testimony.finding == "stuck":
            return Suspected(freeze, told_at), [step.event("suspected")]  # not hidden any more
        case Idle(_, told_at):
            return Idle(freeze, told_at), []
        case Suspected(_, told_at):
            then = f"; confirmed after {due_s:g} s instead, this once" if extend else ""
            news = extend or testimony.finding == "gone"
            told = [step.event("still_suspected", testimony.reason + then)] if news else []
            return Suspected(freeze, told_at), told


def _may_extend(freeze: Freeze, envelope_s: float, policy: HangPolicy, *, idle: bool) -> bool:
    """Whether a rank that works buys time: once, and not by what was seen long before the confirm time."""
    if freeze.kind != "mismatch" or freeze.extended or freeze.asked_at is None:
        return False
    asked_s = seconds(freeze.stalled_since, freeze.asked_at)
    before_due_s = due_of(freeze, envelope_s, policy, extended=False) - policy.lead_s(freeze.kind)
    return asked_s >= before_due_s and not _must_agree(freeze, idle=idle)


def confirm(step: _Step) -> tuple[State, list[Event]]:
    """A hang; nothing is confirmed that was not suspected before."""
    first = [] if isinstance(step.before, Suspected) else [step.event("suspected")]
    return Confirmed(step.freeze, step.at), [*first, step.event("confirmed")]


def _as_idle(step: _Step, policy: HangPolicy) -> tuple[State, list[Event]]:
    if isinstance(step.before, Idle):
        return Idle(step.freeze, step.before.told_at), []
    if step.stalled_s < min(policy.suspect_after_s, step.due_s):
        return Frozen(step.freeze), []
    why = _join("all of its ranks go on in other communicators", step.reason)
    return Idle(step.freeze, step.at), [step.event("idle", why)]


def _as_suspect(step: _Step, policy: HangPolicy) -> tuple[State, list[Event]]:
    if not isinstance(step.before, Suspected):
        if step.stalled_s < policy.suspect_after_s:
            return Frozen(step.freeze), []
        return Suspected(step.freeze, step.at), [step.event("suspected")]
    if seconds(step.before.told_at, step.at) < policy.repeat_every_s:
        return Suspected(step.freeze, step.before.told_at), []
    return Suspected(step.freeze, step.at), [step.event("still_suspected")]


def calm_till(state: State, envelope_s: float, poll: Poll, *, extended: bool) -> datetime:
    """Until when nothing can come of a state, as long as its freeze goes on and nothing else of the job
    changes: thousands of communicators stand still at each poll of a hang.

    Args:
        state: As it is now.
        envelope_s: The longest stall of the communicator that recovered.
        poll: The report.
        extended: Whether a rank of any freeze was seen to work.
    """
    at, policy = poll.at, poll.policy
    match state:
        case Confirmed():
            return _NEVER
        case Frozen(freeze) if not freeze.repeated:
            return at
        case Frozen(freeze):
            next_s = [policy.suspect_after_s]
        case Suspected(freeze, told_at):
            next_s = [seconds(freeze.stalled_since, told_at) + policy.repeat_every_s]
        case _:
            return at
    stalled_s = stalled(freeze, at, idle=False)
    due_s = due_of(freeze, envelope_s, policy, extended=extended)
    waits = freeze.asked_at is not None and freeze.testimony is None
    if waits or stalled_s >= due_s:
        return at
    next_s += [due_s, policy.fast_confirm_s, *_points(freeze, stalled_s, due_s, policy, idle=False)]
    return freeze.stalled_since + timedelta(seconds=min(one for one in next_s if one > stalled_s))


def stalled(freeze: Freeze, at: datetime, *, idle: bool) -> float:
    """Seconds for which a freeze counts: while its members go on elsewhere, from its counts on."""
    return seconds(freeze.since if idle else freeze.stalled_since, at)


def _asked(freeze: Freeze, stalled_s: float, due_s: float, poll: Poll, *, idle: bool) -> Freeze:
    """Ask a witness when one is wanted: in time before the confirmation, and where it must agree, again."""
    policy = poll.policy
    if not policy.witnesses or freeze.kind == "init":
        return freeze
    asked_s = stalled_s - seconds(freeze.asked_at, poll.at) if freeze.asked_at else -1.0
    points = _points(freeze, stalled_s, due_s, policy, idle=idle)
    if not any(asked_s < point <= stalled_s for point in points):
        return freeze
    if freeze.kind == "unresponsive":
        ranks = freeze.silent[:_ASK_AT_MOST]
    elif _must_agree(freeze, idle=idle) or policy.fast_confirm_s:
        ranks = tuple(sorted(freeze.processes.keys() - set(freeze.departed)))
    else:
        ranks = freeze.lagging[:_ASK_AT_MOST]
    return replace(freeze, asked_at=poll.at, asked=ranks, testimony=None)


def _points(
    freeze: Freeze, stalled_s: float, due_s: float, policy: HangPolicy, *, idle: bool
) -> Iterable[float]:
    """Seconds of a stall at which a witness is wanted."""
    before_due_s = max(0.0, due_s - policy.lead_s(freeze.kind))
    points = [before_due_s]
    if freeze.kind == "unresponsive":
        points.append(min(policy.suspect_after_s, before_due_s))
    if freeze.kind == "mismatch" and policy.fast_confirm_s:
        points.append(max(0.0, policy.fast_confirm_s - policy.lead_s(freeze.kind)))
    if _must_agree(freeze, idle=idle) or freeze.kind == "unresponsive":
        again_s = policy.confirm_s(freeze.kind)
        points.append(before_due_s + max(0.0, (stalled_s - before_due_s) // again_s) * again_s)
    return points


def _must_agree(freeze: Freeze, *, idle: bool) -> bool:
    """Whether counts prove so little that a freeze is confirmed only by a witness."""
    return freeze.kind == "symmetric" or bool(freeze.departed) or idle or freeze.idle_until is not None


def _seen_stuck(freeze: Freeze) -> bool:
    """Whether a witness saw all ranks of an idle communicator stand still, and not all went on since."""
    if freeze.testimony is None or freeze.asked_at is None or freeze.idle_until is None:
        return False
    return freeze.testimony.finding == "stuck" and freeze.idle_until <= freeze.asked_at


def verdict_of(  # noqa: PLR0911  a table, one line for each row
    freeze: Freeze, stalled_s: float, due_s: float, at: datetime, policy: HangPolicy, *, idle: bool
) -> tuple[bool, str]:
    """Whether a freeze is a hang now, and why or why not.

    | kind | what confirms it at its confirm time |
    | --- | --- |
    | mismatch | nobody moved; no witness needed, but one that sees a rank work extends the time, once |
    | mismatch, some ranks leaving, or idle before | a witness that sees every other rank wait |
    | mismatch, idle | nothing: a witness that sees every rank wait makes it suspected |
    | unresponsive | a report without timeouts named it, and its process is not seen to be gone |
    | symmetric | a witness that sees every rank wait |
    | init | nobody got further |
    """
    said = freeze.testimony
    reason = _join(freeze.remark, _NEEDS.get(freeze.kind, ""), said.reason if said else "")
    must_agree = _must_agree(freeze, idle=idle)
    if freeze.kind == "mismatch" and not must_agree and said and said.strong and policy.fast_confirm_s:
        due_s = min(due_s, policy.fast_confirm_s)
    if stalled_s < due_s:
        return False, reason
    if freeze.kind == "init":
        return True, reason
    if freeze.kind == "unresponsive" and not freeze.exact:
        return False, _join(reason, "only reports with timeouts named it, which may name healthy ranks")
    if not policy.witnesses:
        unsure = "nobody can look at the processes" if must_agree else ""
        if freeze.kind == "unresponsive":
            unsure = "nobody can tell whether its process is still there"
        return not must_agree, _join(reason, unsure)
    if said is None:
        waited_s = seconds(freeze.asked_at, at) if freeze.asked_at else 0.0
        late = waited_s >= policy.patience_s(freeze.kind)
        return late and not must_agree, _join(reason, "no witness answered in time" if late else "")
    if must_agree:
        return said.finding == "stuck" and not idle, reason
    return said.finding != "gone", reason


_NEEDS = {
    "symmetric": (
        "all ranks launched the same and the whole job stands still, which launch counts cannot tell from a "
        "job that is busy elsewhere"
    )
}


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
