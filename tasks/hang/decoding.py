"""How a record of a communicator is understood.

Each text is understood once: who the ranks are is the same at each poll, and most of them say the same.
Looking into all records of a report of 110 MB then takes less time than a JSON parser needs for it, and less
memory than its text.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from sys import intern

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_128, xxh3_128_digest

from tasks.hang import layout
from tasks.hang.communicator import (
    Communicator,
    Devices,
    Members,
    MissingRank,
    Process,
    Said,
    Status,
    Told,
    device_of,
)
from tasks.hang.counts import FUNCTIONS, Counts

# NCCL 2.28.7 to 2.28.9 leave out the comma between nvml_dev and status of each missing rank.
MISSING_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s+"status")')
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class _Place(Struct, forbid_unknown_fields=True, gc=False):
    rank: int
    host: str = "unknown"
    pid: int = -1
    cuda_dev: int = -1
    nvml_dev: int = -1


class _State(Struct, forbid_unknown_fields=True, gc=False):
    status: Raw = Raw(b"null")
    collective_counts: Raw = Raw(b"null")


class _Rank(Struct, gc=False):
    rank: int
    host: str = "unknown"
    pid: int = -1
    cuda_dev: int = -1
    nvml_dev: int = -1
    status: Raw = Raw(b"null")
    collective_counts: Raw = Raw(b"null")


class _Status(Struct):
    init_state: int | None = None
    async_error: int | None = None
    finalize_called: bool | None = None
    destroy_flag: bool | None = None
    abort_flag: bool | None = None


class _MissingStatus(Struct, gc=False):
    unresponsive: bool | None = None
    considered_dead: bool | None = None


class _Missing(Struct, gc=False):
    rank: int
    host: str = "unknown"
    pid: int = -1
    cuda_dev: int = -1
    nvml_dev: int = -1
    status: _MissingStatus | None = None


class _Body(Struct):
    ranks: list[_Rank] = []
    missing_ranks: list[_Missing] = []


_PLACES = msgspec.json.Decoder(list[_Place])
_STATE = msgspec.json.Decoder(_State)
_BODY = msgspec.json.Decoder(_Body)
_ABSENT = msgspec.json.Decoder(list[_Missing])
_STATUS = msgspec.json.Decoder(_Status | None)
_COUNTS = msgspec.json.Decoder(dict[str, int | None] | None)


Pool = dict[tuple[tuple[int, ...], tuple[tuple[bytes, int], ...]], Said]


def read(key: str, size: int, raw: bytes | Raw, start: int, end: int, *, pool: Pool) -> Communicator:
    """Understand a record.

    Args:
        key: Of the communicator.
        size: Ranks in the communicator.
        raw: The document that the record stands in.
        start: Offset of the record in it.
        end: Offset behind the record.
        pool: What communicators of the document say, by their texts.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: it is not what NCCL documents.
    """
    if isinstance(raw, bytes):
        try:
            laid_out = _read_by_layout(key, size, raw, start, end, pool=pool)
        except UNREADABLE:
            laid_out = None  # not as it looks; if it is no JSON either, that is found below
        if laid_out is not None:
            return laid_out
    body = _body(memoryview(raw)[start:end])
    members = _members_of(body.ranks)
    rows = _in_a_row([(_told(bytes(rank.status), bytes(rank.collective_counts)), 1) for rank in body.ranks])
    missing = tuple(map(_missing_rank, body.missing_ranks))
    return Communicator(
        key=key, size=size, members=members, said=Said(members.numbers, rows), missing=missing
    )


def _read_by_layout(
    key: str, size: int, raw: bytes, start: int, end: int, *, pool: Pool
) -> Communicator | None:
    found = layout.members(raw, start, end)
    absent = layout.missing(raw, found.end, end) if found else None
    if found is None or absent is None:
        return None
    members = _members(found.places)
    if members is None:
        return None
    said = pool.get((members.numbers, found.states))
    if said is None:
        rows = _in_a_row([(_told_in(text), times) for text, times in found.states])
        said = pool[members.numbers, found.states] = Said(members.numbers, rows)
    missing = tuple(map(_missing_rank, _ABSENT.decode(mend(absent) or absent))) if absent else ()
    return Communicator(key=key, size=size, members=members, said=said, missing=missing)


def _members(places: Sequence[tuple[bytes, int]]) -> Members | None:
    """Read texts that say who the ranks are; None where one of them is not of as many as it should be."""
    digest = xxh3_128_digest(places[0][0]) if len(places) == 1 else _digest(text for text, _ in places)
    members = known.members.get(digest)
    if members is None:
        told: list[Members] = []
        for text, number in places:
            read_places = _PLACES.decode(b"[" + text + b"]")
            if len(read_places) != number:
                return None
            told.append(_members_of(read_places))
        members = told[0] if len(told) == 1 else _together(told)
        known.add(digest, members)
    return members


def _digest(texts: Iterable[bytes]) -> bytes:
    digest = xxh3_128()
    for text in texts:
        digest.update(text)
    return digest.digest()


def _members_of(told: Sequence[_Place | _Rank]) -> Members:
    process, devices = known.process, known.devices
    return Members(
        tuple([one.rank for one in told]),
        tuple([process(one.host, one.pid, device_of(one.cuda_dev, one.nvml_dev)) for one in told]),
        tuple([devices.setdefault(both := (one.cuda_dev, one.nvml_dev), both) for one in told]),
    )


def _together(parts: Sequence[Members]) -> Members:
    return Members(
        tuple(chain.from_iterable([part.numbers for part in parts])),
        tuple(chain.from_iterable([part.of for part in parts])),
        tuple(chain.from_iterable([part.devices for part in parts])),
    )


def _in_a_row(told: Iterable[tuple[Told, int]]) -> tuple[tuple[Told, int], ...]:
    rows: list[tuple[Told, int]] = []
    for said, times in told:
        if rows and (rows[-1][0] is said or rows[-1][0] == said):
            rows[-1] = (rows[-1][0], rows[-1][1] + times)
        else:
            rows.append((said, times))
    return tuple(rows)


def _body(text: memoryview) -> _Body:
    try:
        return _BODY.decode(text)
    except UNREADABLE:
        mended = mend(bytes(text))
        if mended is None:
            raise
        return _BODY.decode(mended)


def mend(text: bytes) -> bytes | None:
    """The text with the commas that NCCL 2.28 forgets; None where none is missing."""
    mended, times = MISSING_COMMA.subn(rb"\1,\2", text)
    return mended if times else None


class Known:
    """Who the ranks of communicators are, by the digest of what reports say of them, and all processes: one
    value of each, for there are many.

    Args:
        most_ranks: Of all communicators together, before it starts anew.
    """

    def __init__(self, most_ranks: int) -> None:
        self.most_ranks = most_ranks
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.members: dict[bytes, Members] = {}
        self.processes: dict[Process, Process] = {}
        self.devices: dict[Devices, Devices] = {}
        self.ranks = 0

    def add(self, digest: bytes, members: Members) -> None:
        """Keep members that were read."""
        self.ranks += len(members.numbers)
        if self.ranks > self.most_ranks:
            self.forget()
            self.ranks = len(members.numbers)
        self.members[digest] = members

    def process(self, host: str, pid: int, device: int) -> Process:
        """The value of a process that a report tells of."""
        said = (host, pid, device)
        process = self.processes.get(said)
        if process is None:
            if len(self.processes) >= self.most_ranks:
                self.processes.clear()
                self.devices.clear()
            process = self.processes[said] = (intern(host), pid, device)
        return process


known = Known(most_ranks=1 << 20)


@lru_cache(maxsize=2048)
def _told_in(text: bytes) -> Told:
    state = _STATE.decode(b"{" + text[1:] + b"}")
    return _told(bytes(state.status), bytes(state.collective_counts))


@lru_cache(maxsize=2048)
def _told(status_text: bytes, counts_text: bytes) -> Told:
    status, async_error = _read_status(status_text)
    return Told(status, async_error, _read_counts(counts_text))


def _read_counts(text: bytes) -> Counts:
    named = _COUNTS.decode(text) or {}
    known = [(f, named[f] or 0) for f in FUNCTIONS if f in named]
    return (*known, *sorted((f, n or 0) for f, n in named.items() if f not in FUNCTIONS))


def _read_status(text: bytes) -> tuple[Status, int]:
    record = _STATUS.decode(text)
    if record is None:
        return "UNKNOWN", 0
    async_error = record.async_error or 0
    if record.abort_flag:
        return "ABORT", async_error
    if record.finalize_called or record.destroy_flag:
        return "FINALIZE", async_error
    if None in (record.abort_flag, record.finalize_called, record.destroy_flag, record.init_state):
        return "UNKNOWN", async_error
    return ("RUNNING" if record.init_state == 0 else "INIT"), async_error


def _missing_rank(record: _Missing) -> MissingRank:
    status = record.status or _MissingStatus()
    return MissingRank(
        rank=record.rank,
        host=intern(record.host),
        pid=record.pid,
        cuda_dev=record.cuda_dev,
        nvml_dev=record.nvml_dev,
        unresponsive=bool(status.unresponsive),
        considered_dead=bool(status.considered_dead),
    )
