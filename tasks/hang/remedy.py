"""What is to be done about a verdict. Policies decide here; actuators act elsewhere."""

from typing import Literal

from msgspec import Struct

from tasks.hang.policy import Action
from tasks.hang.run import Attempt
from tasks.hang.verdict import Verdict

DecisionKind = Literal["observe", "fail", "leave"]


class Decision(Struct, frozen=True):
    """A decision with its reason."""

    kind: DecisionKind
    reason: str


def decide(verdict: Verdict, action: Action, now: Attempt | None, *, still_frozen: bool) -> Decision:
    """Decide on a confirmed hang.

    Args:
        verdict: Of the incident.
        action: What the operator allows.
        now: The attempt as it is now, None where the run is gone.
        still_frozen: Whether a report newer than the evidence shows the same counts.

    Returns:
        `leave` where the verdict is about something that is over: an old one never hits a new attempt.
    """
    if now is None or now.finished:
        return Decision("leave", "The run is over.")
    if now.attempt_id != verdict.attempt_id:
        return Decision("leave", f"Attempt {verdict.attempt_id} is over; the run is in {now.attempt_id}.")
    if not still_frozen:
        return Decision("leave", "The run moves again since the evidence was captured.")
    if action == "observe":
        why = f"Action for {verdict.kind} is observe: everything is captured, nothing is touched."
        return Decision("observe", why)
    return Decision("fail", f"Action is fail and the hang is confirmed: {verdict.headline}")
