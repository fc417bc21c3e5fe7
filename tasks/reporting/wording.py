"""The sentences of the log, the events and the artifacts."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tasks.hang.counts import ranges
from tasks.hang.policy import Action, FreezeKind
from tasks.hang.states import (
    Aside,
    Blind,
    Confirmed,
    Event,
    Frozen,
    Idle,
    Progressing,
    State,
    Suspected,
)
from tasks.hang.verdict import Verdict
from tasks.hang.window import Window

_ROWS = 200
_TOLD_AT_ONCE = 8
_ORDER = (
    "hung", "suspected", "standing still", "idle", "leaving", "not observable by RAS", "quiet", "progressing",
)  # fmt: skip

ActionFor = Callable[[FreezeKind], Action]


def duration(seconds: float) -> str:
    """`45 s`, `10 min`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 120:  # noqa: PLR2004  up to two minutes people think in seconds
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def tell(events: Iterable[Event], run_name: str, action_for: ActionFor) -> list[tuple[str, str]]:
    """One log line for each kind of event and freeze of a poll.

    Args:
        events: The events of one poll.
        run_name: The training run.
        action_for: What a hang of a kind leads to; in `fail` mode a suspicion says when it will act.

    Returns:
        (level, text) pairs, level WARNING or INFO.
    """
    by_event: dict[tuple[str, FreezeKind | None], list[Event]] = {}
    for event in events:
        by_event.setdefault((event.event, event.kind), []).append(event)
    return [_line(told, run_name, action_for) for told in by_event.values()]


def _line(events: Sequence[Event], run_name: str, action_for: ActionFor) -> tuple[str, str]:
    first = max(events, key=lambda event: event.stalled_s)
    if first.kind is None:
        return _run_line(first, run_name)
    stalls = "; ".join(stall(event) for event in events[:_TOLD_AT_ONCE])
    if len(events) > _TOLD_AT_ONCE:
        stalls += f"; and {len(events) - _TOLD_AT_ONCE} more communicators"
    fails = action_for(first.kind) == "fail"
    match first.event:
        case "recovered":
            return "INFO", f"{run_name}: recovered: {stalls}; {first.reason}."
        case "idle":
            return "INFO", f"{run_name}: idle, not a hang: {stalls}{_because(first)}."
        case "confirmed":
            act = "The run is going to be failed." if fails else "Action is observe: nothing is done."
            return "WARNING", f"{run_name}: hang confirmed: {stalls}{_because(first)}. {act}"
        case _:
            word = "suspected hang" if first.event == "suspected" else "still a suspected hang"
            return (
                "WARNING",
                f"{run_name}: {word}: {stalls}{_because(first)}. {_prospect(first, fails=fails)}",
            )


def _run_line(event: Event, run_name: str) -> tuple[str, str]:
    if event.event == "blind":
        since = duration(event.stalled_s)
        return "WARNING", f"{run_name}: blind for {since}, a hang would not be seen: {event.reason}"
    return "INFO", f"{run_name}: reports again after {duration(event.stalled_s)} without one."


def _prospect(event: Event, *, fails: bool) -> str:
    """What happens if it goes on like this."""
    act = ", and the run is failed then." if fails else "."
    left_s = event.due_s - event.stalled_s
    if event.kind == "symmetric":
        when = f"in {duration(left_s)} " if left_s > 0 else ""
        return f"It is confirmed {when}only if a witness sees every rank wait{act}"
    return (
        f"It is confirmed in {duration(left_s)}{act}" if left_s > 0 else f"It is about to be confirmed{act}"
    )


def _because(event: Event) -> str:
    return f" ({event.reason})" if event.reason else ""


def stall(event: Event) -> str:
    """One stalled communicator in a clause."""
    head = f"communicator {event.communicator} ({event.size} ranks, {event.kind})"
    still = f"{head} has not moved for {duration(event.stalled_s)}"
    silent = f", ranks {ranges(event.missing)} do not answer" if event.missing else ""
    match event.kind:
        case "symmetric":
            return f"{still}, all ranks launched the same{silent}"
        case "init":
            since = duration(event.stalled_s)
            return f"{head} is being created for {since}, ranks {ranges(event.lagging)} are not through"
        case "unresponsive":
            return f"{still}, ranks {ranges(event.lagging)} do not answer"
        case _:
            return f"{still}, ranks {ranges(event.lagging)} behind{silent}"


def state_table(window: Window) -> list[dict[str, str]]:
    """The state of each communicator, the worst first, as rows of a table artifact."""
    rows = [_row(key, state) for key, state in window.communicators.items()]
    return sorted(rows, key=lambda row: (_ORDER.index(row["state"]), row["communicator"]))


