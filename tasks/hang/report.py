"""One answer of NCCL's RAS server, as values.

A healthy report is read without looking into it: the document is split into communicator records by its
layout (`layout`; msgspec splits what is laid out otherwise), and a record that did not change since the last
poll has the same digest. Only a record that matters is decoded, with `Record.decode`; so damage inside of one
is noticed there, and not before. What the counters mean: launches per collective function since the
communicator was made, not completions; the rank is the rank in that communicator.
"""

from functools import cached_property, lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_128_hexdigest

from tasks.hang import decoding, layout
from tasks.hang.communicator import Communicator, MissingRank, RankState, Status
from tasks.hang.decoding import MISSING_COMMA, UNREADABLE
from tasks.hang.errors import RasMalformed, RasTruncated

__all__ = ["Communicator", "MissingRank", "RankState", "RasReport", "Record", "Status", "parse_report"]


class _Source:
    """What records stand in: the document in NCCL's layout, or of any other layout the record alone.

    Args:
        ranks_count: Ranks that answered, in all of its records.
    """

    def __init__(self, raw: bytes | Raw, ranks_count: int) -> None:
        self.raw = raw
        self.ranks_count = ranks_count
        self.said: decoding.Pool = {}

    @cached_property
    def runs(self) -> bool:
        """Whether all ranks say that they run: one pass for many small communicators."""
        return isinstance(self.raw, bytes) and self.running(0, len(self.raw)) == self.ranks_count

    def running(self, start: int, end: int) -> int:
        """How many ranks in a part of it say that they run; 0 where that cannot be told."""
        return layout.running(self.raw, start, end) if isinstance(self.raw, bytes) else 0


class Record(Struct, frozen=True, gc=False):
    """A communicator as received: enough to tell whether anything in it changed.

    It holds on to the document that it stands in, and copies nothing of it.

    Args:
        digest: Of the whole record: counts, states and missing ranks.
        source: What it stands in.
        start: Its offset there.
        end: The offset behind it.
    """

    key: str
    size: int
    ranks_count: int
    missing_ranks_count: int
    digest: str
    source: _Source
    start: int
    end: int

    @property
    def exact(self) -> bool:
        """Whether it was found by its layout."""
        return isinstance(self.source.raw, bytes)

    @property
    def plain(self) -> bool:
        """Whether as many ranks as the communicator has say that they run and have no error, and nobody is
        missing. It costs a pass over the bytes of the report, once, and is told without decoding.

        False is no statement: look inside.
        """
        if self.missing_ranks_count or not self.size == self.ranks_count > 0:
            return False
        source = self.source
        return source.runs or source.running(self.start, self.end) == self.size

    def decode(self) -> Communicator:
        """Look inside.

        Raises:
            RasMalformed: it is no JSON, a rank has no number, or a value is of another type than NCCL's.
        """
        try:
            return decoding.read(
                self.key, self.size, self.source.raw, self.start, self.end, pool=self.source.said
            )
        except UNREADABLE as error:
            raise RasMalformed(
                f"RAS report: communicator {self.key}: {error}.",
                "Keep the file and report it: this NCCL writes another schema.",
            ) from error


class RasReport(Struct, frozen=True, kw_only=True):
    """A report. `timestamp` is NCCL's local time without a zone: text, never compared.

    `timeouts_count` above 0 means that some missing ranks may be healthy. `dropped` counts records
    without an identity (hash 0x0: NCCL wrote them before the communicator was known), and those of a
    communicator that is there twice: the one with more ranks is kept.
    """

    nccl_version: str
    timestamp: str
    records: dict[str, Record]
    timeouts_count: int
    collection_time_s: float
    repaired: bool
    dropped: int

    @property
    def entries(self) -> int:
        """Rank entries: what a report costs the process that answers grows with their square."""
        return sum([record.ranks_count + record.missing_ranks_count for record in self.records.values()])


class _Head(Struct, gc=False):
    hash: str
    secondary_hash: str = ""
    size: int = 0
    ranks_count: int = 0
    missing_ranks_count: int = 0


class _FullHead(Struct, gc=False):
    """A head in NCCL's layout: nothing of it stands behind the ranks."""

    hash: str
    secondary_hash: str
    size: int
    ranks_count: int
    missing_ranks_count: int


class _Ras(Struct):
    collection_time_sec: float = 0.0
    timeouts_count: int = 0


