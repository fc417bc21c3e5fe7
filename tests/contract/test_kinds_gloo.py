"""Kinds of hang with real gloo processes: what RAS shows, what witnesses see of them, what comes of it."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.adapters.local_node import LocalNode
from tasks.adapters.ras import NodeRas
from tasks.hang.merge import merge_reports
from tasks.hang.policy import HangPolicy
from tasks.hang.report import parse_report
from tasks.hang.states import Event, Observation, Sighting, Suspected
from tasks.hang.window import Window, advance
from tasks.witness import ask
from tests.fakes import FakeDirectory, eyes
from tests.gloo_job import LIMIT_S, Job, gloo_job, standin_of

POLICY = HangPolicy(
    poll_interval_s=0.25, suspect_after_s=1.0, confirm_duration_s=4.0, repeat_every_s=1.5, witness_gap_s=1.0
)
RANKS = 4


class Watch:
    """A shift in small: polls, asks witnesses, and keeps what was told of the job's one communicator."""

    def __init__(self, job: Job, addr: str, folder: Path) -> None:
        self.attempt = job.attempt
        ras = NodeRas(LocalNode(), addr=addr, collect_timeout_s=1)
        self.eyes = eyes(folder, ras, FakeDirectory(self.attempt), nodes=LocalNode())
        self.window = Window(attempt_id=self.attempt.attempt_id)
        self.told: list[Event] = []

    def until(self, condition: Callable[[], object]) -> None:
        """Poll until something is so."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, (self.told, self.window)
            self._poll()
            time.sleep(POLICY.poll_interval_s)

    def until_told(self, event: str) -> Event:
        """Poll until an event is told; returns it."""
        self.until(lambda: any(told.event == event for told in self.told))
        return next(told for told in self.told if told.event == event)

    def stalled_s(self) -> float:
        """For how long the communicator stands still."""
        now = datetime.now(UTC)
        return max(((now - f.stalled_since).total_seconds() for f in self.window.stalled.values()), default=0)

    @property
    def names(self) -> list[str]:
        """What was told, without the reminders."""
        return [told.event for told in self.told if told.event != "still_suspected"]

    def _poll(self) -> None:
        reports = [parse_report(raw) for raw in self.eyes.ras.status(self.attempt)]
        self._take(Sighting(datetime.now(UTC), merge_reports(reports)))
        for question in self.window.questions:
            freeze = self.window.freeze(question.communicator)
            assert freeze is not None
            members = {rank: process[:2] for rank, process in freeze.processes.items()}
            self._take(ask(self.eyes, self.attempt, question, members, POLICY.gap_s(freeze.kind)))

    def _take(self, observation: Observation) -> None:
        self.window, told = advance(self.window, observation, POLICY)
        self.told += told


@contextmanager
def watched_job(folder: Path, size: int) -> Iterator[tuple[Job, Watch]]:
    with gloo_job(size) as job, standin_of(job) as addr:
        job.do("all_reduce")
        watch = Watch(job, addr, folder)
        watch.until(lambda: watch.window.communicators)
        job.do("all_reduce")
        yield job, watch


@pytest.fixture(scope="module")
def lasting(tmp_path_factory) -> Iterator[tuple[Job, Watch]]:
    """A job that the tests leave as they found it."""
    with watched_job(tmp_path_factory.mktemp("lasting"), RANKS) as found:
        yield found


@pytest.fixture
def watched(lasting) -> Iterator[tuple[Job, Watch]]:
    """The same, moving, with nothing told yet."""
    job, watch = lasting
    job.do("all_reduce")
    watch.until(lambda: not watch.window.stalled)
    watch.told.clear()
    yield job, watch
    for rank in range(RANKS):
        job.signal(rank, signal.SIGCONT)


def test_a_stopped_rank_is_confirmed_as_unresponsive_and_recovers(watched):
    job, watch = watched
    job.signal(1, signal.SIGSTOP)
    job.tell("all_reduce")
    hang = watch.until_told("confirmed")
    assert watch.names == ["suspected", "confirmed"]
    assert (hang.kind, hang.lagging, hang.leading, hang.missing) == ("unresponsive", (1,), (0, 2, 3), (1,))
    assert "rank 1 does not answer RAS" in hang.reason
    assert "the process of rank 1 is there, stopped (state T)" in hang.reason
    assert hang.stalled_s >= POLICY.confirm_duration_s

    job.signal(1, signal.SIGCONT)
    assert [job.hear(rank) for rank in range(RANKS)] == ["done"] * RANKS
    watch.until_told("recovered")


def test_a_rank_that_does_not_enter_is_confirmed_as_a_mismatch(watched):
    job, watch = watched
    job.tell("all_reduce", ranks=[0, 2, 3])
    hang = watch.until_told("confirmed")
    assert watch.names == ["suspected", "confirmed"]
    assert (hang.kind, hang.lagging, hang.leading, hang.missing) == ("mismatch", (1,), (0, 2, 3), ())
    assert "rank 1 stands in" in hang.reason

    job.tell("all_reduce", ranks=[1])
    assert [job.hear(rank) for rank in range(RANKS)] == ["done"] * RANKS
    watch.until_told("recovered")


def test_ranks_that_launched_the_same_and_wait_in_no_collective_are_never_more_than_suspected(watched):
    _, watch = watched
    watch.until(lambda: watch.stalled_s() > 3 * POLICY.confirm_duration_s)
    assert watch.names == ["suspected"]
    assert {told.kind for told in watch.told} == {"symmetric"}
    assert "not every rank waits" in watch.told[-1].reason


def test_a_collective_in_which_all_wait_is_confirmed_as_symmetric_by_a_witness(tmp_path):
    with watched_job(tmp_path, 2) as (job, watch):
        job.tell("broadcast from the neighbour")
        hang = watch.until_told("confirmed")
        assert watch.names == ["suspected", "confirmed"]
        assert (hang.kind, hang.lagging, hang.missing) == ("symmetric", (), ())
        assert "launch counts cannot tell" in watch.told[0].reason
        assert "2 ranks wait in broadcast in both samples" in hang.reason


def test_a_killed_rank_is_told_of_and_left_to_the_health_check_of_the_job(tmp_path):
    with watched_job(tmp_path, 2) as (job, watch):
        job.signal(1, signal.SIGKILL)
        job.processes[1].join()
        watch.until(lambda: watch.stalled_s() > 2 * POLICY.confirm_duration_s)
        assert watch.names == ["suspected"]
        assert (watch.told[0].kind, watch.told[0].missing) == ("unresponsive", (1,))
        assert "the process of rank 1 is gone" in watch.told[-1].reason
        assert all(isinstance(state, Suspected) for state in watch.window.communicators.values())
