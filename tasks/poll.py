"""Look once at a run: a report, or the reason why there is none."""

from tasks.hang.errors import ClusterError, RankwatchError, RasError, StoreError
from tasks.hang.report import RasReport, parse_report
from tasks.hang.run import Attempt
from tasks.hang.window import Blank, Event, Observation, Sighting, Window, advance
from tasks.ownership import now
from tasks.wiring import Eyes


def poll(eyes: Eyes, attempt: Attempt) -> tuple[Observation, RankwatchError | None]:
    """Ask RAS once and retain the answer.

    A plain function and no Prefect task: a run of its own costs a hundred times what the poll costs.

    Returns:
        What was seen, and the error that kept the report from being retained, if there was one: a full disk
        is to be told of, and no reason to stop watching.
    """
    trouble: RankwatchError | None = None
    try:
        raw = eyes.ras.status(attempt)
        observed_at = now()
        try:
            eyes.ring.append(attempt.attempt_id, observed_at, raw)
        except StoreError as error:
            trouble = error
        report: RasReport = parse_report(raw)
    except RasError as error:
        return Blank(now(), str(error), permanent=error.permanent), trouble
    except ClusterError as error:
        return Blank(now(), str(error)), trouble
    return Sighting(observed_at, report), trouble


def look(window: Window, observation: Observation, eyes: Eyes) -> tuple[Window, tuple[Event, ...]]:
    """Take a poll into account; a record that cannot be read makes the poll a failed one."""
    try:
        return advance(window, observation, eyes.plan.policy)
    except RasError as error:
        return advance(window, Blank(observation.observed_at, str(error)), eyes.plan.policy)
