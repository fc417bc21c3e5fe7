"""Where a rank stands, read from py-spy's JSON.

Ray Train runs the training function in a thread of its own (`TrainingThread`); the main thread is always
idle in Ray's event loop and says nothing.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

_LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages)/|/lib/python3[.\d]*/|^<")
_WRAPPER = re.compile(r"wrap(per|ped)|decorat|<lambda>", re.IGNORECASE)
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py",)
_COLLECTIVE_NATIVE = re.compile(r"\b(c10d::|nccl[A-Z]|ProcessGroup)")


class Frame(Struct, frozen=True):
    """One line of a stack."""

    name: str
    filename: str
    line: int = 0
    short_filename: str | None = None

    def __str__(self) -> str:
        return f"{(self.short_filename or self.filename)}:{self.line} {self.name}"


class Thread(Struct, frozen=True):
    """A thread as py-spy prints it, innermost frame first."""

    frames: tuple[Frame, ...]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


class Position(Struct, frozen=True, kw_only=True):
    """Where the training thread of a rank stands.

    Args:
        user: The innermost frame of the user's own code, None where there is none.
        inner: The innermost frame of all.
        via: The call that the user's frame is in, None where it is the innermost itself.
        in_collective: Whether the thread is inside a collective of torch.distributed.
    """

    thread: str
    user: Frame | None
    inner: Frame
    via: Frame | None
    in_collective: bool

    def __str__(self) -> str:
        if self.user is None:
            return str(self.inner)
        file = self.user.filename.rsplit("/", 1)[-1]
        inside = f", inside {self.via.name} ({self.via.short_filename})" if self.via else ""
        return f"{file}:{self.user.line} in {self.user.name}{inside}"


def read_threads(threads: Sequence[dict[str, Any]]) -> tuple[Thread, ...]:
    """Read what `py-spy dump --json` printed.

    Raises:
        ValueError: it is something else; the text has the path to what is wrong.
    """
    return msgspec.convert(list(threads), tuple[Thread, ...])


def training_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that runs the training function, else the one whose stack is deepest in user code."""
    named = [t for t in threads if (t.thread_name or "").startswith("TrainingThread") and t.frames]
    if named:
        return named[0]
    working = [t for t in threads if any(_is_user(frame) for frame in t.frames)]
    candidates = working or [t for t in threads if t.frames]
    return max(candidates, key=lambda t: len(t.frames), default=None)


def position(threads: Sequence[Thread]) -> Position | None:
    """Where the rank stands, None where no thread could be read."""
    thread = training_thread(threads)
    if thread is None:
        return None
    index = next((i for i, frame in enumerate(thread.frames) if _is_user(frame)), None)
    above = thread.frames[:index] if index is not None else ()
    return Position(
        thread=thread.thread_name or "",
        user=thread.frames[index] if index is not None else None,
        inner=thread.frames[0],
        via=_entry(above),
        in_collective=any(_in_collective(frame) for frame in thread.frames),
    )


def _entry(above: Sequence[Frame]) -> Frame | None:
    """The library call nearest to the user's frame that says something: wrappers of decorators do not."""
    telling = [frame for frame in above if not _WRAPPER.search(frame.name)]
    return telling[-1] if telling else None


def _is_user(frame: Frame) -> bool:
    return not _LIBRARY.search(frame.filename) and frame.filename.endswith(".py")


def _in_collective(frame: Frame) -> bool:
    return frame.filename.endswith(_COLLECTIVE_FILES) or bool(_COLLECTIVE_NATIVE.search(frame.name))
