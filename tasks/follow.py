"""Follow an incident from phase to phase: `confirmed -> diagnosed -> decided -> acted -> closed`.

A phase is stored before the next begins, so a shift that dies between two of them is followed by one that
picks the incident up. Each phase is claimed, so two processes cannot both act.
"""

import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from prefect.events import emit_event
from prefect.logging import get_run_logger

from tasks.blocks import Incident, slug_of
from tasks.capture import Case, Stacks
from tasks.hang.errors import RankwatchError
from tasks.hang.incident import Incident as Hang
from tasks.hang.incident import Phase, incident_of
from tasks.hang.memory import recall, remember
from tasks.hang.policy import FreezeKind
from tasks.hang.remedy import Decision, decide
from tasks.hang.run import Attempt
from tasks.hang.verdict import Verdict
from tasks.hang.window import Window
from tasks.ownership import (
    SERVER_ERRORS,
    claim_phase,
    load_incident,
    now,
    our_tenure,
    save_incident,
)
from tasks.reporting.wording import failure_message
from tasks.shift import Shift
from tasks.training import Act, fail_attempt, still_frozen
from tasks.wiring import Eyes

Step = Literal["diagnose", "remediate"]
_TRIES = 3
_WAIT_AT_MOST_S = 300.0


class Due(msgspec.Struct, frozen=True):
    """The next step of an incident."""

    step: Step
    incident_id: str


def steps(shift: Shift) -> Iterator[Due]:
    """The steps that the open incident of a run needs now, one after the other; ends where a step did not
    bring it further, so that polling goes on.
    """
    last: Due | None = None
    while (due := next_step(shift)) is not None and due != last:
        yield due
        last = due


def next_step(shift: Shift) -> Due | None:
    """What the open incident of a run needs now, None where there is nothing to do.

    The Prefect server being away delays a step to a later poll; it never loses or repeats one.
    """
    if time.monotonic() < shift.not_before:
        return None
    try:
        hang = shift.incident()
        if hang is not None:
            shift.open_incident = hang.incident_id
        if not shift.open_incident:
            return None
        record = load_incident(shift.open_incident)
        if record is None:
            record = _open(shift, hang) if hang else None
        return _due(shift, record) if record else None
    except (RankwatchError, *SERVER_ERRORS) as error:
        get_run_logger().warning("The incident has to wait: %s", error)
        return None


def count_failure(shift: Shift, due: Due, error: object) -> None:
    """A step that fails is tried again later and later. A capture that fails again and again must not keep a
    hung job hanging: go on without it.
    """
    tries = shift.failures.get(due.incident_id, 0) + 1
    shift.failures[due.incident_id] = tries
    wait_s = min(shift.eyes.plan.policy.poll_interval_s * 2**tries, _WAIT_AT_MOST_S)
    shift.not_before = time.monotonic() + wait_s
    get_run_logger().error("%s of incident %s failed: %s", due.step, due.incident_id, error)
    if due.step == "diagnose" and tries >= _TRIES:
        record = load_incident(due.incident_id)
        if record is not None and record.phase == "confirmed":
            record.evidence = f"not captured: {error}"
            _advance(due.incident_id, record, "diagnosed")
            shift.not_before = 0.0


def diagnosed(case: Case, stacks: Stacks, verdict: Verdict | None, where: str) -> None:
    """Store that the evidence of an incident is complete."""
    record = load_incident(case.incident_id) if case.incident_id else None
    if record is None or record.phase != "confirmed":
        return
    record.evidence = where
    # The ranks that are no suspects are in verdict.json: with thousands of them a block would be too big.
    brief = msgspec.structs.replace(verdict, ranks=()) if verdict else None
    record.verdict = msgspec.to_builtins(brief) if brief else {}
    record.start_ticks = {str(pid): ticks for pid, ticks in stacks.start_ticks.items()}
    _advance(case.incident_id, record, "diagnosed")


def resolve_incident(slug: str, incident_id: str, eyes: Eyes) -> Decision:
    """Decide on a diagnosed incident, and act; what was decided and done is stored before it returns.

    Raises:
        RankwatchError: it cannot be told whether the run still hangs, so nothing is done yet.
    """
    record = load_incident(incident_id)
    if record is None or record.phase not in ("diagnosed", "decided"):
        return Decision("leave", "This incident has nothing that is to be decided.")
    window = recall(record.window, record.attempt_id)
    attempt = eyes.find()
    frozen = attempt.attempt_id == record.attempt_id and still_frozen(eyes, attempt, window)
    verdict = _verdict(incident_id, record)
    action = eyes.plan.settings.action_for(_kind(window))
    decision = decide(verdict, action, attempt, still_frozen=frozen)
    get_run_logger().warning("Decision: %s. %s", decision.kind, decision.reason)
    record.decision = f"{decision.kind}: {decision.reason}"
    if record.phase == "diagnosed":
        _advance(incident_id, record, "decided")
    acts = _act(slug, incident_id, eyes, attempt, verdict, record) if decision.kind == "fail" else []
    record.acts = [*record.acts, *(msgspec.to_builtins(act) for act in acts)]
    _advance(incident_id, record, "acted")
    return decision


