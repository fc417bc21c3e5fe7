"""Kill the shift, its worker, both, everything, and the server: polling goes on.

A real training run that does not hang is watched with one poll a second. The history on disk tells when a
poll happened, whoever made it; the bound is the one of the design, 60 s, and it is printed what was measured.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from deployments.demo.stage import RUN_NAME, Stage
from deployments.demo.story import Story
from tasks.adapters.process import is_gone
from tasks.blocks import HangWindow

pytestmark = pytest.mark.e2e
BOUND_S = 60.0
_ADD = ("--poll-interval-s", "1", "--confirm-duration-s", "3000", "--shift-s", "3000")


class Polls(threading.Thread):
    """Sees each retained report of the run, and remembers when it was made."""

    def __init__(self, spool: Path) -> None:
        super().__init__(daemon=True)
        self.spool = spool
        self.seen: dict[str, float] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.1):
            for path in self.spool.glob("*/nccl_ras/*/*.json.gz"):
                with contextlib.suppress(OSError):
                    self.seen.setdefault(path.name, path.stat().st_mtime)

    def last(self) -> float:
        return max(self.seen.values(), default=0.0)

    def gap_after(self, moment: float) -> float:
        """The longest pause between two polls, from the last one before a moment on."""
        times = sorted(self.seen.values())
        before = [t for t in times if t <= moment]
        after = [t for t in times if t > moment]
        chain = [*before[-1:], *after]
        return max(b - a for a, b in itertools.pairwise(chain))


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with Stage(tmp_path_factory.mktemp("takeover")) as stage:
        stage.start_ray()
        stage.start_prefect()
        stage.start_ras()
        stage.wait_for("Ray", stage.is_up(f"{stage.dashboard}/api/version"), within_s=240, child="ray")
        stage.submit_job(steps=200, step_s=60.0)
        stage.wait_for("Prefect", stage.is_up(f"{stage.ui}/api/health"), within_s=240, child="prefect")
        stage.start_rankwatch()
        add = ["add", RUN_NAME, "--ray-address", stage.gcs, "--ray-dashboard-url", stage.dashboard]
        add += ["--storage-path", str(stage.storage), *_ADD]
        stage.wait_for("rankwatch add", lambda: stage.rankwatch(*add).returncode == 0, within_s=240)
        yield stage


@pytest.fixture(scope="module")
def polls(stage):
    polls = Polls(stage.folder / "spool")
    polls.start()
    wait_until(lambda: len(polls.seen) > 5, 240, stage)
    yield polls
    polls.stop.set()


def wait_until(ready, within_s, stage):
    end = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < end, "\n".join(
            f"--- {p.name}\n{p.read_text()[-2500:]}" for p in stage.folder.glob("logs/*.log")
        )
        time.sleep(0.2)


def window(stage) -> HangWindow:
    with contextlib.suppress(Exception):
        documents = Story(stage.ui).blocks(HangWindow)
        if documents:
            return documents[0]
    return HangWindow()


def owner(stage) -> tuple[str, int]:
    told = window(stage)
    return told.owner, int(told.owner.split(":")[1])


def the_worker(stage) -> psutil.Process:
    up = psutil.Process(stage.pid("rankwatch"))
    return next(c for c in up.children() if "worker" in c.cmdline())


def tree(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def kill(pids) -> float:
    moment = datetime.now(UTC).timestamp()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return moment


def goes_on(stage, polls, moment, before):
    """Wait for a new owner that polls; returns for how long nobody did."""
    wait_until(lambda: window(stage).owner != before and polls.last() > moment + 1, 240, stage)
    count = len(polls.seen)
    wait_until(lambda: len(polls.seen) > count + 3, 60, stage)
    return polls.gap_after(moment)


def report(name: str, gap_s: float) -> None:
    sys.stderr.write(f"takeover: {name}: nobody polled for {gap_s:.1f} s\n")
    assert gap_s < BOUND_S


def test_the_shift_is_killed(stage, polls):
    before, pid = owner(stage)
    moment = kill([pid])
    report("shift killed", goes_on(stage, polls, moment, before))


def test_the_worker_is_killed_and_the_shift_goes_on(stage, polls):
    before, pid = owner(stage)
    worker = the_worker(stage)
    moment = kill([worker.pid])
    wait_until(lambda: not is_gone(before) and polls.last() > moment + 5, 60, stage)
    assert is_gone(before) is False
    assert owner(stage) == (before, pid)
    report("worker killed", polls.gap_after(moment))


def test_worker_and_shift_are_killed_together(stage, polls):
    wait_until(lambda: the_worker(stage).is_running(), 60, stage)
    before, pid = owner(stage)
    moment = kill([the_worker(stage).pid, pid])
    report("worker and shift killed", goes_on(stage, polls, moment, before))


def test_everything_of_rankwatch_is_killed_and_started_again(stage, polls):
    before, pid = owner(stage)
    moment = kill([*tree(stage.pid("rankwatch")), pid])
    time.sleep(1)  # what restarts the runner of a real installation needs a moment, too
    stage.start_rankwatch()
    report("rankwatch up, worker and shift killed", goes_on(stage, polls, moment, before))


def test_the_server_is_killed_and_comes_back(stage, polls):
    before, _ = owner(stage)
    moment = kill(tree(stage.pid("prefect")))
    wait_until(lambda: polls.last() > moment + 20, 120, stage)
    stage.start_prefect()
    stage.wait_for("Prefect", stage.is_up(f"{stage.ui}/api/health"), within_s=240, child="prefect")
    back = datetime.now(UTC)
    wait_until(lambda: (window(stage).heartbeat_at or before) != before and beat(stage) > back, 120, stage)
    assert window(stage).owner == before
    report("server killed for 20 s and more", polls.gap_after(moment))


def beat(stage) -> datetime:
    return window(stage).heartbeat_at or datetime.fromtimestamp(0, UTC)
