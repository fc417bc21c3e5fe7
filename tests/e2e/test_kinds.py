"""Two hangs that Ray's own detector does not see, in one real run: a symmetric stall, then a stopped rank.

The first attempt comes to a collective in which all ranks wait and none sends; it is failed, and the second
goes on from a checkpoint. There a rank is stopped (SIGSTOP) while it trains; the third goes on as well.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from deployments.demo.stage import RUN_NAME, WORKERS, Stage, marked
from deployments.demo.story import Story, Told
from tasks.adapters.process import start_ticks
from tasks.blocks import Incident

pytestmark = pytest.mark.e2e
LIMIT_S = 420.0
STOPPED_RANK = 1
CHECKPOINT_EVERY = 5
_LINE = re.compile(r"training from step (\d+) on|step (\d+) of \d+")
_ADD = (
    *("--action", "fail", "--symmetric-action", "fail", "--poll-interval-s", "1"),
    *("--suspect-after-s", "5", "--confirm-duration-s", "15", "--repeat-every-s", "5"),
)


class Scene:
    """The run, and what is told of it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.story = Story(stage.ui)
        self.submission = ""

    def wait_for(self, what: str, ready: Callable[[], object]) -> None:
        """Wait until something is so, and note what rankwatch tells meanwhile."""
        end = time.monotonic() + LIMIT_S
        while True:
            self.stage.check()
            try:
                self.story.news()
                if ready():
                    return
            except httpx.HTTPError:  # busy; what is gone fails the check
                pass
            assert time.monotonic() < end, f"{what} did not happen\n{self.told()}\n{self.logs()}"
            time.sleep(0.5)

    def closed(self, count: int) -> bool:
        """Whether so many incidents were opened, and all are over."""
        incidents = self.story.incidents()
        return len(incidents) >= count and all(incident.phase == "closed" for incident in incidents)

    def events(self, incident: Incident, until: str) -> list[Told]:
        """What was told of an attempt, reminders and heartbeats left out."""
        of_attempt = [
            told
            for told in self.story.told
            if told.event in ("suspected", "confirmed", "recovered", "blind", "idle")
            and told.at >= incident.times["opened"]
            and told.at <= incident.times[until]
        ]
        return sorted(of_attempt, key=lambda told: told.at)

    def steps(self) -> list[list[int]]:
        """The steps of each attempt that has made one, as the job printed them. Ray repeats lines."""
        found: list[list[int]] = []
        began = ""
        for first, step in _LINE.findall(self.stage.job_log(self.submission)):
            if first and first != began:
                found.append([])
                began = first
            elif step and int(step) not in found[-1]:
                found[-1].append(int(step))
        return [steps for steps in found if steps]

    def told(self) -> str:
        return "\n".join(f"{told.at:%H:%M:%S} {told.event} {told.payload}" for told in self.story.told)

    def logs(self) -> str:
        folder = self.stage.folder / "logs"
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in folder.glob("*.log"))

    def report(self, incident: Incident, words: str) -> None:
        """Print what was measured, from the last launch on."""
        opened = incident.times["opened"]
        seconds = {name: round((at - opened).total_seconds(), 1) for name, at in incident.times.items()}
        sys.stderr.write(f"kinds: {words}: {seconds}\n")


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    with Stage(tmp_path_factory.mktemp("kinds")) as stage:
        scene = Scene(stage)
        stage.start_ray()
        stage.start_prefect()
        stage.start_ras()
        stage.wait_for("Ray", stage.is_up(f"{stage.dashboard}/api/version"), within_s=240, child="ray")
        scene.submission = stage.submit_job(steps=200, step_s=1.0, fault="symmetric")
        stage.wait_for("Prefect", stage.is_up(f"{stage.ui}/api/health"), within_s=240, child="prefect")
        stage.start_rankwatch()
        add = ["add", RUN_NAME, "--ray-address", stage.gcs, "--ray-dashboard-url", stage.dashboard]
        add += ["--storage-path", str(stage.storage), *_ADD]
        stage.wait_for("rankwatch add", lambda: stage.rankwatch(*add).returncode == 0, within_s=240)
        yield scene
    assert list(marked(stage.mark)) == []


def test_a_collective_in_which_all_wait_is_confirmed_by_a_witness_and_the_run_goes_on(scene):
    scene.wait_for("the end of the symmetric stall", lambda: scene.closed(1))
    incident = scene.story.incidents()[0]
    scene.report(incident, "symmetric")
    suspected, hang = scene.events(incident, "diagnosed")
    assert (suspected.event, hang.event) == ("suspected", "confirmed")
    assert suspected.payload["kind"] == hang.payload["kind"] == "symmetric"
    assert hang.payload["lagging"] == hang.payload["missing"] == []
    assert "launch counts cannot tell" in suspected.payload["reason"]
    assert f"{WORKERS} ranks wait in broadcast in both samples" in hang.payload["reason"]

    assert [act["outcome"] for act in incident.acts] == ["failed_attempt"]
    failed = scene.stage.attempts()[0]
    assert failed["status"] == "ERRORED"
    assert "NCCL hang (symmetric)" in failed["status_detail"]
    scene.wait_for("a step of the second attempt", lambda: len(scene.steps()) > 1)
    assert CHECKPOINT_EVERY < scene.steps()[1][0] <= scene.steps()[0][-1] + 1


def test_a_stopped_rank_is_confirmed_as_unresponsive_and_killed_and_the_run_goes_on(scene):
    def trains() -> bool:
        return scene.closed(1) and len(scene.steps()) == 2 and len(scene.steps()[1]) > CHECKPOINT_EVERY

    scene.wait_for("training of the second attempt", trains)
    reached = scene.steps()[1][-1]
    (stopped,) = [w for w in scene.stage.attempts()[1]["workers"] if w["world_rank"] == STOPPED_RANK]
    started = start_ticks(stopped["pid"])
    assert started is not None
    os.kill(stopped["pid"], signal.SIGSTOP)

    scene.wait_for("the end of the hang of the stopped rank", lambda: scene.closed(2))
    incident = scene.story.incidents()[1]
    scene.report(incident, "unresponsive")
    suspected, hang = scene.events(incident, "diagnosed")
    assert (suspected.event, hang.event) == ("suspected", "confirmed")
    assert hang.payload["kind"] == "unresponsive"
    assert hang.payload["lagging"] == hang.payload["missing"] == [STOPPED_RANK]
    assert f"rank {STOPPED_RANK} does not answer RAS" in hang.payload["reason"]
    assert "stopped (state T)" in hang.payload["reason"]
    assert [s["world_rank"] for s in incident.verdict["suspects"]] == [STOPPED_RANK]

    assert [act["outcome"] for act in incident.acts] == ["failed_attempt", "killed"]
    assert start_ticks(stopped["pid"]) != started
    failed = scene.stage.attempts()[1]
    assert failed["status"] == "ERRORED"
    assert "NCCL hang (unresponsive)" in failed["status_detail"]
    scene.wait_for("a step of the third attempt", lambda: len(scene.steps()) > 2)
    assert reached - CHECKPOINT_EVERY < scene.steps()[2][0] <= reached + 2
