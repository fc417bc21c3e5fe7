"""`make demo`: a training run hangs; rankwatch finds it, names the rank, and has it restarted.

The hang is real: four ranks of a Ray Train job on gloo, of which one skips an all_reduce. What is not real is
NCCL: there is no GPU here, so a stand-in serves RAS over NCCL's wire protocol, with the launch counts that
each rank's Flight Recorder holds.
"""

import contextlib
import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import httpx
import msgspec
from cyclopts import App
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deployments.demo.stage import CULPRIT_RANK, RUN_NAME, DemoFailed, Stage
from deployments.demo.story import Story
from tasks.blocks import Incident
from tasks.hang.evidence import Captured, Manifest
from tasks.reporting.wording import duration

_STEP = re.compile(r"step (\d+) of (\d+)")
_WITHIN_S = 480.0
_SHORT = (
    "--poll-interval-s",
    "1",
    "--suspect-after-s",
    "5",
    "--confirm-duration-s",
    "15",
    "--repeat-every-s",
    "5",
)
_MOMENTS = (
    ("suspected", "suspected"),
    ("confirmed", "confirmed"),
    ("diagnosed", "captured and explained"),
    ("acted", "attempt failed"),
    ("restarted", "restarted"),
    ("progressed", "first new step"),
)

app = App(name="demo")


@app.default
def demo(*, keep: bool = False, folder: Path = Path(".demo"), steps: int = 30, step_s: float = 0.5) -> int:
    """Run the demo; 0 where everything happened that should.

    Args:
        keep: Leave UI, cluster and job running at the end, and say where.
        folder: Logs, evidence and checkpoints; what an earlier demo left there is removed.
        steps: Steps of the training run.
        step_s: Seconds that a step takes.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    console = Console()
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with Stage(folder) as stage:
            story = Story(stage.ui)
            submission = _set_up(stage, console, steps, step_s)
            _watch(stage, story, console, submission)
            good = _close(stage, story, console, submission)
            if keep:
                console.print(f"\nPrefect UI: {stage.ui}   Ray: {stage.dashboard}   Ctrl-C ends both.")
                signal.pause()
            return 0 if good else 1
    except DemoFailed as failure:
        console.print(f"[red]The demo failed:[/red] {failure}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running.")
        return 130


def _set_up(stage: Stage, console: Console, steps: int, step_s: float) -> str:
    """Start everything and have the run watched; returns the job's submission id."""
    console.print(
        "A 4-rank Ray Train job on gloo. There is no GPU here: a stand-in speaks the protocol of NCCL's RAS "
        "server and takes its counts from each rank's Flight Recorder.",
        style="dim",
    )
    with console.status("Starting Ray, Prefect and RAS"):
        stage.start_ray()
        stage.start_prefect()
        stage.start_ras()
        up = stage.is_up(f"{stage.dashboard}/api/version")
        stage.wait_for("The Ray cluster", up, within_s=180, child="ray")
        submission = stage.submit_job(steps=steps, step_s=step_s)
        up = stage.is_up(f"{stage.ui}/api/health")
        stage.wait_for("The Prefect server", up, within_s=240, child="prefect")
        stage.start_rankwatch()
    console.print(f"Ray [dim]{stage.dashboard}[/dim]  Prefect UI [dim]{stage.ui}[/dim]  job {submission}")
    with console.status("Waiting for the training run, then: rankwatch add"):
        _add(stage)
    console.print(f"rankwatch add {RUN_NAME} --action fail {' '.join(_SHORT)}", style="dim", highlight=False)
    return submission


def _add(stage: Stage) -> None:
    arguments = ["add", RUN_NAME, "--ray-address", stage.gcs, "--ray-dashboard-url", stage.dashboard]
    arguments += ["--storage-path", str(stage.storage), "--action", "fail", *_SHORT]
    answers: list[str] = []

    def added() -> bool:
        done = stage.rankwatch(*arguments)
        answers.append(done.stdout + done.stderr)
        return done.returncode == 0

    try:
        stage.wait_for(f"rankwatch add {RUN_NAME}", added, within_s=240, child="ray")
    except DemoFailed as failure:
        raise DemoFailed(f"{failure}\n{answers[-1] if answers else ''}") from failure


def _watch(stage: Stage, story: Story, console: Console, submission: str) -> None:
    """Show what happens until the job has ended and its incident is closed."""
    began = time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while time.monotonic() - began < _WITHIN_S:
            stage.check()
            with contextlib.suppress(httpx.HTTPError):  # busy; what is gone fails the check
                if _look(stage, story, live, submission):
                    return
            time.sleep(0.5)
    raise DemoFailed(f"The run did not end within {duration(_WITHIN_S)}; see {stage.folder / 'logs'}")


