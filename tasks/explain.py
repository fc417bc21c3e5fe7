"""Say which rank did it, and put it where people look."""

import msgspec
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.capture import Case, RasEvidence, Stacks, keep_json
from tasks.hang.errors import RasError
from tasks.hang.evidence import Entry, tally
from tasks.hang.incident import Incident as Hang
from tasks.hang.report import Communicator
from tasks.hang.states import Freeze
from tasks.hang.verdict import Verdict, judge
from tasks.ownership import load_incident
from tasks.reporting.wording import verdict_markdown


@task(name="explain", cache_policy=NO_CACHE)
def explain(case: Case, stacks: Stacks, ras: RasEvidence) -> Verdict | None:
    """Judge the incident; None where nothing stands still (a capture by hand of a healthy run)."""
    members = _members(case, ras)
    if not members:
        get_run_logger().info("No communicator of %s stands still: there is nothing to judge.", case.run_name)
        return None
    stored = load_incident(case.incident_id) if case.incident_id else None
    hang = Hang(
        incident_id=case.incident_id or "manual",
        run_name=case.run_name,
        attempt_id=case.attempt.attempt_id,
        opened_at=min(freeze.since for freeze, _ in members.values()),
        members=tuple(stored.members)
        if stored
        else tuple(sorted(members, key=lambda k: members[k][0].since)),
    )
    verdict = judge(hang, case.attempt, members, stacks.positions)
    get_run_logger().warning("%s %s", verdict.headline, verdict.reason)
    return verdict


def show(case: Case, verdict: Verdict | None, entries: tuple[Entry, ...], where: str) -> None:
    """The verdict as verdict.json and as an artifact, and what was captured as a table in the log."""
    if verdict is not None:
        keep_json(case, "verdict.json", msgspec.to_builtins(verdict))
        create_markdown_artifact(
            verdict_markdown(verdict, where),
            key=f"verdict-{case.slug}",
            description=f"{case.run_name}: {verdict.headline}",
        )
    for row in tally(entries):
        get_run_logger().info("%(tool)s: %(captured)d captured, %(missing)d missing %(why)s", row)


def _members(case: Case, ras: RasEvidence) -> dict[str, tuple[Freeze, Communicator]]:
    """The communicators that stand still and that the newest report still shows."""
    if ras.report is None:
        return {}
    members: dict[str, tuple[Freeze, Communicator]] = {}
    for key, freeze in case.window.stalled.items():
        record = ras.report.records.get(key)
        try:
            communicator = record.decode() if record else None
        except RasError:
            communicator = None
        if communicator is not None:
            members[key] = (freeze, communicator)
    return members
