"""The demo's path once, for real: Ray Train on gloo, Prefect, py-spy, a hang, a restart."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deployments.demo.stage import CULPRIT_RANK, marked
from tasks.hang.evidence import Captured, Manifest
from tasks.hang.report import parse_report


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(exit code, what it printed, summary.json, its folder)."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "deployments.demo", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    summary = folder / "summary.json"
    told = json.loads(summary.read_text()) if summary.exists() else {}
    assert told, f"no summary; it printed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs(folder)}"
    return done.returncode, done.stdout, told, folder


def logs(folder: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("logs/*.log")))


def test_it_ends_well_and_says_so(demo):
    code, printed, told, folder = demo
    assert all(told["checks"].values()), (told["checks"], logs(folder))
    assert code == 0
    assert told["incident"]["verdict"]["headline"][:60] in printed.replace("\n", " ")


def test_it_happened_in_the_order_in_which_it_must(demo):
    _, _, told, _ = demo
    seconds = told["seconds"]
    order = ["suspected", "confirmed", "diagnosed", "acted", "restarted", "progressed"]
    assert sorted(order, key=lambda name: seconds[name]) == order
    assert seconds["suspected"] >= 5
    assert seconds["confirmed"] >= 15


def test_the_rank_that_skipped_is_named_with_the_frame_in_which_it_stands(demo):
    _, _, told, _ = demo
    verdict = told["incident"]["verdict"]
    (suspect,) = verdict["suspects"]
    assert suspect["world_rank"] == CULPRIT_RANK
    assert "train.py:" in suspect["where"]
    assert verdict["functions"] == ["AllReduce"]
    assert verdict["waiting"] == [rank for rank in range(4) if rank != CULPRIT_RANK]
    assert verdict["confidence"] == "high"


def test_the_evidence_is_complete_and_was_taken_from_the_hang(demo):
    _, _, told, _ = demo
    bundle = Path(told["incident"]["evidence"])
    manifest = msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)
    assert all(isinstance(entry.outcome, Captured) for entry in manifest.entries)
    for entry in manifest.entries:
        assert (bundle / entry.outcome.file).stat().st_size == entry.outcome.size_bytes
    stacks = {rank: (bundle / f"stack_traces/rank_{rank}.log").read_text() for rank in range(4)}
    assert all("rung native" in text.splitlines()[0] for text in stacks.values())
    assert all(
        ("all_reduce (torch/distributed" in text) == (rank != CULPRIT_RANK) for rank, text in stacks.items()
    )
    newest = max(bundle.glob("nccl_ras/ncclras_2*.json"))
    (record,) = parse_report(newest.read_bytes()).records.values()
    assert len({rank.counts for rank in record.decode().ranks}) == 2
    assert "MISMATCH" in (bundle / "nccl_ras/ncclras_report.txt").read_text()


def test_ray_says_why_the_attempt_failed_and_the_run_went_on_from_a_checkpoint(demo):
    _, _, told, _ = demo
    first, second = told["attempts"]
    assert first["status"] == "ERRORED"
    assert "NCCL hang (mismatch) confirmed by rankwatch: rank 2" in first["status_detail"]
    assert second["status"] == "FINISHED"
    steps = [int(step) for step, _ in told["steps"]]
    resumed = next(i for i in range(1, len(steps)) if steps[i] < steps[i - 1])
    assert steps[resumed] > 1
    assert steps[-1] == int(told["steps"][-1][1])


def test_no_process_is_left_behind(demo):
    _, _, told, _ = demo
    assert list(marked(told["mark"])) == []
