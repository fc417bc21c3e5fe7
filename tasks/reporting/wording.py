"""The sentences of the log, the events and the artifacts."""

from collections.abc import Iterable, Sequence

from tasks.hang.policy import Action, HangPolicy
from tasks.hang.verdict import Verdict, ranges
from tasks.hang.window import Blind, Confirmed, Event, Frozen, Progressing, State, Suspected, Window

_ROWS = 200


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
    order = {"confirmed": 0, "suspected": 1, "frozen": 2, "progressing": 3}
    rows = [_row(key, state) for key, state in window.communicators.items()]
    return sorted(rows, key=lambda row: (order[row["state"]], row["communicator"]))


def _row(key: str, state: State) -> dict[str, str]:
    match state:
        case Progressing(_, since, size):
            name, behind, polls = "progressing", "", ""
        case Frozen(freeze) | Suspected(freeze) | Confirmed(freeze):
            since, size, polls = freeze.since, freeze.size, str(freeze.polls)
            name, behind = type(state).__name__.lower(), ranges(freeze.lagging)
    return {
        "communicator": key,
        "state": name,
        "ranks": str(size),
        "behind (communicator ranks)": behind,
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
    parts = [
        f"{sum(isinstance(state, kind) for state in states)} {word}"
        for kind, word in (
            (Confirmed, "hung"),
            (Suspected, "suspected"),
            (Frozen, "standing still"),
            (Progressing, "progressing"),
        )
        if any(isinstance(state, kind) for state in states)
    ]
    return f"{len(states)} communicators: {', '.join(parts)}."


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