_WORDS: dict[type, str] = {
    Confirmed: "hung",
    Suspected: "suspected",
    Idle: "idle",
    Frozen: "standing still",
    Progressing: "progressing",
}


def _word(state: State) -> str:
    if isinstance(state, Aside):
        return "leaving" if state.what == "leaving" else "not observable by RAS"
    if isinstance(state, Frozen) and not state.freeze.repeated:
        return "quiet" if state.freeze.kind == "symmetric" else "progressing"
    return _WORDS[type(state)]


def _row(key: str, state: State) -> dict[str, str]:
    missing = remark = kind = behind = ""
    match state:
        case Progressing():
            since, size, missing = state.since, state.size, str(state.missing or "")
        case Aside():
            since, size, missing = state.since, state.size, str(state.missing or "")
            remark = state.remark or "no collective was ever counted; sends and receives are not"
        case Frozen(freeze) | Suspected(freeze) | Idle(freeze) | Confirmed(freeze):
            since, size, kind = freeze.stalled_since, freeze.size, freeze.kind
            behind, missing = ranges(freeze.lagging), str(len(freeze.missing) or "")
            said = freeze.testimony.reason if freeze.testimony else ""
            remark = "; ".join(part for part in (freeze.remark, said) if part)
    return {
        "communicator": key,
        "state": _word(state),
        "kind": kind,
        "ranks": str(size),
        "behind (communicator ranks)": behind,
        "do not answer": missing,
        "unchanged since": since.isoformat(timespec="seconds"),
        "remark": remark,
    }


def state_markdown(run_name: str, window: Window, at: str, farewell: str = "") -> str:
    """What the UI shows of a run: one sentence, then the state of each communicator, the worst first."""
    rows = state_table(window)
    lines = [f"# {run_name}", "", f"{farewell or summary(window)} ({at})", ""]
    if rows:
        header = list(rows[0])
        lines += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += ["| " + " | ".join(row.values()) + " |" for row in rows[:_ROWS]]
    if len(rows) > _ROWS:
        lines += ["", f"And {len(rows) - _ROWS} more, none in a worse state."]
    return "\n".join(lines)


def summary(window: Window) -> str:
    """The state of a run in one sentence or two."""
    if window.blind is not None:
        return _blind(window.blind)
    states = list(window.communicators.values())
    if not states:
        return "No communicator seen yet."
    counted = Counter(_word(state) for state in states)
    parts = [f"{counted[word]} {word}" for word in _ORDER if counted[word]]
    plural = "communicator" if len(states) == 1 else "communicators"
    absent = sum(_absent(state) for state in states)
    unheard = f" {absent} ranks do not answer." if absent else ""
    seen = ""
    if window.visible is not None and window.visible[0] < window.visible[1]:
        seen = f" {window.visible[0]} of {window.visible[1]} ranks visible: the others are not watched."
    return f"{len(states)} {plural}: {', '.join(parts)}.{unheard}{seen}"


def _absent(state: State) -> int:
    return state.missing if isinstance(state, Progressing | Aside) else len(state.freeze.missing)


def _blind(blind: Blind) -> str:
    return f"Blind since {blind.since.isoformat(timespec='seconds')}: {blind.reason}"


def failure_message(verdict: Verdict, evidence: str) -> str:
    """The error that the owner of the training job sees; its first 500 characters say it all."""
    suspects = ", ".join(suspect.name for suspect in verdict.suspects[:4])
    where = verdict.suspects[0].where if verdict.suspects else "unknown"
    what = f"{suspects} stands in {where[:120]}" if suspects else verdict.headline[:160].rstrip(".")
    inside = ", ".join(verdict.functions) or "a collective"
    return (
        f"NCCL hang ({verdict.kind}) confirmed by rankwatch: {what}; "
        f"{len(verdict.waiting)} ranks wait in {inside}. "
        f"Evidence: {evidence[-160:]} Communicator {verdict.communicator}, incident {verdict.incident_id}."
    )


def verdict_markdown(verdict: Verdict, evidence: str) -> str:
    """The verdict first, then what it rests on."""
    lines = [f"## {verdict.headline}", "", verdict.reason, "", f"Confidence: {verdict.confidence}.", ""]
    lines += ["| suspect | counts | stands in |", "| --- | --- | --- |"]
    lines += [f"| {s.name} | {s.why} | {s.where} |" for s in verdict.suspects[:50]]
    lines += ["", f"Communicator `{verdict.communicator}`; evidence: `{evidence}`"]
    lines += [f"- missing: {gap}" for gap in verdict.missing_evidence]
    return "\n".join(lines)
