"""Fail the attempt that hangs, and nothing else.

Each rung is bounded and recorded: (1) the in-job part fails the attempt with an error that names the
suspects; suspects that could not take part in Ray's teardown are killed after its acknowledgement. (2)
Without an acknowledgement the suspects' processes are killed, then all ranks of the attempt. A process is
killed only while its start time and command line are those of the verdict.
"""

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.hang.errors import NodeError, RankwatchError
from tasks.hang.merge import merge_reports
from tasks.hang.report import parse_report
from tasks.hang.run import Attempt, Rank, by_node
from tasks.hang.states import Sighting
from tasks.hang.verdict import Verdict
from tasks.hang.window import Window, advance
from tasks.ownership import now
from tasks.wiring import Eyes

WORKER_COMMAND = "ray::RayTrainWorker"
_CALL_S = 20.0
_CHECK_EVERY_S = 0.5
_NOTICE_S = 15.0
_STOPPED_STATES = ("T", "t", "D")


class Act(Struct, frozen=True):
    """One thing that was done, and what came of it."""

    rung: str
    at: datetime
    outcome: str
    reason: str = ""


@task(name="fail the attempt", cache_policy=NO_CACHE, retries=0)
def fail_attempt(
    eyes: Eyes, attempt: Attempt, verdict: Verdict, message: str, start_ticks: Mapping[int, int]
) -> list[Act]:
    """Climb the ladder until the attempt is over.

    Args:
        eyes: The run.
        attempt: The attempt of the verdict, as it is now.
        verdict: Names suspects, attempt and incident.
        message: The error that the owner of the training job sees.
        start_ticks: Start of each process, by pid, as seen when the evidence was captured.

    Returns:
        What was done. Never retried: a second act is the one thing that must not happen.
    """
    suspects = [rank for rank in attempt.ranks if rank.world_rank in {s.world_rank for s in verdict.suspects}]
    acts: list[Act] = []
    if attempt.has_callback:
        acts.append(_post(eyes, attempt, verdict, message))
        if acts[-1].outcome == "failed_attempt":
            stopped = _stopped(eyes, suspects)
            return acts + (_kill(eyes, stopped, start_ticks, "kill stopped suspects") if stopped else [])
        if acts[-1].outcome == "refused":
            return acts
    acts += _kill(eyes, suspects, start_ticks, "kill suspects")
    if _over(eyes, attempt, within_s=_NOTICE_S):
        return acts
    return acts + _kill(eyes, attempt.ranks, start_ticks, "kill all ranks")


def _post(eyes: Eyes, attempt: Attempt, verdict: Verdict, message: str) -> Act:
    log = get_run_logger()
    within_s = eyes.plan.settings.acknowledge_within_s
    try:
        eyes.channel.post(
            attempt.run_id,
            {
                "incident": verdict.incident_id,
                "attempt_id": attempt.attempt_id,
                "message": message,
                "pids": sorted(attempt.pids),
                "ranks": {str(s.world_rank): s.where for s in verdict.suspects if s.world_rank is not None},
                "posted_at": now().isoformat(),
            },
        )
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            ack = eyes.channel.acknowledged(attempt.run_id, verdict.incident_id)
            if ack is not None:
                log.info("The in-job part answered: %s %s", ack.outcome, ack.reason)
                return Act("callback", now(), ack.outcome, ack.reason)
            time.sleep(_CHECK_EVERY_S)
    except RankwatchError as error:
        return Act("callback", now(), "failed", str(error))
    return Act("callback", now(), "no answer", f"no acknowledgement within {within_s:g} s")


def _stopped(eyes: Eyes, suspects: Iterable[Rank]) -> list[Rank]:
    """Suspects that cannot run an actor task: Ray's teardown would wait 35 s for each."""
    stopped: list[Rank] = []
    for node, ranks in by_node(suspects).items():
        request = {"op": "identify", "pids": [rank.pid for rank in ranks]}
        try:
            seen = eyes.nodes.call(node, request, deadline_s=_CALL_S).get("processes", {})
        except NodeError:
            continue
        stopped += [r for r in ranks if seen.get(str(r.pid), {}).get("state") in _STOPPED_STATES]
    return stopped


def _kill(eyes: Eyes, ranks: Iterable[Rank], start_ticks: Mapping[int, int], rung: str) -> list[Act]:
    acts: list[Act] = []
    for node, members in by_node(ranks).items():
        known = [r for r in members if (r.start_ticks or start_ticks.get(r.pid)) is not None]
        acts += [
            Act(rung, now(), "refused", f"rank {r.world_rank}: the start time of pid {r.pid} is not known")
            for r in members
            if r not in known
        ]
        request: dict[str, Any] = {
            "op": "kill",
            "targets": [
                {
                    "pid": r.pid,
                    "start_ticks": r.start_ticks or start_ticks[r.pid],
                    "cmdline_prefix": WORKER_COMMAND,
                }
                for r in known
            ],
        }
        try:
            outcomes = eyes.nodes.call(node, request, deadline_s=_CALL_S).get("outcomes", {})
        except NodeError as error:
            acts.append(Act(rung, now(), "failed", str(error)))
            continue
        for r in known:
            said = outcomes.get(str(r.pid), {})
            reason = f"rank {r.world_rank} pid {r.pid} {said.get('reason', '')}".strip()
            acts.append(Act(rung, now(), str(said.get("outcome", "failed")), reason))
    return acts


def still_frozen(eyes: Eyes, attempt: Attempt, window: Window) -> bool:
    """Whether a report newer than the evidence still shows one of the hangs.

    Raises:
        RasError: no report can be had, so it cannot be told.
        ClusterError: the cluster cannot be asked.
    """
    raws = eyes.ras.status(attempt)
    report = merge_reports([parse_report(raw) for raw in raws])
    after, _ = advance(window, Sighting(now(), report), eyes.plan.policy)
    return bool(window.confirmed.keys() & after.confirmed.keys())


def _over(eyes: Eyes, attempt: Attempt, *, within_s: float) -> bool:
    """Whether the run leaves the attempt in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            found = eyes.find()
        except RankwatchError:
            return True
        if found.attempt_id != attempt.attempt_id or found.status != "running":
            return True
        time.sleep(_CHECK_EVERY_S)
    return False
