"""What two samples of a process say: does it move, and where does it stand?

Launch counts cannot tell a rank that writes a long checkpoint from one that hangs in it, nor a fabric that is
wedged from a job that is busy elsewhere. tasks/witness.py takes the samples, this reads them, the window
judges.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

from tasks.hang.stacks import Frame, Position, Thread, position, read_threads, training_thread

ProcessState = Literal["running", "stopped", "uninterruptible", "gone", "unknown"]

# A training thread that only waits uses next to no CPU; one that polls every few milliseconds uses 1 or 2 %.
LEAST_CPU_SHARE = 0.05
# Where the thread is not known, the threads of Ray, NCCL and torch count too, which are never quite silent.
LEAST_CPU_SHARE_OF_PROCESS = 0.2
# The kernel counts CPU in ticks of 10 ms: in a short gap a few of them are nobody's work.
LEAST_CPU_S = 0.05
# Logs, heartbeats and our own questions are some kB; a checkpoint or a data set is MB in every second.
LEAST_BYTES_PER_S = 2**20 / 10

_SYNCHRONIZE_FILES = re.compile(r"(^|/)torch/(cuda|xpu|accelerator)/(__init__|streams)\.py$")
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py",)
_FUNCTIONAL_FILES = ("torch/distributed/_functional_collectives.py",)
_FUNCTIONAL_WAITS = ("wait", "wait_tensor")


class Look(Struct, frozen=True, kw_only=True):
    """One rank, seen twice.

    Args:
        rank: Rank in the communicator, as asked for.
        state: Of the training thread where it is known, else of the process. `uninterruptible` (state D) only
            if both samples say so: whoever reads from a disk is in it for a moment.
        moved: What moved between the samples, in words; empty where nothing did.
        waits: Whether the training thread is in a collective or a device synchronise in both samples. With
            NCCL the wait is asynchronous and often shows in native frames only: see `pending`. None where
            no two stacks could be read.
        where: Where the training thread stands in the last sample that has its stack.
        frames: All Python frames of that stack, innermost first.
        same_frames: Whether both stacks are the same to the line; None where there are not two.
        collective: The function of torch.distributed that it waits in; empty where it does not wait in one.
        pending: Whether Flight Recorder has a collective that was enqueued before the first sample and is not
            completed at the second; None where it could not be asked twice.
        problem: Why something could not be seen.
    """

    rank: int
    state: ProcessState
    moved: str = ""
    waits: bool | None = None
    where: str = ""
    frames: tuple[str, ...] = ()
    same_frames: bool | None = None
    collective: str = ""
    pending: bool | None = None
    problem: str = ""


class Witness(Struct, frozen=True, kw_only=True):
    """What was seen of the ranks of a communicator; `reason` is why nothing could be."""

    observed_at: datetime
    communicator: str
    looks: tuple[Look, ...]
    reason: str = ""


class Question(Struct, frozen=True, kw_only=True):
    """Which ranks of a communicator somebody should look at. Without `stacks` only whether their processes
    are there.
    """

    communicator: str
    ranks: tuple[int, ...]
    stacks: bool


class _Group(Struct, frozen=True):
    group: str
    enqueued: int
    completed: int


class _Recorder(Struct, frozen=True):
    groups: tuple[_Group, ...] = ()


class _Sample(Struct, frozen=True, kw_only=True):
    """One sample as node_part takes it."""

    state: str
    at_s: float
    cpu_ticks: int | None = None
    io_bytes: int | None = None
    storage_bytes: int | None = None
    threads_cpu_ticks: dict[str, int] = {}
    threads_state: dict[str, str] = {}
    threads: list[Any] = []
    flight_recorder: _Recorder | None = None


class _Answer(Struct, frozen=True, kw_only=True):
    """What node_part says of one process."""

    samples: list[_Sample] = []
    ticks_per_s: int = 100
    failed: list[str] = []


class _Stack(Struct, frozen=True):
    """The training thread of one sample."""

    thread: Thread
    place: Position

    @property
    def waits(self) -> bool:
        return self.place.in_collective or any(in_device_sync(frame) for frame in self.thread.frames)

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """From the innermost frame of the user's own code outwards; all where there is none."""
        frames = self.thread.frames
        return frames[frames.index(self.place.user) :] if self.place.user is not None else frames


