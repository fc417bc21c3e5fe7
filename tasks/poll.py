"""Look once at a run: a report, or the reason why there is none."""

from datetime import datetime, timedelta

from tasks.hang.errors import ClusterError, RankwatchError, RasError, StoreError
from tasks.hang.merge import merge_reports
from tasks.hang.policy import HangPolicy
from tasks.hang.report import RasReport, parse_report
from tasks.hang.run import Attempt
from tasks.hang.states import Blank, Event, Observation, Sighting
from tasks.hang.window import Window, advance
from tasks.ownership import steady_now
from tasks.wiring import Eyes


def poll(eyes: Eyes, attempt: Attempt) -> tuple[Observation, RankwatchError | None]:
    """Ask RAS once, retain the answers, and read them as one report.

    A plain function and no Prefect task: a run of its own costs a hundred times what the poll costs.

    Returns:
        What was seen, and what is to be told of although there is a report: answers that could not be
        retained (a full disk is no reason to stop watching) or, of several, that could not be read.
    """
    try:
        raws = eyes.ras.status(attempt)
    except RasError as error:
        return Blank(steady_now(), str(error), permanent=error.permanent), None
    except ClusterError as error:
        return Blank(steady_now(), str(error)), None
    observed_at = steady_now()
    unkept = _retain(eyes, attempt, observed_at, raws)
    reports: list[RasReport] = []
    unread: list[RankwatchError] = []
    for raw in raws:
        try:
            reports.append(parse_report(raw))
        except RasError as error:
            unread.append(error)
    if not reports:
        return Blank(steady_now(), str(_together(unread))), _together(unkept)
    merged = merge_reports(reports)
    return Sighting(observed_at, merged, eyes.ras.visible(attempt)), _together(unkept + unread)


def _retain(
    eyes: Eyes, attempt: Attempt, observed_at: datetime, raws: tuple[bytes, ...]
) -> list[RankwatchError]:
    """Put the answers into the ring, a microsecond apart, since it knows them by their time."""
    for position, raw in enumerate(raws):
        try:
            eyes.ring.append(attempt.attempt_id, observed_at + timedelta(microseconds=position), raw)
        except StoreError as error:
            return [error]
    return []


def _together(errors: list[RankwatchError]) -> RankwatchError | None:
    """Several errors as one, each text once."""
    if len(errors) < 2:  # noqa: PLR2004  nothing to join
        return errors[0] if errors else None
    return RankwatchError(" ".join(dict.fromkeys(map(str, errors))))


def look(window: Window, observation: Observation, policy: HangPolicy) -> tuple[Window, tuple[Event, ...]]:
    """Take an observation into account; a record that cannot be read makes the poll a failed one."""
    try:
        return advance(window, observation, policy)
    except RasError as error:
        return advance(window, Blank(observation.observed_at, str(error)), policy)
