"""How often is wolf cried, and how often missed?

`python -m tests.bench.false_alarms [--hours N] [--hangs N] [--seed N]`

Simulated jobs (tests/simulated_job.py) with random shapes and lives, watched with the default policy: healthy
ones for so many hours, then some that hang. Ray's detector sees the same reports.
"""

import argparse
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from unittest.mock import MagicMock, patch

from ray.train.v2._internal.callbacks import nccl_ras

from tasks.hang.policy import HangPolicy
from tasks.hang.states import Event
from tests.simulated_job import Disturbance, Fault, Life, Segment, Shape, Shift, SimulatedJob

POLICY = HangPolicy()
EVERY_S = POLICY.poll_interval_s
CONFIRM_S = POLICY.confirm_duration_s
HOUR_S = 3600.0
KINDS: tuple[Life, ...] = ("pause", "wait", "stuck", "evaluate", "rebuild")
FAULTS: tuple[Fault, ...] = ("skip", "wrong", "sigstop", "wedge", "init", "subgroup")


class Ray:
    """Ray's detector, fed with the reports of a job; `alarms` are the moments at which it called a stall
    a hang."""

    def __init__(self) -> None:
        names = {
            "RAY_TRAIN_NCCL_RAS_ACTION": "fail",
            "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S": f"{CONFIRM_S:g}",
            "RAY_TRAIN_NCCL_RAS_MIN_POLL_INTERVAL_S": f"{EVERY_S:g}",
        }
        with patch.dict(os.environ, names):
            self._detector = nccl_ras.NCCLRASCallback()
        self._report: nccl_ras.RASReport | None = None
        self._detector._worker_group = MagicMock()
        self._detector._ras_poller = MagicMock(next_result=lambda: self._report, query=lambda _format: "text")
        self._detector.dump_workers_stack_traces = lambda: None
        self._detector.dump_ras_query_history = lambda _text=None: None
        self.alarms: list[float] = []

    def see(self, seconds: float, raw: bytes) -> None:
        """A poll. After an alarm it is as after a restart of the job."""
        self._report = nccl_ras.parse_ras_schema(raw.decode())
        try:
            self._detector.after_worker_group_poll_status(None)
        except nccl_ras.NCCLHangError:
            self.alarms.append(seconds)
            self._detector.prev_report = self._report


class Seen(SimulatedJob):
    """A job whose reports Ray's detector reads too."""

    def __init__(self, shape: Shape, segments: list[Segment], ray: Ray) -> None:
        super().__init__(shape, segments)
        self._ray = ray

    def report(self, seconds: float, **fields: object) -> bytes:
        """What both see."""
        raw = super().report(seconds, **fields)  # type: ignore[arg-type]
        self._ray.see(seconds, raw)
        return raw


def shape(pick: random.Random, *, beside: bool = False) -> Shape:
    """Between 4 and 16 ranks, steps of a second to 40."""
    tp, dp = pick.choice([(2, 2), (4, 2), (2, 4), (8, 1), (4, 4), (1, 8)])
    skew_s = tuple(pick.choice([0.0, 0.0, 0.5, 1.0, 3.0]) for _ in range(tp * dp))
    step_s = pick.choice([1.0, 4.0, 15.0, 40.0])
    pairs, setup = pick.random() < 0.3, pick.random() < 0.3
    return Shape(tp=tp, dp=dp, step_s=step_s, skew_s=skew_s, pairs=pairs, setup=setup, beside=beside)


def training(pick: random.Random, job: Shape, least_s: float = 120.0, most_s: float = 2400.0) -> Segment:
    """Whole steps."""
    return Segment("train", job.step_s * max(1, round(pick.uniform(least_s, most_s) / job.step_s)))


def life(pick: random.Random, job: Shape, hours: float) -> list[Segment]:
    """Training with checkpoints (by all, or by one rank while the others wait), evaluations, rebuilds and
    slow ranks. Nobody waits for longer than the confirm time less a poll and a step; where all wait in one
    communicator, a rank that visibly works takes up to the extended time now and then.
    """
    longest_s = CONFIRM_S - EVERY_S - job.step_s - 5
    chain = job.dp == 1 and not job.setup
    segments = [training(pick, job)]
    while sum(segment.duration_s for segment in segments) < hours * HOUR_S:
        kind = pick.choices(KINDS, [5, 5, 2, 3, 0.5])[0]
        duration_s = pick.triangular(5, longest_s, 60)
        match kind:
            case "evaluate":
                duration_s = pick.uniform(60, 1800)
            case "rebuild":
                duration_s = pick.uniform(5, 60)
            case "stuck":
                duration_s = pick.triangular(5, 400, 30)
            case "wait" if chain and pick.random() < 0.2:
                duration_s = pick.uniform(
                    longest_s, POLICY.extend_factor * CONFIRM_S - EVERY_S - job.step_s - 5
                )
        segments += [
            Segment(kind, float(int(duration_s)), who=pick.randrange(job.ranks)),
            training(pick, job),
        ]
    return segments