def unseen(rank: int, problem: str) -> Look:
    """A rank of which nothing is known, and why."""
    return Look(rank=rank, state="unknown", problem=problem)


def read_look(rank: int, raw: Mapping[str, Any]) -> Look:
    """Read what node_part's `look` says of one process. Never raises: an answer that cannot be read is one
    rank that was not seen.

    Args:
        rank: Rank in the communicator.
        raw: The process' part of the answer.
    """
    try:
        answer = msgspec.convert(raw, _Answer)
        stacks = _stacks_of(answer.samples)
    except ValueError as error:
        return unseen(rank, f"the node's answer cannot be read: {error}")
    if not answer.samples:
        return unseen(rank, "; ".join(answer.failed) or "the node took no sample")
    last = next((stack for stack in reversed(stacks) if stack is not None), None)
    known = Look(
        rank=rank,
        state=_state(answer.samples, last),
        where=str(last.place) if last else "",
        frames=tuple(map(str, last.thread.frames)) if last else (),
        problem="; ".join(answer.failed),
    )
    if known.state == "gone" or len(answer.samples) == 1:
        return known
    return _compared(known, answer, stacks)


def in_device_sync(frame: Frame) -> bool:
    """Whether a frame waits for the device, or for the result of a functional collective. What `.item()` or
    `.cpu()` wait for shows in native frames only.
    """
    if frame.filename.endswith(_FUNCTIONAL_FILES):
        return frame.name in _FUNCTIONAL_WAITS
    return frame.name == "synchronize" and bool(_SYNCHRONIZE_FILES.search(frame.filename))


def _compared(known: Look, answer: _Answer, stacks: Sequence[_Stack | None]) -> Look:
    """What two samples of a process that is there say."""
    first, last = stacks[0], stacks[-1]
    pending = _pending(answer.samples)
    if first is None or last is None:
        one = first or last
        moved = _collectives(answer.samples)
        if not moved and not (one and one.waits):
            moved = _usage(answer, one.thread if one else None, spins=pending is True)
        return msgspec.structs.replace(known, moved=moved, pending=pending)
    waits = first.waits and last.waits
    same = first.thread.frames == last.thread.frames
    moved = _step(first, last, waits=waits) or _collectives(answer.samples)
    # Waiting burns CPU: gloo and CUDA poll. With a collective pending, so may what looks like a plain line.
    if not moved and not waits:
        moved = _usage(answer, last.thread, spins=same and pending is True)
    return msgspec.structs.replace(
        known,
        moved=moved,
        waits=waits,
        same_frames=same,
        collective=_collective(last.thread.frames) if waits else "",
        pending=pending,
    )


def _stacks_of(samples: Sequence[_Sample]) -> tuple[_Stack | None, ...]:
    """The training thread of each sample, the same thread in both."""
    threads = [read_threads(sample.threads) for sample in samples]
    chosen = [training_thread(seen) for seen in threads]
    if len(chosen) > 1 and chosen[-1] is not None and chosen[-1].os_thread_id is not None:
        same = [t for t in threads[0] if t.os_thread_id == chosen[-1].os_thread_id and t.frames]
        chosen[0] = same[0] if same else chosen[0]
    places = [position((thread,)) if thread else None for thread in chosen]
    return tuple(
        _Stack(thread, place) if thread and place else None
        for thread, place in zip(chosen, places, strict=True)
    )


def _state(samples: Sequence[_Sample], stack: _Stack | None) -> ProcessState:
    if samples[-1].state in ("X", "Z"):
        return "gone"
    tid = str(stack.thread.os_thread_id) if stack else ""
    states = [sample.threads_state.get(tid, sample.state) for sample in samples]
    if states[-1] == "T" or set(states) <= {"T", "t"}:  # once in t is a debugger that passes by
        return "stopped"
    return "uninterruptible" if set(states) == {"D"} else "running"


