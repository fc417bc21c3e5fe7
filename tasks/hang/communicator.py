"""A communicator, as one record of a report tells of it.

The same process is a rank of many communicators, and most ranks of one say the same: so what is known of
them is shared.
"""

from functools import cached_property
from itertools import chain, repeat
from typing import Any, Literal

from msgspec import Struct

from tasks.hang.counts import Counts

Status = Literal["INIT", "RUNNING", "FINALIZE", "ABORT", "UNKNOWN"]
Process = tuple[str, int, int]  # host as RAS prints it, pid, number of the device
Devices = tuple[int, int]


class RankState(Struct, frozen=True, kw_only=True, gc=False):
    """A member of a communicator that answered."""

    rank: int
    host: str
    pid: int
    cuda_dev: int
    nvml_dev: int
    status: Status
    async_error: int
    counts: Counts


class MissingRank(Struct, frozen=True, kw_only=True, gc=False):
    """A member that did not answer, or (`unresponsive` False) is no member any more or not yet."""

    rank: int
    host: str
    pid: int
    cuda_dev: int
    nvml_dev: int
    unresponsive: bool
    considered_dead: bool


class Told(Struct, frozen=True, gc=False):
    """What a rank says of itself."""

    status: Status
    async_error: int
    counts: Counts


class Members(Struct, frozen=True, dict=True):
    """Who the ranks of a communicator are that answered: mostly the same at each poll.

    Args:
        numbers: The ranks, in NCCL's order.
        of: The process of each; communicators share the values.
        devices: CUDA's and NVML's number of the device of each.
    """

    numbers: tuple[int, ...]
    of: tuple[Process, ...]
    devices: tuple[Devices, ...]

    @cached_property
    def processes(self) -> dict[int, Process]:
        """Which process is which rank."""
        return dict(zip(self.numbers, self.of, strict=True))


class Said(Struct, frozen=True, dict=True):
    """What the ranks of a communicator say. Groups of a job that do the same say the same, and share it.

    Args:
        numbers: The ranks that answered, in NCCL's order.
        rows: What they say, and how many ranks in a row say it.
    """

    numbers: tuple[int, ...]
    rows: tuple[tuple[Told, int], ...]

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What others concluded from it."""
        return {}

    @cached_property
    def each(self) -> list[Told]:
        """By rank, in NCCL's order."""
        return list(chain.from_iterable([repeat(said, times) for said, times in self.rows]))

    @cached_property
    def counts(self) -> dict[int, Counts]:
        """Launches of each rank; ranks that launched the same share the value."""
        rows = [repeat(said.counts, times) for said, times in self.rows]
        return dict(zip(self.numbers, chain.from_iterable(rows), strict=True))

    @cached_property
    def groups(self) -> tuple[tuple[Told, tuple[int, ...]], ...]:
        """The ranks that say the same, by what they say, in the order of the first of each."""
        found: dict[int, tuple[Told, list[int]]] = {}  # by identity: values that are read are shared
        at = 0
        for said, times in self.rows:
            numbers = self.numbers[at : at + times]
            known = found.get(id(said))
            if known is None:
                found[id(said)] = said, list(numbers)
            else:
                known[1].extend(numbers)
            at += times
        return tuple([(said, tuple(numbers)) for said, numbers in found.values()])


class Communicator(Struct, frozen=True, kw_only=True):
    """A decoded record. What is kept of its ranks is shared among communicators; the rest is made when it is
    asked for.

    Args:
        key: `hash/secondary_hash`, as NCCL prints them.
    """

    key: str
    size: int
    members: Members
    said: Said
    missing: tuple[MissingRank, ...]

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """The members that answered."""
        members = self.members
        return tuple(
            RankState(
                rank=number,
                host=process[0],
                pid=process[1],
                cuda_dev=devices[0],
                nvml_dev=devices[1],
                status=said.status,
                async_error=said.async_error,
                counts=said.counts,
            )
            for number, process, devices, said in zip(
                members.numbers, members.of, members.devices, self.said.each, strict=True
            )
        )

    @property
    def counts(self) -> dict[int, Counts]:
        """Launches of each rank that answered; ranks and communicators share the values."""
        return self.said.counts

    @property
    def processes(self) -> dict[int, Process]:
        """Which process is which rank, missing ones too; communicators share the values."""
        if not self.missing:
            return self.members.processes
        absent = {
            one.rank: (one.host, one.pid, device_of(one.cuda_dev, one.nvml_dev)) for one in self.missing
        }
        return {**self.members.processes, **absent}

    @property
    def all_running(self) -> bool:
        """Whether every rank that answered is past its init and not shutting down.

        A status that NCCL did not say in full does not count against it: blind in one field is not blind
        in all.
        """
        rows = self.said.rows
        return bool(rows) and all(said.status in ("RUNNING", "UNKNOWN") for said, _ in rows)

    def member(self, rank: int) -> RankState | MissingRank | None:
        """The member with that communicator rank."""
        everyone: tuple[RankState | MissingRank, ...] = (*self.ranks, *self.missing)
        return next((member for member in everyone if member.rank == rank), None)


def device_of(cuda_dev: int, nvml_dev: int) -> int:
    """The number that tells the devices of a node apart: NVML's, where a report has it."""
    return nvml_dev if nvml_dev >= 0 else cuda_dev