def disturbed(
    pick: random.Random, ranks: int, polls: int, *, calm: range = range(0)
) -> Mapping[int, Disturbance]:
    """One poll in a hundred fails, one in two hundred names a healthy rank, one in five hundred is the first
    of another process, and once in a while the clock steps back.
    """
    found: dict[int, Disturbance] = {}
    for number in set(range(polls)).difference(calm):
        draw = pick.random()
        if draw < 0.01:
            found[number] = Disturbance(fails=True)
        elif draw < 0.015:
            found[number] = Disturbance(hides=pick.randrange(ranks))
        elif draw < 0.017:
            found[number] = Disturbance(restarts=True)
        elif draw < 0.0172:
            found[number] = Disturbance(back_s=pick.choice([1.0, 20.0, 3600.0]))
    return found


def watch(job: SimulatedJob, until_s: float, known: Mapping[int, Disturbance]) -> Shift:
    """One shift over a job."""
    shift = Shift(job, POLICY)
    shift.run(until_s, disturbed=lambda number: known.get(number, Disturbance()))
    return shift


def healthy(pick: random.Random, hours: float) -> None:
    """Watch healthy jobs for so long, and print what was said of them."""
    began, watched_s, polls, rays = time.monotonic(), 0.0, 0, 0
    counted: Counter[str] = Counter()
    alarms: list[tuple[SimulatedJob, float, Event]] = []
    while watched_s < hours * HOUR_S:
        ray, form = Ray(), shape(pick, beside=pick.random() < 0.2)
        job: SimulatedJob = Seen(form, life(pick, form, min(12.0, hours)), ray)
        shift = watch(job, job.duration_s, disturbed(pick, form.ranks, int(job.duration_s / EVERY_S)))
        watched_s += job.duration_s
        polls += len(shift.reported)
        counted.update(event.event for _, event in shift.heard)
        alarms += [(job, seconds, event) for seconds, event in shift.of("confirmed")]
        rays += len(ray.alarms)
    took_s = time.monotonic() - began
    _say(f"healthy: {watched_s / HOUR_S:,.0f} simulated hours, {polls:,} reports, {took_s:.0f} s")
    _say(f"  suspected {counted['suspected']}, recovered {counted['recovered']}, idle {counted['idle']}")
    _say(f"  confirmed {len(alarms)} (must be 0), in {len({id(job) for job, _, _ in alarms})} jobs")
    _say(f"  Ray's detector on the same reports: {rays} false alarms")
    for job, seconds, event in alarms[:20]:
        segment = job.segments[job._index(seconds)]
        _say(
            f"    {event.communicator} {event.kind} after {event.stalled_s:g} s (due {event.due_s:g} s) "
            f"in {segment.kind} of {segment.duration_s:g} s: {event.reason}; {job.shape}"
        )


def hanging(pick: random.Random, fault: Fault, number: int) -> None:
    """Watch jobs that hang in one way, and print how many are found in time."""
    counted: Counter[str] = Counter()
    for _ in range(number):
        form = shape(pick, beside=fault == "subgroup")
        while form.tp < 3:
            form = shape(pick, beside=fault == "subgroup")
        ray = Ray()
        end = Segment("fault", 1e9, who=pick.randrange(form.ranks), fault=fault)
        job = Seen(form, [training(pick, form, 600, 1200), end], ray)
        first, until_s = int(job.duration_s / EVERY_S), job.duration_s + CONFIRM_S + 300
        calm = range(first - 2, first + 10)
        shift = watch(job, until_s, disturbed(pick, form.ranks, int(until_s / EVERY_S), calm=calm))
        counted.update(_judged(job, shift))
        counted["ray"] += any(seconds >= job.duration_s for seconds in ray.alarms)
        counted["ray false"] += any(seconds < job.duration_s for seconds in ray.alarms)
    _say(
        f"  {fault:9} {number} hangs: {counted['in time']} in time, {counted['late']} later, "
        f"{counted['missed']} missed, {counted['early']} with an early alarm; "
        f"Ray's: {counted['ray']} found, {counted['ray false']} with a false alarm before"
    )


def _judged(job: SimulatedJob, shift: Shift) -> list[str]:
    """Whether the communicator to blame was confirmed, as what it is and with its ranks, and when."""
    accused = job.accused()
    confirmed = shift.of("confirmed")
    right = [
        seconds for seconds, event in confirmed if (event.communicator, event.kind, event.lagging) == accused
    ]
    # Skew, the poll that shows it first, and one that fails.
    due_s = job.duration_s + CONFIRM_S + 3 + 2 * EVERY_S
    found = "missed" if not right else "in time" if min(right) <= due_s else "late"
    early = any(seconds < job.duration_s + CONFIRM_S - EVERY_S for seconds, _ in confirmed)
    return [found, "early"] if early else [found]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=200.0, help="of healthy jobs")
    parser.add_argument("--hangs", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger(nccl_ras.__name__).setLevel(logging.CRITICAL)
    pick = random.Random(given.seed)
    healthy(pick, given.hours)
    _say("hanging, confirmed within two polls of the confirm time:")
    for fault in FAULTS:
        hanging(pick, fault, given.hangs)


if __name__ == "__main__":
    main()
