"""What a poll costs, from the bytes of a report to events, beside Ray's own detector (`make bench`).

Both read the same bytes in the same process, one after the other. CPU time, the least of a few runs: of Ray
`parse_ras_schema`, `mismatched_comms` twice and `compute_report_op_diff`, which is what it does at each tick;
of rankwatch `parse_report` and `advance`. Four polls are measured:

- healthy: all counters of all communicators moved since the last poll;
- frozen: nothing moved, and it had stood still before;
- worst: the first poll at which everything stands still, and every communicator is skewed: all is decoded;
- first: the same report as the first one of a shift, to which every communicator and process is new.

Memory is the peak above the bytes of the report, each in a process of its own that did nothing else: of what
Python allocated (tracemalloc), and of what the process took from the machine (VmHWM, as ru_maxrss also counts
what the process was before it was this program).
"""

import argparse
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.adapters.ras_ring import RasRing
from tasks.hang.decoding import known
from tasks.hang.policy import HangPolicy
from tasks.hang.report import parse_report
from tasks.hang.states import Sighting
from tasks.hang.window import Window, advance
from tests.bench.ras_documents import Shape, document, full, groups, parallel

SHAPES: dict[str, Callable[[], Shape]] = {
    "512x20": functools.partial(groups, 512, 20, 64),
    "4096x50": functools.partial(groups, 4096, 50, 512),
    "4096x50full": functools.partial(full, 4096, 50),
    "16384": functools.partial(parallel, 16384, 8, 64),
}
# The polls of a case as (step of training, skewed); the last is measured, the others came before.
CASES = {
    "healthy": ((1, False), (2, False), (3, False)),
    "frozen": ((1, True), (2, True), (2, True), (2, True), (2, True)),
    "worst": ((1, True), (2, True), (2, True)),
    "first": ((2, True),),
}
BEFORE_EACH: dict[str, Callable[[], None]] = {**dict.fromkeys(CASES, lambda: None), "first": known.forget}
RUNS, RUNS_IF_LARGE = 20, 3
LARGE_BYTES = 10_000_000  # from here on Ray takes seconds
POLL_S = 15
HISTORY_POLLS = 50
T0 = datetime(2026, 12, 1, 3, 0, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


def reports(shape: Shape, case: str, folder: Path) -> list[Path]:
    """Files of the polls of a case, made where they are not there yet."""
    files = []
    for step, behind in CASES[case]:
        file = folder / f"{step}{'-behind' if behind else ''}.json"
        if not file.exists():
            file.write_bytes(document(shape, step, behind=behind))
        files.append(file)
    return files


# ---- CPU ----------------------------------------------------------------------------------------------


def cpu_s(*works: Callable[[], object], runs: int, before_each: Callable[[], object]) -> list[float]:
    """CPU seconds of the cheapest of a few runs of each; they take turns, for the machine may be busy."""
    taken: list[list[float]] = [[] for _ in works]
    gc.collect()
    gc.freeze()  # what one of them remembers must not cost the other
    for _ in range(runs):
        for work, times in zip(works, taken, strict=True):
            before_each()
            gc.collect()
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
    gc.unfreeze()
    return list(map(min, taken))


def ours(files: Sequence[Path]) -> Callable[[], object]:
    """Read and judge the last of the reports, after the others."""
    window, policy = Window(attempt_id="bench"), HangPolicy()
    moments = [T0 + timedelta(seconds=POLL_S * index) for index in range(len(files))]
    for at, file in zip(moments[:-1], files, strict=False):
        window, _ = advance(window, Sighting(at, parse_report(file.read_bytes())), policy)
    raw = files[-1].read_bytes()
    return lambda: advance(window, Sighting(moments[-1], parse_report(raw)), policy)


def rays(files: Sequence[Path]) -> Callable[[], object]:
    """The same with Ray's functions."""
    from ray.train.v2._internal.callbacks.nccl_ras import (  # noqa: PLC0415  large; ours is measured without it
        compute_report_op_diff,
        parse_ras_schema,
    )

    before = parse_ras_schema(files[max(0, len(files) - 2)].read_text())
    text = files[-1].read_text()

    def tick() -> object:
        report = parse_ras_schema(text)
        return report.mismatched_comms, report.mismatched_comms, compute_report_op_diff(before, report)

    return tick


WHO = {"rankwatch": ours, "ray": rays}


def measure_cpu(name: str, case: str, folder: Path) -> dict[str, float]:
    """CPU milliseconds of both."""
    files = reports(SHAPES[name](), case, folder)
    runs = RUNS if files[-1].stat().st_size < LARGE_BYTES else RUNS_IF_LARGE
    ours_s, rays_s = cpu_s(ours(files), rays(files), runs=runs, before_each=BEFORE_EACH[case])
    return {"rankwatch": 1000 * ours_s, "ray": 1000 * rays_s}


# ---- memory -------------------------------------------------------------------------------------------


def measure_memory(name: str, case: str, folder: Path, who: str, *, traced: bool) -> int:
    """Peak bytes above those of the report, of the measured poll and all that is remembered for it."""
    files = reports(SHAPES[name](), case, folder)
    WHO[who](reports(SHAPES["512x20"](), case, _below(folder, "512x20")))()  # imports, and fills caches
    if traced:
        tracemalloc.start()
    gc.collect()
    rss_before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    tick = WHO[who](files)
    if traced:
        tracemalloc.reset_peak()
    tick()
    raw_bytes = files[-1].stat().st_size
    if traced:
        return tracemalloc.get_traced_memory()[1] - raw_bytes
    return resident_bytes("VmHWM") - rss_before - raw_bytes


def resident_bytes(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kib)


def _below(folder: Path, name: str) -> Path:
    below = folder.parent / name
    below.mkdir(exist_ok=True)
    return below


# ---- history ------------------------------------------------------------------------------------------


def measure_history(name: str, folder: Path, moving: int) -> dict[str, float]:
    """Bytes on disk of the last polls, of which the first ones move, and CPU milliseconds for one of them."""
    shape = SHAPES[name]()
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        ring = RasRing(Path(kept), HISTORY_POLLS)
        raw, raw_bytes, taken_s = b"", 0, 0.0
        for poll in range(HISTORY_POLLS):
            raw = document(shape, poll + 1) if poll < moving else raw
            raw_bytes += len(raw)
            started = time.process_time()
            ring.append("bench", T0 + timedelta(seconds=POLL_S * poll), raw)
            taken_s += time.process_time() - started
        kept_bytes = sum(file.stat().st_size for file in Path(kept).rglob("*") if file.is_file())
    return {"bytes": kept_bytes, "raw_bytes": raw_bytes, "poll_ms": 1000 * taken_s / HISTORY_POLLS}


# ---- all of it ----------------------------------------------------------------------------------------


def in_child(*arguments: str) -> Any:
    """Measure one thing in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.detect_cost", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, folder: Path, *, memory: bool, history: bool) -> dict[str, Any]:
    """Everything about one size."""
    shape = SHAPES[name]()
    place = _below(folder / "any", name)
    found: dict[str, Any] = {"shape": shape.name, "communicators": len(shape.communicators)}
    found["entries"] = shape.entries
    for case in CASES:
        found["raw_bytes"] = reports(shape, case, place)[-1].stat().st_size
        row = in_child("--child", "cpu", name, case, str(place))
        if memory:
            for key, who, how in (
                ("peak_bytes", "rankwatch", "traced"),
                ("peak_rss_bytes", "rankwatch", "rss"),
                ("ray_peak_rss_bytes", "ray", "rss"),
            ):
                row[key] = in_child("--child", how, name, case, str(place), who)
        found[case] = row
    if history:
        for moving in (10, HISTORY_POLLS):
            found[f"history_{moving}_moving"] = in_child("--child", "history", name, str(moving), str(place))
    return found


def child(kind: str, name: str, what: str, folder: str, who: str = "") -> Any:
    """What `in_child` asks for."""
    match kind:
        case "cpu":
            return measure_cpu(name, what, Path(folder))
        case "history":
            return measure_history(name, Path(folder), int(what))
        case _:
            return measure_memory(name, what, Path(folder), who, traced=kind == "traced")


def table_of(results: Iterable[dict[str, Any]]) -> Table:
    """CPU and memory, one line for each poll."""
    table = Table(title="One poll, bytes to events: rankwatch beside Ray's detector")
    for column in ("ranks x communicators", "entries", "report MB", "poll", "Ray ms", "ours ms", "ratio"):
        table.add_column(column, justify="left" if column in ("ranks x communicators", "poll") else "right")
    for column in ("peak / raw", "peak rss / raw", "Ray's rss / raw"):
        table.add_column(column, justify="right")
    for found in results:
        raw_bytes = found["raw_bytes"]
        for case in CASES:
            row = found[case]
            peaks = [
                f"{row[key] / raw_bytes:.2f}" if key in row else "-"
                for key in ("peak_bytes", "peak_rss_bytes", "ray_peak_rss_bytes")
            ]
            table.add_row(
                *(found["shape"], f"{found['entries']:,}", f"{raw_bytes / 1e6:.1f}", case),
                *(f"{row['ray']:.1f}", f"{row['rankwatch']:.2f}", f"{row['ray'] / row['rankwatch']:.0f}"),
                *peaks,
            )
    return table


def history_of(results: Iterable[dict[str, Any]]) -> Table:
    """What the ring keeps on disk."""
    table = Table(title=f"History of {HISTORY_POLLS} polls / {HISTORY_POLLS} raw reports")
    for column in ("ranks x communicators", "polls that move", "MB kept", "raw MB", "1 /", "CPU ms a poll"):
        table.add_column(column, justify="left" if column == "ranks x communicators" else "right")
    for found in results:
        for moving in (10, HISTORY_POLLS):
            row = found.get(f"history_{moving}_moving")
            if row:
                table.add_row(
                    *(
                        found["shape"],
                        str(moving),
                        f"{row['bytes'] / 1e6:.2f}",
                        f"{row['raw_bytes'] / 1e6:.0f}",
                    ),
                    *(f"{row['raw_bytes'] / row['bytes']:.0f}", f"{row['poll_ms']:.0f}"),
                )
    return table


def main() -> None:
    """Measure and print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", help="which sizes; all without")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-history", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        sys.stdout.write(json.dumps(child(*asked.child)) + "\n")
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "any").mkdir()
        for name in asked.sizes or SHAPES:
            results[name] = measured(
                name, Path(folder), memory=not asked.no_memory, history=not asked.no_history
            )
    console = Console(width=160)
    console.print(table_of(results.values()))
    if not asked.no_history:
        console.print(history_of(results.values()))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