# ---- what moved ---------------------------------------------------------------------------------------


def _step(first: _Stack, last: _Stack, *, waits: bool) -> str:
    """How the stack changed. Of a rank that waits only the user's part counts: below it, libraries poll."""
    changed = first.user_frames != last.user_frames if waits else first.thread.frames != last.thread.frames
    if not changed:
        return ""
    before, after = str(first.place), str(last.place)
    if before == after:
        before, after = str(first.thread.frames[0]), str(last.thread.frames[0])
    if before == after:
        return f"its stack changed around {after}"
    return f"its stack changed from {before} to {after}"


def _collectives(samples: Sequence[_Sample]) -> str:
    """Whether a process group got on, by Flight Recorder."""
    before, after = _groups(samples[0]), _groups(samples[-1])
    for name, group in after.items():
        earlier = before.get(name)
        if earlier is None:
            continue
        if group.enqueued > earlier.enqueued:
            return f"it went from collective {earlier.enqueued} to {group.enqueued} in process group {name}"
        if group.completed > earlier.completed:
            return f"it completed collective {group.completed} in process group {name}"
    return ""


def _usage(answer: _Answer, thread: Thread | None, *, spins: bool = False) -> str:
    """CPU and bytes between the samples, where they are more than those of a process that waits."""
    first, last = answer.samples[0], answer.samples[-1]
    gap_s = last.at_s - first.at_s
    if gap_s <= 0:
        return ""
    return ("" if spins else _cpu(first, last, thread, answer.ticks_per_s)) or _bytes(first, last)


def _cpu(first: _Sample, last: _Sample, thread: Thread | None, ticks_per_s: int) -> str:
    gap_s = last.at_s - first.at_s
    tid = str(thread.os_thread_id) if thread else ""
    before, after = first.threads_cpu_ticks.get(tid), last.threads_cpu_ticks.get(tid)
    whose, share = "its training thread", LEAST_CPU_SHARE
    if before is None or after is None:
        before, after = first.cpu_ticks, last.cpu_ticks
        whose, share = "its process", LEAST_CPU_SHARE_OF_PROCESS
    if before is None or after is None:
        return ""
    cpu_s = (after - before) / ticks_per_s
    if cpu_s < max(LEAST_CPU_S, share * gap_s):
        return ""
    return f"{whose} used {cpu_s:.1f} s of CPU in {gap_s:.0f} s"


def _bytes(first: _Sample, last: _Sample) -> str:
    gap_s = last.at_s - first.at_s
    pairs = ((first.io_bytes, last.io_bytes), (first.storage_bytes, last.storage_bytes))
    grown = max(
        (after - before for before, after in pairs if before is not None and after is not None), default=0
    )
    if grown < LEAST_BYTES_PER_S * gap_s:
        return ""
    return f"it read or wrote {grown / 1e6:.0f} MB in {gap_s:.0f} s"


# ---- what it waits for --------------------------------------------------------------------------------


def _collective(frames: Sequence[Frame]) -> str:
    """The outermost function of torch.distributed: what was called, not what it is made of."""
    inside = [
        frame.name
        for frame in frames
        if frame.filename.endswith(_COLLECTIVE_FILES)
        or (frame.filename.endswith(_FUNCTIONAL_FILES) and in_device_sync(frame))
    ]
    return inside[-1] if inside else ""


def _groups(sample: _Sample) -> dict[str, _Group]:
    recorder = sample.flight_recorder
    return {group.group: group for group in recorder.groups} if recorder else {}


def _pending(samples: Sequence[_Sample]) -> bool | None:
    """Whether a collective of the first sample is still open in the last."""
    before, after = _groups(samples[0]), _groups(samples[-1])
    both = before.keys() & after.keys()
    if not both:
        return None
    return any(before[name].completed < before[name].enqueued > after[name].completed for name in both)
