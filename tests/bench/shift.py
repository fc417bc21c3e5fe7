"""A shift of N polls without waiting, for poll_cost.py: prints the CPU seconds that it took."""

import json
import sys
import tempfile
import time
import uuid
from pathlib import Path

import msgspec

import flows.watch
import tasks.shift
from tasks.adapters.local_node import LocalNode
from tasks.adapters.ras import NodeRas
from tasks.blocks import TrainingRun
from tasks.hang.run import Attempt
from tasks.ownership import read_window
from tests.bench.one_poll import JOB
from tests.fakes import FakeDirectory, eyes

POLL_S = 0.2


class Counted(NodeRas):
    """Counts its polls."""

    polls = 0

    def status(self, attempt: Attempt) -> tuple[bytes, ...]:
        self.polls += 1
        return super().status(attempt)


class Bounded(FakeDirectory):
    """A run that ends after so many polls."""

    def __init__(self, ras: Counted, polls: int) -> None:
        super().__init__(JOB)
        self.ras, self.polls = ras, polls

    def find(self, run_name: str) -> Attempt:
        over = self.ras.polls >= self.polls
        self.found = msgspec.structs.replace(JOB, status="finished" if over else "running")
        return super().find(run_name)


def main(addr: str, polls: int) -> None:
    """Watch the RAS server at `addr` for so many polls."""
    run = TrainingRun(
        run_name=f"bench-{uuid.uuid4().hex[:6]}",
        run_id="r1",
        ray_address="127.0.0.1:1",
        ray_dashboard_url="http://127.0.0.1:1",
        storage_path="unused",
    )
    run.save(run.slug)
    with tempfile.TemporaryDirectory() as folder:
        ras = Counted(LocalNode(), method="socket", addr=addr, collect_timeout_s=5, deadline_s=10)
        waits = {
            "poll_interval_s": POLL_S,
            "suspect_after_s": 60.0,
            "confirm_duration_s": 600.0,
            "shift_s": 3600.0,
        }
        seen = eyes(Path(folder), ras, Bounded(ras, polls), settings={**waits, "shift_s": 3600.0})
        setattr(tasks.shift, "eyes_of", lambda _: seen)  # noqa: B010  the shift must not look for Ray
        setattr(tasks.shift, "_BEAT_EVERY_S", 0.0)  # noqa: B010  a heartbeat for each poll, as with polls of 15 s
        began = time.process_time()
        flows.watch.watch_run(run.slug)
        if read_window(run.slug)[0].window["blind"]:
            raise SystemExit("The watch was blind: nothing was measured.")
        sys.stdout.write(json.dumps({"client_s": time.process_time() - began, "polls": ras.polls}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