def _act(  # noqa: PLR0917  everything that an act needs, in the order of the ladder
    slug: str, incident_id: str, eyes: Eyes, attempt: Attempt, verdict: Verdict, record: Incident
) -> list[Act]:
    if not claim_phase(our_tenure(slug), incident_id, "acted"):
        return [Act("claim", now(), "refused", "Another process acts on this incident.")]
    if attempt.has_callback and eyes.channel.acknowledged(attempt.run_id, incident_id) is not None:
        return [Act("callback", now(), "repeated", "The in-job part had acted on this incident already.")]
    message = failure_message(verdict, record.evidence)
    ticks = {int(pid): int(start) for pid, start in record.start_ticks.items()}
    return fail_attempt(eyes, attempt, verdict, message, ticks)


def _open(shift: Shift, hang: Hang) -> Incident:
    record = Incident(
        run_name=hang.run_name,
        attempt_id=hang.attempt_id,
        folder=hang.folder,
        members=list(hang.members),
        window=remember(shift.window),
        times={"opened": hang.opened_at},
    )
    first = min(shift.window.confirmed.values(), key=lambda freeze: freeze.stalled_since)
    record.times["confirmed"] = now()
    get_run_logger().warning(
        "Incident %s: %s communicators stand still since %s.",
        hang.incident_id,
        len(hang.members),
        first.stalled_since.isoformat(timespec="seconds"),
    )
    save_incident(hang.incident_id, record)
    return record


def _due(shift: Shift, record: Incident) -> Due | None:
    incident_id = shift.open_incident
    match record.phase:
        case "confirmed":
            return Due("diagnose", incident_id)
        case "diagnosed" | "decided":
            return Due("remediate", incident_id)
        case "acted" if _left_too_early(shift, incident_id, record):
            _advance(incident_id, record, "diagnosed")
            return Due("remediate", incident_id)
        case "acted":
            _close_when_over(shift, incident_id, record)
            return None
        case "closed":
            shift.open_incident = ""
            return None


def _left_too_early(shift: Shift, incident_id: str, record: Incident) -> bool:
    """Whether a hang was left alone because one report did not show it, and it is still there: reports of a
    part of the job come by, and a single one must not leave it hanging for good.
    """
    hang = shift.incident()
    still_there = hang is not None and hang.incident_id == incident_id
    return still_there and record.decision.startswith("leave")


def _close_when_over(shift: Shift, incident_id: str, record: Incident) -> None:
    """An incident is over when the run moves again: the same attempt, or the one after it."""
    another = shift.window.attempt_id != record.attempt_id
    if another and "restarted" not in record.times:
        record.times["restarted"] = now()
        save_incident(incident_id, record)
    if shift.over or (shift.moves and shift.incident() is None):
        if shift.moves:
            record.times["progressed"] = now()
        _advance(incident_id, record, "closed")
        shift.open_incident = ""


def _advance(incident_id: str, record: Incident, phase: Phase) -> None:
    record.phase = phase
    record.times[phase] = now()
    save_incident(incident_id, record)
    emit_event(
        event=f"rankwatch.incident.{phase}",
        resource={
            "prefect.resource.id": f"rankwatch.incident.{incident_id}",
            "prefect.resource.name": record.folder,
        },
        related=[
            {
                "prefect.resource.id": f"rankwatch.run.{slug_of(record.run_name)}",
                "prefect.resource.role": "training-run",
            }
        ],
        payload=_payload(record),
    )


def _payload(record: Incident) -> dict[str, Any]:
    return {
        "run_name": record.run_name,
        "attempt_id": record.attempt_id,
        "headline": record.verdict.get("headline", ""),
        "decision": record.decision,
        "evidence": record.evidence,
        "acts": record.acts,
        "times": {name: at.isoformat() for name, at in record.times.items()},
    }


def _kind(window: Window) -> FreezeKind:
    """What hangs: where several communicators do, the one that is named first."""
    hang = incident_of("", window)
    root = window.freeze(hang.members[0]) if hang else None
    return root.kind if root else "mismatch"


def _verdict(incident_id: str, record: Incident) -> Verdict:
    """The stored verdict; where there is none, one that names nobody."""
    if record.verdict:
        return msgspec.convert(record.verdict, Verdict)
    return Verdict(
        incident_id=incident_id,
        attempt_id=record.attempt_id,
        kind=_kind(recall(record.window, record.attempt_id)),
        communicator=record.members[0] if record.members else "",
        functions=(),
        headline="No rank could be named: the evidence could not be captured.",
        reason=record.evidence,
        suspects=(),
        waiting=(),
        confidence="low",
        missing_evidence=(record.evidence,),
    )