class _Any(Struct, gc=False):
    """Some object: nothing of it is kept."""


class _Outline(Struct):
    """Told before a document is taken apart: what is no list of objects, or one of very many, takes 20 times
    its size.
    """

    communicators: Annotated[list[_Any], Meta(max_length=1 << 18)]


class _Document(Struct):
    communicators: list[Raw]
    nccl_version: str = "unknown"
    timestamp: str = ""
    communicators_count: int = -1
    ras: _Ras | None = None


_OUTLINE = msgspec.json.Decoder(_Outline)
_DOCUMENT = msgspec.json.Decoder(_Document)
_HEAD = msgspec.json.Decoder(_Head)
_FULL_HEAD = msgspec.json.Decoder(_FullHead)


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
    document, records, repaired = _split(raw) or _decoded(raw)
    kept: dict[str, Record] = {}
    dropped = 0
    for record in records:
        known = kept.get(record.key)
        if record.key and known is None:
            kept[record.key] = record
            continue
        dropped += 1
        if known is not None and record.ranks_count > known.ranks_count:
            kept[record.key] = record
    ras = document.ras or _Ras()
    return RasReport(
        nccl_version=document.nccl_version,
        timestamp=document.timestamp,
        records=kept,
        timeouts_count=ras.timeouts_count,
        collection_time_s=ras.collection_time_sec,
        repaired=repaired,
        dropped=dropped,
    )


def _split(raw: bytes) -> tuple[_Document, list[Record], bool] | None:
    """Split a document in NCCL's layout; None where it is in another, or does not add up."""
    place = layout.around(raw)
    if place is None:
        return None
    start, last = place
    try:
        document = _DOCUMENT.decode(raw[:start] + raw[last:])
        found = layout.records(raw, start, last, _full_head)
    except UNREADABLE:
        return None
    if found is None or len(found) != document.communicators_count:
        return None
    source, view = _Source(raw, sum(head.ranks_count for head, _, _ in found)), memoryview(raw)
    records = []
    for head, start, end in found:
        head.length_bytes = end - start
        counts = (head.size, head.ranks_count, head.missing_ranks_count)
        records.append(Record(head.key, *counts, xxh3_128_hexdigest(view[start:end]), source, start, end))
    return (
        document,
        records,
        any(r.missing_ranks_count and _lacks_commas(raw, r.start, r.end) for r in records),
    )


# The head of a communicator is the same at each poll.
@lru_cache(maxsize=1 << 13)
def _full_head(text: bytes) -> layout.Head:
    head = _FULL_HEAD.decode(text + b'"ranks":0}')
    if head.ranks_count < 0:
        raise ValueError("fewer ranks than none")
    return layout.Head(_key(head), head.size, head.ranks_count, head.missing_ranks_count)


def _key(head: _Head | _FullHead) -> str:
    """The name of a communicator, empty where it has none."""
    return f"{head.hash}/{head.secondary_hash}" if head.size and head.hash.strip("0x") else ""


def _lacks_commas(raw: bytes, start: int, end: int) -> bool:
    return MISSING_COMMA.search(raw, layout.missing_start(raw, start, end), end) is not None


def _decoded(raw: bytes) -> tuple[_Document, list[Record], bool]:
    """Split any other document: all of it is read as JSON."""
    document, repaired = _document(raw)
    records = []
    for position, text in enumerate(document.communicators):
        head, view = _head(text, position), memoryview(text)
        counts = (head.size, head.ranks_count, head.missing_ranks_count)
        digest = xxh3_128_hexdigest(view)
        records.append(Record(_key(head), *counts, digest, _Source(text, head.ranks_count), 0, len(view)))
    return document, records, repaired


def _document(raw: bytes) -> tuple[_Document, bool]:
    try:
        _OUTLINE.decode(raw)
        return _DOCUMENT.decode(raw), False
    except UNREADABLE as strict:
        mended = decoding.mend(raw)
        if mended is None:
            raise _refusal(raw, strict) from strict
    try:
        _OUTLINE.decode(mended)
        return _DOCUMENT.decode(mended), True
    except UNREADABLE as error:
        raise _refusal(mended, error) from error


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
    except UNREADABLE as error:
        raise RasMalformed(
            f"RAS report: communicators[{position}]: {error}.",
            "Keep the file and report it: this NCCL writes another schema.",
        ) from error
