"""A training job that is played in seconds instead of days, with its truth known.

`SimulatedJob` says what RAS would report at any second and what a look at its processes would show;
`Watcher` feeds both to the core, as a shift does. Everything is a function of time, so a schedule of days
costs as much as the reports that are asked for.

The job is a grid of tensor-parallel groups (contiguous ranks) and data-parallel groups (one rank of each).
In a step each rank launches `LAYERS` AllReduce in its tensor-parallel group, two AllGather and a
ReduceScatter in its data-parallel group, and one AllReduce in the world. Whoever waits for a rank has
launched what that rank has not, so a rank that stops holds up its own group first, and then the others
through the data-parallel groups of its neighbours: many communicators are apart, and one rank is to blame.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from msgspec import Struct

from tasks.hang.memory import recall, remember
from tasks.hang.policy import FreezeKind, HangPolicy
from tasks.hang.report import RasReport, parse_report
from tasks.hang.states import Blank, Event, Observation, Sighting
from tasks.hang.window import Window, advance
from tasks.hang.witness import Look, Question, Witness
from tests.reports import at

Looks = Iterable[Look] | None

# ---- looks at a process, as a truthful witness gives them -------------------------------------------------


def moving(number: int, *, how: str = "0.9 s of CPU time in 10 s") -> Look:
    """A rank that works."""
    return Look(
        rank=number, state="running", moved=how, waits=False, where="save_checkpoint", same_frames=False
    )


def waiting(number: int, *, collective: str = "all_reduce") -> Look:
    """A rank inside a collective, in both samples."""
    return Look(
        rank=number,
        state="running",
        waits=True,
        where=collective,
        frames=(collective, "train"),
        same_frames=True,
        collective=collective,
    )


def standing(number: int, *, where: str = "read_batch") -> Look:
    """A rank that stands still, and not in a collective."""
    return Look(
        rank=number, state="running", waits=False, where=where, frames=(where, "train"), same_frames=True
    )


def stopped(number: int) -> Look:
    """A process that got a SIGSTOP."""
    return Look(rank=number, state="stopped")


def gone(number: int) -> Look:
    """A process that has ended."""
    return Look(rank=number, state="gone")


def unseen(number: int) -> Look:
    """A process that nobody may look at."""
    return Look(rank=number, state="unknown", problem="no access")


def everyone(look: Callable[[int], Look], **others: Look) -> Callable[[Question], Looks]:
    """A witness that says the same of every rank, but for `r3=...`."""
    return lambda question: [others.get(f"r{number}") or look(number) for number in question.ranks]


# ---- what a shift does ------------------------------------------------------------------------------------


class Watcher:
    """Feeds the core, poll by poll, and keeps what it told.

    Args:
        policy: How long is too long.
        witness: What is seen of the ranks of a question; None is a witness that never answers, and so is a
            `witness` that returns None.
        window: To go on with.
    """

    def __init__(
        self,
        policy: HangPolicy,
        witness: Callable[[Question], Looks] | None = None,
        *,
        window: Window | None = None,
    ) -> None:
        self.policy = policy
        self.window = window or Window(attempt_id="one")
        self.told: list[tuple[float, Event]] = []
        self.asked: list[tuple[float, Question]] = []
        self._witness = witness

    def poll(self, seconds: float, seen: RasReport | bytes | None) -> None:
        """A poll at that second; None is one that failed."""
        if seen is None:
            self._take(seconds, Blank(at(seconds), "no answer"))
            return
        self._take(seconds, Sighting(at(seconds), parse_report(seen) if isinstance(seen, bytes) else seen))
        self._look(seconds)

    def polls(
        self, seen: Iterable[RasReport | bytes | None], *, every_s: float, start_s: float = 0.0
    ) -> None:
        """One poll after the other."""
        for number, one in enumerate(seen):
            self.poll(start_s + number * every_s, one)

    def restart(self) -> None:
        """What a shift leaves to the next one."""
        self.window = recall(remember(self.window), self.window.attempt_id)

    def names(self, *events: str) -> list[tuple[float, str]]:
        """(second, name) of what was told, or of some names of it."""
        return [(seconds, told.event) for seconds, told in self.told if not events or told.event in events]

    def of(self, event: str) -> list[Event]:
        """What was told under that name."""
        return [told for _, told in self.told if told.event == event]

    def _look(self, seconds: float) -> None:
        for question in self.window.questions if self._witness else ():
            assert self._witness is not None
            self.asked.append((seconds, question))
            looks = self._witness(question)
            if looks is None:
                continue
            answer = Witness(observed_at=at(seconds), communicator=question.communicator, looks=tuple(looks))
            self._take(seconds, answer)

    def _take(self, seconds: float, observation: Observation) -> None:
        self.window, events = advance(self.window, observation, self.policy)
        self.told += [(seconds, event) for event in events]


# ---- a schedule -------------------------------------------------------------------------------------------

LAYERS = 4
_BLOCKED_AT = 0.5  # of a step: the first AllGather that needs ranks of another tensor-parallel group
EVALUATION_STEP_S = 2.0

_HELD_UP = ("wait", "stuck")
_BUSY = ("train", "pause", "evaluate", "rebuild")

Life = Literal["train", "pause", "wait", "stuck", "evaluate", "rebuild", "fault"]
Fault = Literal["skip", "wrong", "sigstop", "wedge", "init", "subgroup"]

KINDS: Mapping[Fault, FreezeKind] = {
    "skip": "mismatch",
    "wrong": "mismatch",
    "sigstop": "unresponsive",
    "wedge": "symmetric",
    "init": "init",
    "subgroup": "mismatch",
}


class Segment(Struct, frozen=True):
    """A part of the life of a job.

    `train`; `pause`: all ranks write a checkpoint, having launched the same; `wait`: rank `who` works alone
    and the others wait for it in collectives; `stuck`: the same, but that rank stands still; `evaluate`: only
    the tensor-parallel groups go on; `rebuild`: the communicators are made anew; `fault`: the end.
    """

    kind: Life
    duration_s: float
    who: int = 0
    fault: Fault | None = None


class Shape(Struct, frozen=True, kw_only=True):
    """What a job is made of.

    Args:
        tp: Ranks of a tensor-parallel group.
        dp: Number of those groups.
        step_s: Seconds of a training step.
        skew_s: By how much each world rank is later than the first; the rest are on time.
        pairs: Whether there are communicators for sends and receives only: their counters stay 0.
        setup: Whether there is one in which rank 0 launched a broadcast at the start, and the others nothing.
        beside: Whether two processes that share no communicator with the others go on for themselves.
    """

    tp: int = 2
    dp: int = 2
    step_s: float = 10.0
    skew_s: tuple[float, ...] = ()
    pairs: bool = False
    setup: bool = False
    beside: bool = False

    @property
    def ranks(self) -> int:
        """Of the world."""
        return self.tp * self.dp


Group = tuple[str, tuple[int, ...]]  # hash, world ranks in the order of their communicator ranks
Launches = tuple[int, int, int, int, int]  # Broadcast, Reduce, AllGather, ReduceScatter, AllReduce
Member = tuple[int, Launches, Literal["RUNNING", "INIT", "FINALIZE"]]

_NOTHING: Launches = (0, 0, 0, 0, 0)


class SimulatedJob:
    """A job with a schedule, and the truth about it at any second.

    Args:
        shape: What it is made of.
        segments: Its life; a fault, if there is one, comes last and lasts for ever.
    """

    def __init__(self, shape: Shape, segments: Sequence[Segment]) -> None:
        self.shape = shape
        self.segments = tuple(segments)
        for one, following in pairwise(segments):
            assert one.kind != "fault", "nothing comes after a fault"
            assert one.kind not in _HELD_UP or following.kind == "train", (
                "the others have begun the next step"
            )
            if one.kind == "train":
                assert (one.duration_s / shape.step_s).is_integer(), "a step is finished first"
        self._starts = [0.0, *accumulate(segment.duration_s for segment in segments)]
        # Seconds of training, of evaluation, and rebuilds, before each segment.
        self._work = [0.0, *accumulate(s.duration_s * (s.kind == "train") for s in segments)]
        self._evaluated = [0.0, *accumulate(s.duration_s * (s.kind == "evaluate") for s in segments)]
        self._generation = [0, *accumulate(int(s.kind == "rebuild") for s in segments)]

    @property
    def duration_s(self) -> float:
        """Of all segments, but for a fault."""
        return self._starts[-2] if self.fault else self._starts[-1]

    @property
    def fault(self) -> Segment | None:
        """What it ends with."""
        last = self.segments[-1]
        return last if last.kind == "fault" else None

    # ---- what RAS reports

    def report(self, seconds: float, *, absent: Iterable[int] = (), timeouts: int = 0) -> bytes:
        """What RAS says at that second.

        Args:
            seconds: Since the start.
            absent: World ranks that do not answer this time.
            timeouts: How many peers did not answer in time.
        """
        silent, dead = set(absent), False
        fault = self.fault
        if fault is not None and fault.fault == "sigstop" and seconds >= self.duration_s:
            silent.add(fault.who)
            dead = seconds - self.duration_s > 60
        records = []
        for name, ranks in self.groups(seconds):
            members = tuple(self._member(name, rank, seconds) for rank in ranks)
            records.append(_record(name, members, frozenset(silent.intersection(ranks)), dead=dead))
        return _document(records, timeouts)

    def groups(self, seconds: float) -> list[Group]:
        """The communicators of that second."""
        shape, index = self.shape, self._index(seconds)
        segment, into_s = self.segments[index], seconds - self._starts[index]
        generation = self._generation[index]
        if segment.kind == "rebuild":
            if segment.who and into_s < segment.duration_s / 3:
                return self._groups_of(generation)
            if not segment.who or into_s < segment.duration_s / 2:
                return self._beside()
            generation += 1
        found = self._groups_of(generation)
        if segment.fault == "init":
            found.append((f"0xe{generation:x}", tuple(range(shape.ranks))))
        return found

    def _groups_of(self, generation: int) -> list[Group]:
        return [*_grid(self.shape, generation), *self._beside()]

    def _beside(self) -> list[Group]:
        first = self.shape.ranks
        return [("0x90", (first, first + 1))] if self.shape.beside else []

    def _member(self, name: str, rank: int, seconds: float) -> Member:
        index = self._index(seconds)
        segment, into_s = self.segments[index], seconds - self._starts[index]
        if name == "0x90":
            return rank, self._launched_beside(rank, seconds), "RUNNING"
        if name.startswith("0xe"):
            return rank, _NOTHING, "INIT" if rank == segment.who else "RUNNING"
        if segment.kind == "rebuild":
            if into_s < segment.duration_s / 3:
                return rank, self._launched(name, rank, seconds), "FINALIZE" if rank % 2 else "RUNNING"
            late = rank % 2 and into_s < segment.duration_s * 3 / 4
            return rank, _NOTHING, "INIT" if late else "RUNNING"
        return rank, self._launched(name, rank, seconds), "RUNNING"

    def accused(self) -> tuple[str, str, tuple[int, ...]]:
        """The communicator that hangs first, in which way, and its ranks that are to be named."""
        fault = self.fault
        assert fault is not None
        groups = dict(self.groups(self.duration_s + 1))
        kind = KINDS[fault.fault or "skip"]
        if fault.fault == "subgroup":
            return f"0x90/{SECONDARY}", kind, (1,)
        first = "0xe" if fault.fault == "init" else "0xa"
        (name,) = [name for name, ranks in groups.items() if name.startswith(first) and fault.who in ranks]
        lagging = () if fault.fault == "wedge" else (groups[name].index(fault.who),)
        return f"{name}/{SECONDARY}", kind, lagging

    # ---- what a look at the processes shows

    def look(self, question: Question, seconds: float) -> list[Look]:
        """The truth about the ranks of a question."""
        name = question.communicator.partition("/")[0]
        members = dict(self.groups(seconds)).get(name, ())
        return [
            self._seen(number, members[number], seconds) for number in question.ranks if number < len(members)
        ]

    def _seen(self, number: int, rank: int, seconds: float) -> Look:
        segment = self.segments[self._index(seconds)]
        beside = rank >= self.shape.ranks
        if beside != (segment.fault == "subgroup") or segment.kind in _BUSY:
            return moving(number)
        if segment.fault == "wedge" or rank != (self.shape.ranks + 1 if beside else segment.who):
            return waiting(number)
        match segment.kind, segment.fault:
            case "wait", _:
                return moving(number)
            case _, "sigstop":
                return stopped(number)
            case _, "wrong":
                return waiting(number, collective="broadcast")
            case _:
                return standing(number)

    # ---- what a rank has launched

    def _index(self, seconds: float) -> int:
        return min(bisect_right(self._starts, seconds) - 1, len(self.segments) - 1)

    def _launched_beside(self, rank: int, seconds: float) -> Launches:
        fault = self.fault
        if fault is None or fault.fault != "subgroup" or seconds < self.duration_s:
            return 0, 0, 0, 0, 1 + int(seconds)
        return 0, 0, 0, 0, 1 + int(self.duration_s) + int(rank == self.shape.ranks)

    def _launched(self, name: str, rank: int, seconds: float) -> Launches:
        kind = name[2]
        if kind == "b":  # sends and receives
            return _NOTHING
        if kind == "c":
            return int(rank == 0), 0, 0, 0, 0
        late_s = self.shape.skew_s[rank] if rank < len(self.shape.skew_s) else 0.0
        at_s = max(0.0, seconds - late_s)
        segment = self.segments[self._index(at_s)]
        work_s, evaluated_s = self._position(rank, at_s)
        steps, part = divmod(work_s / self.shape.step_s + 1e-9, 1.0)
        done = int(steps)
        if kind == "f":
            return 1, 0, 0, 0, done + int(part >= 0.95)
        if kind == "d":
            return 0, 0, 2 * done + int(2 * part), done + int(part >= 0.85), 0
        wrong = segment.fault == "wrong" and rank == segment.who
        return int(wrong), 0, 0, 0, done * LAYERS + int(part * LAYERS) + int(evaluated_s / EVALUATION_STEP_S)

    def _position(self, rank: int, seconds: float) -> tuple[float, float]:
        """Seconds of training and evaluation that a rank has behind it since its communicators were made."""
        index = self._index(seconds)
        segment, into_s = self.segments[index], seconds - self._starts[index]
        made_work_s, made_evaluated_s = self._made_at(index)
        work_s, evaluated_s = self._work[index] - made_work_s, self._evaluated[index] - made_evaluated_s
        match segment.kind, segment.fault:
            case "train", _:
                before = self.segments[index - 1] if index else None
                # What was launched while waiting stays launched.
                held_up = before is not None and before.kind in _HELD_UP
                ahead_s = self._ahead_s(rank, before.who) if before is not None and held_up else 0.0
                work_s += max(into_s, ahead_s)
            case "evaluate", _:
                evaluated_s += into_s
            case ("wait" | "stuck", _) | ("fault", "skip" | "sigstop" | "wrong"):
                work_s += self._ahead_s(rank, segment.who)
            case "fault", "wedge":
                work_s += _BLOCKED_AT * self.shape.step_s
            case "fault", "subgroup":
                work_s += into_s
            case _:
                pass
        return work_s, evaluated_s

    def _ahead_s(self, rank: int, who: int) -> float:
        """How far a rank comes into a step that `who` does not begin."""
        if rank == who:
            return 0.0
        neighbours = rank // self.shape.tp == who // self.shape.tp
        return self.shape.step_s * (1 / LAYERS if neighbours else _BLOCKED_AT)

    def _made_at(self, index: int) -> tuple[float, float]:
        """Seconds of training and evaluation when the communicators of a segment were made."""
        for earlier in range(index - 1, -1, -1):
            if self.segments[earlier].kind == "rebuild":
                return self._work[earlier], self._evaluated[earlier]
        return 0.0, 0.0


@lru_cache(maxsize=512)
def _grid(shape: Shape, generation: int) -> tuple[Group, ...]:
    everyone = tuple(range(shape.ranks))
    found = [(f"0xf{generation:x}", everyone)]
    found += [
        (f"0xa{generation:x}{group:03x}", everyone[group * shape.tp : (group + 1) * shape.tp])
        for group in range(shape.dp)
    ]
    columns = range(shape.tp if shape.dp > 1 else 0)
    found += [(f"0xd{generation:x}{column:03x}", everyone[column :: shape.tp]) for column in columns]
    if shape.pairs:
        found.append((f"0xb{generation:x}", (0, shape.ranks - 1)))
    if shape.setup:
        found.append((f"0xc{generation:x}", everyone))
    return tuple(found)


# ---- a shift over it ---------------------------------------------------------------------------------------


class Disturbance(Struct, frozen=True, kw_only=True):
    """What else happens at a poll.

    Args:
        fails: There is no report.
        restarts: The watcher is another process from here on.
        hides: A healthy rank that does not answer in time, so that it is named as missing.
        back_s: By how much the watcher's clock steps back.
    """

    fails: bool = False
    restarts: bool = False
    hides: int | None = None
    back_s: float = 0.0


QUIET = Disturbance()


class Shift:
    """Polls a job, with what may go wrong on the way.

    `heard` are events with the true second at which they were told, `reported` the seconds of the polls that
    brought a report; the watcher's own clock may have stepped back since.
    """

    def __init__(self, job: SimulatedJob, policy: HangPolicy) -> None:
        self.job = job
        self.watcher = Watcher(policy, self._truth)
        self.heard: list[tuple[float, Event]] = []
        self.reported: list[float] = []
        self._now_s = 0.0
        self._behind_s = 0.0

    def run(
        self,
        until_s: float,
        *,
        start_s: float = 0.0,
        disturbed: Callable[[int], Disturbance] = lambda _: QUIET,
    ) -> None:
        """Poll until that second."""
        every_s = self.watcher.policy.poll_interval_s
        for number in range(int((until_s - start_s) // every_s) + 1):
            self._poll(start_s + number * every_s, disturbed(number))

    def of(self, name: str) -> list[tuple[float, Event]]:
        """What was told under that name."""
        return [(seconds, event) for seconds, event in self.heard if event.event == name]

    def _poll(self, seconds: float, disturbance: Disturbance) -> None:
        self._now_s = seconds
        self._behind_s += disturbance.back_s
        if disturbance.restarts:
            self.watcher.restart()
        raw = None
        if not disturbance.fails:
            absent = () if disturbance.hides is None else (disturbance.hides,)
            raw = self.job.report(seconds, absent=absent, timeouts=len(absent))
            self.reported.append(seconds)
        told = len(self.watcher.told)
        self.watcher.poll(seconds - self._behind_s, raw)
        self.heard += [(seconds, event) for _, event in self.watcher.told[told:]]

    def _truth(self, question: Question) -> Looks:
        return self.job.look(question, self._now_s)


# ---- in the layout of NCCL's server -----------------------------------------------------------------------

SECONDARY = "0x1:0x2"
_STATES = {"RUNNING": (0, "false"), "INIT": (7, "false"), "FINALIZE": (0, "true")}


@lru_cache(maxsize=200_000)
def _rank(number: int, member: Member) -> str:
    rank, launched, status = member
    init_state, finalize = _STATES[status]
    broadcast, reduce, gather, scatter, every = launched
    return f"""
        {{
          "rank": {number},
          "host": "10.0.0.{1 + rank // 8}",
          "pid": {1000 + rank},
          "cuda_dev": {rank % 8},
          "nvml_dev": {rank % 8},
          "status": {{
            "init_state": {init_state},
            "async_error": 0,
            "finalize_called": {finalize},
            "destroy_flag": false,
            "abort_flag": false
          }},
          "collective_counts": {{
            "Broadcast": {broadcast},
            "Reduce": {reduce},
            "AllGather": {gather},
            "ReduceScatter": {scatter},
            "AllReduce": {every}
          }}
        }}"""


def _missing(number: int, rank: int, *, dead: bool) -> str:
    return f"""
        {{
          "rank": {number},
          "host": "10.0.0.{1 + rank // 8}",
          "pid": {1000 + rank},
          "cuda_dev": {rank % 8},
          "nvml_dev": {rank % 8},
          "status": {{
            "unresponsive": true,
            "considered_dead": {"true" if dead else "false"}
          }}
        }}"""


@lru_cache(maxsize=20_000)
def _record(name: str, members: tuple[Member, ...], silent: frozenset[int], *, dead: bool) -> str:
    there = [_rank(number, member) for number, member in enumerate(members) if member[0] not in silent]
    gone = [
        _missing(number, member[0], dead=dead) for number, member in enumerate(members) if member[0] in silent
    ]
    return f"""
    {{
      "hash": "{name}",
      "secondary_hash": "{SECONDARY}",
      "size": {len(members)},
      "ranks_count": {len(there)},
      "missing_ranks_count": {len(gone)},
      "ranks": [{",".join(there) or chr(10)}
      ],
      "missing_ranks": [{",".join(gone) or chr(10)}
      ]
    }}"""


def _document(records: Sequence[str], timeouts: int) -> bytes:
    listed = f"[{','.join(records)}\n  ]" if records else "[]"
    return f"""{{
  "nccl_version": "2.30.7",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2026-12-01 03:00:00",
  "communicators_count": {len(records)},
  "communicators": {listed},
  "ras": {{
    "collection_time_sec": 0.001,
    "timeouts_count": {timeouts}
  }}
}}
""".encode()
