"""The sentences of the log, the events and the artifacts."""

from collections.abc import Iterable, Sequence

from tasks.hang.policy import Action, HangPolicy
from tasks.hang.verdict import Verdict, ranges
from tasks.hang.window import Blind, Confirmed, Event, Frozen, Progressing, State, Suspected, Window

_QUIET = "not moving, ranks agree"
_ROWS = 200
_QUIET_S = 30.0  # without a launch for so long, nobody shall read that a communicator progresses


def duration(seconds: float) -> str:
    """`45 s`, `10 min`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 120:  # noqa: PLR2004  up to two minutes people think in seconds
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def tell(events: Iterable[Event], run_name: str, policy: HangPolicy, action: Action) -> list[tuple[str, str]]:
    """One log line for each kind of event of a poll.

    Args:
        events: The events of one poll.
        run_name: The training run.
        policy: Tells how long is left.
        action: In `fail` mode a suspicion says when it will act.

    Returns:
        (level, text) pairs, level WARNING or INFO.
    """
    by_event: dict[str, list[Event]] = {}
    for event in events:
        by_event.setdefault(event.event, []).append(event)
    return [_line(kind, told, run_name, policy, action) for kind, told in by_event.items()]


def _line(
    kind: str, events: Sequence[Event], run_name: str, policy: HangPolicy, action: Action
) -> tuple[str, str]:
    first = max(events, key=lambda event: event.stalled_s)
    stalls = "; ".join(stall(event) for event in events)
    match kind:
        case "blind":
            return "WARNING", (
                f"{run_name}: blind for {duration(first.stalled_s)}, a hang would not be seen: {first.reason}"
            )
        case "sighted":
            return "INFO", f"{run_name}: reports again after {duration(first.stalled_s)} without one."
        case "recovered":
            return "INFO", f"{run_name}: recovered: {stalls}; {first.reason}."
        case "confirmed":
            act = (
                "The run is going to be failed."
                if action == "fail"
                else "Action is observe: nothing is done."
            )
            return "WARNING", f"{run_name}: hang confirmed: {stalls}. {act}"
        case _:
            left = policy.confirm_duration_s - first.stalled_s
            then = (
                f" It is confirmed in {duration(max(0.0, left))}"
                if left > 0
                else " It is about to be confirmed"
            )
            act = ", and the run is failed then." if action == "fail" else "."
            word = "suspected hang" if kind == "suspected" else "still a suspected hang"
            return "WARNING", f"{run_name}: {word}: {stalls}.{then}{act}"


def stall(event: Event) -> str:
    """One stalled communicator in a clause."""
    missing = f", ranks {ranges(event.missing)} do not answer" if event.missing else ""
    return (
        f"communicator {event.communicator} ({event.size} ranks, {event.kind}) has not moved for "
        f"{duration(event.stalled_s)}, ranks {ranges(event.lagging)} behind{missing}"
    )


def state_table(window: Window) -> list[dict[str, str]]:
    """The state of each communicator, the worst first, as rows of a table artifact."""
    order = {"confirmed": 0, "suspected": 1, "frozen": 2, _QUIET: 3, "progressing": 4}
    rows = [_row(key, state, _is_quiet(state, window)) for key, state in window.communicators.items()]
    return sorted(rows, key=lambda row: (order[row["state"]], row["communicator"]))


def _is_quiet(state: State, window: Window) -> bool:
    """Whether nothing was launched for a while, though the ranks that answer agree: idle, or a hang of a kind
    that is not told apart here.
    """
    if not isinstance(state, Progressing) or window.last_report_at is None:
        return False
    return (window.last_report_at - state.since).total_seconds() >= _QUIET_S


def _row(key: str, state: State, quiet: bool) -> dict[str, str]:
    missing = ""
    match state:
        case Progressing(_, since, size, absent):
            name, behind, polls = _QUIET if quiet else "progressing", "", ""
            missing = str(absent) if absent else ""
        case Frozen(freeze) | Suspected(freeze) | Confirmed(freeze):
            since, size, polls = freeze.since, freeze.size, str(freeze.polls)
            name, behind = type(state).__name__.lower(), ranges(freeze.lagging)
            missing = str(len(freeze.missing)) if freeze.missing else ""
    return {
        "communicator": key,
        "state": name,
        "ranks": str(size),
        "behind (communicator ranks)": behind,
        "do not answer": missing,
        "unchanged since": since.isoformat(timespec="seconds"),
        "polls": polls,
    }


def state_markdown(run_name: str, window: Window, at: str, farewell: str = "") -> str:
    """What the UI shows of a run: one sentence, then the state of each communicator, the worst first."""
    rows = state_table(window)
    lines = [f"# {run_name}", "", f"{summary(window)} ({at})", ""]
    lines += [farewell, ""] if farewell else []
    if rows:
        header = list(rows[0])
        lines += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += ["| " + " | ".join(row.values()) + " |" for row in rows[:_ROWS]]
    if len(rows) > _ROWS:
        lines += ["", f"And {len(rows) - _ROWS} more, none in a worse state."]
    return "\n".join(lines)


def summary(window: Window) -> str:
    """The state of a run in one sentence."""
    if window.blind is not None:
        return _blind(window.blind)
    states = list(window.communicators.values())
    if not states:
        return "No communicator seen yet."
    quiet = [state for state in states if isinstance(state, Progressing) and _is_quiet(state, window)]
    absent = sum(state.missing for state in states if isinstance(state, Progressing))
    absent += sum(len(freeze.missing) for freeze in window.stalled.values())
    counted = (
        (sum(isinstance(state, Confirmed) for state in states), "hung"),
        (sum(isinstance(state, Suspected) for state in states), "suspected"),
        (sum(isinstance(state, Frozen) for state in states), "standing still in disagreement"),
        (len(quiet), _QUIET),
        (sum(isinstance(state, Progressing) for state in states) - len(quiet), "progressing"),
    )
    parts = [f"{number} {word}" for number, word in counted if number]
    plural = "communicator" if len(states) == 1 else "communicators"
    unheard = f" {absent} ranks do not answer." if absent else ""
    return f"{len(states)} {plural}: {', '.join(parts)}.{unheard}"


def _blind(blind: Blind) -> str:
    return f"Blind since {blind.since.isoformat(timespec='seconds')}: {blind.reason}"


def failure_message(verdict: Verdict, evidence: str) -> str:
    """The error that the owner of the training job sees; its first 500 characters say it all."""
    suspects = ", ".join(suspect.name for suspect in verdict.suspects[:4])
    where = verdict.suspects[0].where if verdict.suspects else "unknown"
    return (
        f"NCCL hang ({verdict.kind}) confirmed by rankwatch: {suspects} stands in {where[:120]}; "
        f"{len(verdict.waiting)} ranks wait in {', '.join(verdict.functions)}. "
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
