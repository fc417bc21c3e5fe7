"""What the history of a window costs: size beside the raw reports, CPU time and memory of an append.

Two windows of 50 polls: 50 in which all counters of all communicators moved, and 10 of those followed by 40
in which nothing did (a hang). In a poll that moves a fifth of the ranks, drawn anew, is one launch ahead:
harder to compress than ranks in step. CPU is the median of the appends, beside one json.loads of the report.
Memory is what an append took from the machine above the report itself, in a process that did nothing else.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tasks.adapters.ras_ring import RasRing
from tests.bench.ras_documents import Shape, document, full, groups, parallel

SHAPES = {
    "512x20": lambda: groups(512, 20, 512),
    "4096x50": lambda: groups(4096, 50, 512),
    "4096x50full": lambda: full(4096, 50),
    "16384": lambda: parallel(16384, 8, 64),
}
KEEP_POLLS = 50
BEFORE_POLLS = 10
MOVING_POLLS = {"all moving": KEEP_POLLS, "10 moving, 40 frozen": 10}
POLL_S = 15
T0 = datetime(2026, 12, 1, 3, 0, tzinfo=UTC)
ROOT = Path(__file__).parents[2]
COLUMNS = ("job", "report MB", "window", "raw / kept", "moving ms", "frozen ms", "json.loads ms", "memory MB")


def moved(shape: Shape, step: int) -> bytes:
    """A report in which all counters moved since the step before, and a fifth of the ranks is ahead."""
    ahead = random.Random(step)

    def launched(found: re.Match[bytes]) -> bytes:
        return b'"AllReduce": %d' % (int(found[1]) + (ahead.random() < 0.2))

    return re.sub(rb'"AllReduce": (\d+)', launched, document(shape, step))


def frozen(raw: bytes, step: int) -> bytes:
    """The same report, asked for later."""
    return re.sub(
        rb'("timestamp": ")[^"]*', rb"\g<1>2026-12-01 05:%02d:%02d" % divmod(step, 60), raw, count=1
    )


def window(shape: Shape, moving_polls: int, folder: Path) -> dict[str, float | None]:
    """Append the polls of a window, after some that are evicted by its end; size ratio and CPU ms."""
    ring = RasRing(folder, KEEP_POLLS)
    cpu_ms: dict[bool, list[float]] = {True: [], False: []}
    raw_bytes, raw = 0, b""
    for step in range(BEFORE_POLLS + KEEP_POLLS):
        moves = step < BEFORE_POLLS + moving_polls
        raw = moved(shape, step) if moves else frozen(raw, step)
        began = time.process_time()
        ring.append("bench", T0 + timedelta(seconds=POLL_S * step), raw)
        cpu_ms[moves].append(1000 * (time.process_time() - began))
        raw_bytes += len(raw) if step >= BEFORE_POLLS else 0
    began = time.process_time()
    json.loads(raw)
    loads_ms = 1000 * (time.process_time() - began)
    if (newest := ring.polls("bench")[-1].raw()) != raw:
        raise ValueError(f"The newest poll came back with {len(newest)} bytes of {len(raw)}.")
    return {
        "report_mb": len(raw) / 1e6,
        "raw_to_kept": raw_bytes / sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "moving_ms": statistics.median(cpu_ms[True]),
        "frozen_ms": statistics.median(cpu_ms[False]) if cpu_ms[False] else None,
        "json_loads_ms": loads_ms,
    }


def memory_mb(shape: Shape, folder: Path) -> float:
    """MB that an append took above the report, in a process of its own, as after a restart."""
    RasRing(folder / "ring", KEEP_POLLS).append("bench", T0, moved(shape, 1))
    (folder / "report.json").write_bytes(moved(shape, 2))
    command = [sys.executable, "-m", "tests.bench.ring_cost", "--append", str(folder)]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def append_once(folder: Path) -> None:
    """Append the report of a folder to its ring and print what this process took for it, in MB."""
    raw = (folder / "report.json").read_bytes()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before_kb = status_kb("VmRSS")
    RasRing(folder / "ring", KEEP_POLLS).append("bench", T0, raw)
    sys.stdout.write(f"{(status_kb('VmHWM') - before_kb) * 1024 / 1e6:.1f}\n")


def status_kb(field: str) -> int:
    """A line of this process's status, in kB."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(field)
    )
    return int(line.split()[1])


def main() -> None:
    """Measure and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=["512x20", "4096x50"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--append", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.append:
        append_once(given.append)
        return
    table = Table(title=f"History of a window of {KEEP_POLLS} polls", box=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in {"job", "window"} else "right")
    results: dict[str, dict[str, dict[str, float | None]]] = {}
    for job in given.jobs:
        shape = SHAPES[job]()
        with tempfile.TemporaryDirectory() as folder:
            memory = memory_mb(shape, Path(folder))
        for name, moving_polls in MOVING_POLLS.items():
            with tempfile.TemporaryDirectory() as folder:
                cost = window(shape, moving_polls, Path(folder)) | {"memory_mb": memory}
            results.setdefault(job, {})[name] = cost
            size, *rest = ("" if value is None else f"{value:.1f}" for value in cost.values())
            table.add_row(job, size, name, *rest)
    Console(width=130).print(table)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
