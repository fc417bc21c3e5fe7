"""Decide on a diagnosed hang, and act where that is allowed."""

from prefect import flow

from tasks.follow import resolve_incident
from tasks.wiring import eyes_of, load_run


@flow(name="remediate_run", flow_run_name="remediate {run} {incident}", retries=0)
def remediate_run(run: str, incident: str) -> str:
    """Fail the hung attempt, so that it restarts from its checkpoint; observe does everything but the act.

    Args:
        run: Name of the TrainingRun block.
        incident: The incident; an old one never hits a new attempt.

    Returns:
        The decision and its reason.
    """
    decision = resolve_incident(run, incident, eyes_of(load_run(run)))
    return f"{decision.kind}: {decision.reason}"
