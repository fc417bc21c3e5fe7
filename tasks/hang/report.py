"""One answer of NCCL's RAS server, as values.

A healthy report is read without looking into it: the document is split into communicator records, and a
record that did not change since the last poll has the same digest. Only a record that matters is decoded,
with `Record.decode`. What the counters mean: launches per collective function since the communicator was
made, not completions; the rank is the rank in that communicator.
"""

import re
from functools import cached_property
from typing import Literal

import msgspec
import xxhash
from msgspec import Raw, Struct

from tasks.hang.counts import FUNCTIONS, Counts
from tasks.hang.errors import RasMalformed, RasTruncated

# NCCL 2.28.7 to 2.28.9 leave out the comma between nvml_dev and status of each missing rank.
_MISSING_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s*\n\s*"status")')

Status = Literal["INIT", "RUNNING", "FINALIZE", "ABORT", "UNKNOWN"]


class RankState(Struct, frozen=True, kw_only=True):
    """A member of a communicator that answered."""

    rank: int
    host: str
    pid: int
    cuda_dev: int
    nvml_dev: int
    status: Status
    async_error: int
    counts: Counts


class MissingRank(Struct, frozen=True, kw_only=True):
    """A member that did not answer, or (`unresponsive` False) is no member any more or not yet."""

    rank: int
    host: str
    pid: int
    cuda_dev: int
    nvml_dev: int
    unresponsive: bool
    considered_dead: bool


class Communicator(Struct, frozen=True, kw_only=True, dict=True):
    """A decoded record. `key` is `hash/secondary_hash`, as NCCL prints them."""

    key: str
    size: int
    ranks: tuple[RankState, ...]
    missing: tuple[MissingRank, ...]

    @cached_property
    def counts(self) -> dict[int, Counts]:
        """Launches of each rank that answered."""
        return {rank.rank: rank.counts for rank in self.ranks}

    @cached_property
    def all_running(self) -> bool:
        """Whether every rank that answered is past its init and not shutting down.

        A status that NCCL did not say in full does not count against it: blind in one field is not blind
        in all.
        """
        return bool(self.ranks) and all(rank.status in ("RUNNING", "UNKNOWN") for rank in self.ranks)

    def member(self, rank: int) -> RankState | MissingRank | None:
        """The member with that communicator rank."""
        everyone: tuple[RankState | MissingRank, ...] = (*self.ranks, *self.missing)
        return next((member for member in everyone if member.rank == rank), None)


class Record(Struct, frozen=True, kw_only=True):
    """A communicator as received: enough to tell whether anything in it changed.

    `digest` covers the whole record: counts, states and missing ranks.
    """

    key: str
    size: int
    ranks_count: int
    missing_ranks_count: int
    digest: str
    raw: Raw

    def decode(self) -> Communicator:
        """Look inside.

        Raises:
            RasMalformed: a rank has no number, host or pid.
        """
        counts: dict[bytes, Counts] = {}
        states: dict[bytes, tuple[Status, int]] = {}
        try:
            body = _BODY.decode(self.raw)
            ranks = tuple(_rank_state(rank, counts, states) for rank in body.ranks)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RasMalformed(
                f"RAS report: communicator {self.key}: {error}.",
                "Keep the file and report it: this NCCL writes another schema.",
            ) from error
        missing = tuple(_missing_rank(rank) for rank in body.missing_ranks)
        return Communicator(key=self.key, size=self.size, ranks=ranks, missing=missing)


class RasReport(Struct, frozen=True, kw_only=True):
    """A report. `timestamp` is NCCL's local time without a zone: text, never compared.

    `timeouts_count` above 0 means that some missing ranks may be healthy. `dropped` counts records
    without an identity (hash 0x0: NCCL wrote them before the communicator was known).
    """

    nccl_version: str
    timestamp: str
    records: dict[str, Record]
    timeouts_count: int
    collection_time_s: float
    repaired: bool
    dropped: int


class _Head(Struct):
    hash: str
    secondary_hash: str = ""
    size: int = 0
    ranks_count: int = 0
    missing_ranks_count: int = 0


class _Ras(Struct):
    collection_time_sec: float = 0.0
    timeouts_count: int = 0


class _Document(Struct):
    communicators: list[Raw]
    nccl_version: str = "unknown"
    timestamp: str = ""
    ras: _Ras | None = None


class _RankRecord(Struct):
    rank: int
    host: str = "unknown"
    pid: int = -1
    cuda_dev: int = -1
    nvml_dev: int = -1
    status: Raw = Raw(b"null")
    collective_counts: Raw = Raw(b"null")