def _look(stage: Stage, story: Story, live: Live, submission: str) -> bool:
    """Show what is new; True when the job has ended and its incident is closed."""
    for told in story.news():
        if told.event != "watching":
            style = "bold red" if told.event == "confirmed" else "bold"
            live.console.print(Text(f"{told.at.astimezone():%H:%M:%S}  {told}", style=style))
    job = stage.job(submission)
    live.update(_panel(stage.job_log(submission), story, str(job["status"])))
    incidents = story.incidents()
    ended = job["status"] in ("SUCCEEDED", "FAILED", "STOPPED")
    return ended and (not incidents or incidents[-1].phase == "closed")


def _panel(log: str, story: Story, status: str) -> Panel:
    steps = _STEP.findall(log)
    state = next((one for one in reversed(story.told) if one.event == "watching"), None)
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "training", f"step {steps[-1][0]} of {steps[-1][1]}" if steps else "starting", status.lower()
    )
    table.add_row("watch", state.payload["summary"] if state else "starting", "")
    return Panel(table, title="rankwatch demo", width=90)


def _close(stage: Stage, story: Story, console: Console, submission: str) -> bool:
    """Print the summary, leave it in summary.json; True where everything happened that should."""
    incidents = story.incidents()
    status = str(stage.job(submission)["status"])
    checks = {
        "the job finished": status == "SUCCEEDED",
        "exactly one incident was opened": len(incidents) == 1,
    }
    seconds: dict[str, float] = {}
    if incidents:
        seconds = _seconds(incidents[0], story)
        checks |= _check(incidents[0], seconds)
        _show(incidents[0], seconds, console)
    attempts = stage.attempts()
    checks["Ray says that the first attempt failed, and why"] = (
        len(attempts) > 1
        and attempts[0]["status"] == "ERRORED"
        and "NCCL hang" in str(attempts[0]["status_detail"])
    )
    for name, good in checks.items():
        if not good:
            console.print(f"[red]missing:[/red] {name}", highlight=False)
    summary = {
        "mark": stage.mark,
        "job": status,
        "seconds": seconds,
        "checks": checks,
        "incident": incidents[0].model_dump(mode="json") if incidents else None,
        "attempts": [{"status": a["status"], "status_detail": a["status_detail"]} for a in attempts],
        "steps": _STEP.findall(stage.job_log(submission)),
    }
    (stage.folder / "summary.json").write_text(json.dumps(summary, indent=2))
    return all(checks.values())


def _seconds(incident: Incident, story: Story) -> dict[str, float]:
    """Seconds from the last launch to each moment."""
    times = dict(incident.times)
    if (suspected := story.first("suspected")) is not None:
        times["suspected"] = suspected
    return {key: (times[key] - times["opened"]).total_seconds() for key, _ in _MOMENTS if key in times}


def _show(incident: Incident, seconds: dict[str, float], console: Console) -> None:
    table = Table(title="From the hang to the first new step")
    table.add_column("what")
    table.add_column("seconds after the last launch", justify="right")
    for key, words in _MOMENTS:
        table.add_row(words, f"{seconds[key]:.1f}" if key in seconds else "never")
    console.print(table)
    console.print(Text(str(incident.verdict.get("headline", "no verdict")), style="bold"))
    console.print(Text(str(incident.verdict.get("reason", ""))))
    console.print(
        Text(f"Confidence {incident.verdict.get('confidence')}; {incident.decision.split(':')[0]}.")
    )
    evidence = Path(incident.evidence)
    console.print("Evidence:", str(evidence), soft_wrap=True, highlight=False)
    for path in sorted(evidence.rglob("*")):
        if path.is_file() and "ncclras_2" not in path.name:
            console.print(f"  {path.relative_to(evidence)}", style="dim", highlight=False)
    history = len(list(evidence.glob("nccl_ras/ncclras_2*.json")))
    console.print(f"  nccl_ras/ncclras_<timestamp>.json ({history} polls)", style="dim", highlight=False)


def _check(incident: Incident, seconds: dict[str, float]) -> dict[str, bool]:
    suspects = [suspect["world_rank"] for suspect in incident.verdict.get("suspects", [])]
    return {
        **{f"it was {words}": key in seconds for key, words in _MOMENTS},
        f"rank {CULPRIT_RANK} is the one suspect (named: {suspects})": suspects == [CULPRIT_RANK],
        "the in-job part failed the attempt": [a["outcome"] for a in incident.acts] == ["failed_attempt"],
        "every capture is complete": _complete(Path(incident.evidence)),
        "the incident is closed": incident.phase == "closed",
    }


def _complete(evidence: Path) -> bool:
    try:
        manifest = msgspec.json.decode((evidence / "manifest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return False
    return all(isinstance(entry.outcome, Captured) for entry in manifest.entries)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(app())