class _StatusRecord(Struct):
    init_state: int | None = None
    async_error: int | None = None
    finalize_called: bool | None = None
    destroy_flag: bool | None = None
    abort_flag: bool | None = None


class _MissingStatus(Struct):
    unresponsive: bool | None = None
    considered_dead: bool | None = None


class _MissingRecord(Struct):
    rank: int
    host: str = "unknown"
    pid: int = -1
    cuda_dev: int = -1
    nvml_dev: int = -1
    status: _MissingStatus | None = None


class _Body(Struct):
    ranks: list[_RankRecord] = []
    missing_ranks: list[_MissingRecord] = []


_DOCUMENT = msgspec.json.Decoder(_Document)
_HEAD = msgspec.json.Decoder(_Head)
_BODY = msgspec.json.Decoder(_Body)
_STATUS = msgspec.json.Decoder(_StatusRecord | None)
_COUNTS = msgspec.json.Decoder(dict[str, int | None] | None)


def parse_report(raw: bytes) -> RasReport:
    """Read a report as received.

    Args:
        raw: The bytes of NCCL's answer to STATUS in json, at most some hundred MB.

    Returns:
        The report, its records undecoded.

    Raises:
        RasTruncated: the document ends in the middle.
        RasMalformed: it is no JSON, or not the schema of NCCL 2.28.7 and later.
    """
    document, repaired = _document(raw)
    records: dict[str, Record] = {}
    dropped = 0
    for position, record in enumerate(document.communicators):
        head = _head(record, position)
        if head.size == 0 or not head.hash.strip("0x"):
            dropped += 1
            continue
        key = f"{head.hash}/{head.secondary_hash}"
        records[key] = Record(
            key=key,
            size=head.size,
            ranks_count=head.ranks_count,
            missing_ranks_count=head.missing_ranks_count,
            digest=xxhash.xxh3_128_hexdigest(memoryview(record)),
            raw=record,
        )
    ras = document.ras or _Ras()
    return RasReport(
        nccl_version=document.nccl_version,
        timestamp=document.timestamp,
        records=records,
        timeouts_count=ras.timeouts_count,
        collection_time_s=ras.collection_time_sec,
        repaired=repaired,
        dropped=dropped,
    )


def _document(raw: bytes) -> tuple[_Document, bool]:
    try:
        return _DOCUMENT.decode(raw), False
    except (msgspec.MsgspecError, UnicodeDecodeError) as strict:
        mended = _MISSING_COMMA.sub(rb"\1,\2", raw)
        if mended != raw:
            try:
                return _DOCUMENT.decode(mended), True
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise _refusal(mended, error) from error
        raise _refusal(raw, strict) from strict


def _refusal(raw: bytes, error: Exception) -> RasTruncated | RasMalformed:
    start = raw.lstrip()[:60].decode("utf-8", "replace")
    if start.startswith("{") and ("truncated" in str(error) or not raw.rstrip().endswith(b"}")):
        return RasTruncated(
            f"The RAS report ends after {len(raw)} bytes, in the middle of the document.",
            "The answering process died or closed the connection; the next poll asks again.",
        )
    return RasMalformed(
        f"The answer is not a RAS report in json: {error} (it starts with {start!r}).",
        "Check that the address is NCCL's RAS port and that NCCL is 2.28.7 or newer.",
    )


def _head(record: Raw, position: int) -> _Head:
    try:
        return _HEAD.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RasMalformed(
            f"RAS report: communicators[{position}]: {error}.",
            "Keep the file and report it: this NCCL writes another schema.",
        ) from error


def _rank_state(
    record: _RankRecord, counts: dict[bytes, Counts], states: dict[bytes, tuple[Status, int]]
) -> RankState:
    # Most ranks of a communicator share the same few texts, so each text is understood once.
    counts_text, status_text = bytes(record.collective_counts), bytes(record.status)
    if counts_text not in counts:
        counts[counts_text] = _read_counts(counts_text)
    if status_text not in states:
        states[status_text] = _read_status(status_text)
    status, async_error = states[status_text]
    return RankState(
        rank=record.rank,
        host=record.host,
        pid=record.pid,
        cuda_dev=record.cuda_dev,
        nvml_dev=record.nvml_dev,
        status=status,
        async_error=async_error,
        counts=counts[counts_text],
    )


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


def _missing_rank(record: _MissingRecord) -> MissingRank:
    status = record.status or _MissingStatus()
    return MissingRank(
        rank=record.rank,
        host=record.host,
        pid=record.pid,
        cuda_dev=record.cuda_dev,
        nvml_dev=record.nvml_dev,
        unresponsive=bool(status.unresponsive),
        considered_dead=bool(status.considered_dead),
    )
