"""One file of the RAS history: the records of a report that are new, and where the others are.

A frozen job says the same at each poll, and a report has 15 to 110 MB at 4,096 ranks: each record is kept
once. A document is cut where NCCL starts a communicator; this is only a guess at what will come again, and
any bytes, cut anywhere, are given back as they were.

Layout: magic, length and digest of the header, header (msgpack), one zstd frame, with a checksum, of the
pieces that this file holds.
A file refers to others of its own folder by name, and only to pieces that these hold themselves.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard
from msgspec import Struct
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

POLL = ".poll"
DATA = ".data"

_MAGIC = b"RWRING1\n"
_START = struct.Struct("<IQ")  # length and digest of the header
_RECORD = b'\n      "hash": "0x'
_RARE = _RECORD[-1:]
_RARE_TRIES = 16
_TAIL = b'\n  "ras": '
_TAIL_BYTES = 4096
_PIECE_MIN_BYTES = 256
_CHUNK_BYTES = 1 << 20
# Level 1 is the smallest here, not only the fastest: reports are long repeats, which higher levels cut up.
_LEVEL = 1
_MATCH_MIN_BYTES = 5
# The window is what zstd copies in memory: a third of the report at most, and long enough to reach back over
# a communicator of 4,096 ranks (2.2 MB), which makes the difference between 1/65 and 1/90.
_WINDOW_PART = 3
_WINDOW_LOG_MIN, _WINDOW_LOG_MAX = 17, 23

# What reading a damaged file can end in.
DAMAGE = (OSError, ValueError, msgspec.MsgspecError, zstandard.ZstdError)


class Header(Struct, frozen=True, array_like=True):
    """What a file says of itself.

    Args:
        sources: Files (without suffix) that hold the document's pieces; this one may be among them.
        runs: The document in order: (index in `sources`, offset in what that file holds, length), in bytes.
        pieces: Lengths of the pieces that this file holds, in bytes.
    """

    sources: tuple[str, ...]
    runs: tuple[tuple[int, int, int], ...]
    pieces: tuple[int, ...]


class Known(Struct, frozen=True):
    """The pieces that the files of one folder hold: digest -> (file, offset in what it holds)."""

    places: dict[bytes, tuple[str, int]]
    files: set[str]

    def learn(self, folder: Path, name: str) -> None:
        """Take in a file that another process wrote, and those that it refers to.

        Raises:
            OSError, ValueError, MsgspecError, ZstdError: one of them is damaged or gone.
        """
        if name in self.files:
            return
        with _open(folder, name) as file:
            sources = _read_header(file).sources
        for source in {name, *sources} - self.files:
            with _open(folder, source) as file:
                self.places.update(_held_places(source, file))
            self.files.add(source)


class Draft(Struct, frozen=True):
    """A file to be written, and the pieces that are new in it."""

    header: Header
    held: tuple[memoryview, ...]
    places: dict[bytes, tuple[str, int]]

    def write(self, path: Path) -> None:
        """Write the file, a chunk at a time: there is never a second copy of the document in memory.

        Raises:
            OSError: it cannot be written; what there is of it is left.
        """
        head = msgspec.msgpack.encode(self.header)
        size = sum(self.header.pieces)
        with path.open("wb") as file:
            file.write(_MAGIC + _START.pack(len(head), xxh3_64_intdigest(head)) + head)
            frame = _compressor(size).compressobj(size=size)
            for piece in self.held:
                for start in range(0, len(piece), _CHUNK_BYTES):
                    file.write(frame.compress(piece[start : start + _CHUNK_BYTES]))
            file.write(frame.flush())


def draft(name: str, raw: bytes, known: Known) -> Draft:
    """Decide what of a document has to be kept in a file of this name."""
    view = memoryview(raw)
    sources: dict[str, int] = {}
    runs: list[tuple[int, int, int]] = []
    held: list[memoryview] = []
    places: dict[bytes, tuple[str, int]] = {}
    held_bytes = 0
    for start, end in cut(raw):
        piece = view[start:end]
        digest = xxh3_128_digest(piece)
        place = known.places.get(digest) or places.get(digest)
        if place is None:
            place = places[digest] = (name, held_bytes)
            held.append(piece)
            held_bytes += len(piece)
        source, offset = sources.setdefault(place[0], len(sources)), place[1]
        if runs and runs[-1][0] == source and runs[-1][1] + runs[-1][2] == offset:
            runs[-1] = (source, runs[-1][1], runs[-1][2] + len(piece))
        else:
            runs.append((source, offset, len(piece)))
    pieces = tuple(len(piece) for piece in held)
    return Draft(Header(tuple(sources), tuple(runs), pieces), tuple(held), places)


def cut(raw: bytes) -> Iterator[tuple[int, int]]:
    """Where to cut a document, as (start, end): what comes before the communicators, each of them (very
    small ones with the next), and what comes after. The pieces are the document, whatever its bytes are.

    The first and the last piece hold the time and differ in every poll.
    """
    tail = raw.rfind(_TAIL, max(0, len(raw) - _TAIL_BYTES))
    end = tail if tail != -1 else len(raw)
    start = 0
    following = _next_record(raw, 0, end)
    while following != -1:
        if following > start:
            yield start, following
        start = following
        following = _next_record(raw, start + _PIECE_MIN_BYTES, end)
    if start < end:
        yield start, end
    if end < len(raw):
        yield end, len(raw)


def _next_record(raw: bytes, start: int, end: int) -> int:
    """What `raw.find(_RECORD, start, end)` returns, in a seventh of the time: a search for one byte is by far
    the fastest, and the last one of a record's start is rare in a report, three for each communicator.
    """
    before = len(_RECORD) - 1
    rare = start + before
    for _ in range(_RARE_TRIES):
        rare = raw.find(_RARE, rare, end)
        if rare == -1 or raw.startswith(_RECORD, rare - before):
            return max(-1, rare - before)
        rare += 1
    return raw.find(_RECORD, rare, end)


def sources_of(folder: Path, name: str) -> tuple[str, ...]:
    """The files that a file refers to.

    Raises:
        OSError, ValueError, MsgspecError: it is damaged or gone.
    """
    with _open(folder, name) as file:
        return _read_header(file).sources


def is_there(folder: Path, name: str) -> bool:
    """Whether what a file holds can still be read."""
    return _path(folder, name).exists()


def read(folder: Path, name: str) -> bytes:
    """The document that a file stands for.

    Raises:
        OSError, ValueError, MsgspecError, ZstdError: the file or one that it refers to is
            damaged or gone; a note on it is the path of that file.
    """
    at = name
    try:
        with _open(folder, name) as file:
            header = _read_header(file)
        parts = [b""] * len(header.runs)
        for index, source in enumerate(header.sources):  # one at a time: each may be as large as the report
            at = source
            held = _read_held(folder, source)
            for part, (run_source, offset, length) in enumerate(header.runs):
                if run_source == index:
                    parts[part] = held[offset : offset + length]
            del held
    except DAMAGE as error:
        error.add_note(str(_path(folder, at)))
        raise
    return b"".join(parts)


def _path(folder: Path, name: str) -> Path:
    path = folder / f"{name}{POLL}"
    return path if path.exists() else path.with_suffix(DATA)


def _open(folder: Path, name: str) -> BinaryIO:
    """Open a file under either of its names; the evictor only ever goes from the first to the second."""
    try:
        return (folder / f"{name}{POLL}").open("rb")
    except FileNotFoundError:
        return (folder / f"{name}{DATA}").open("rb")


def _read_header(file: BinaryIO) -> Header:
    start = file.read(len(_MAGIC) + _START.size)
    if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + _START.size:
        raise ValueError("it is no file of a RAS history")
    length, digest = _START.unpack_from(start, len(_MAGIC))
    head = file.read(min(length, os.fstat(file.fileno()).st_size))
    if xxh3_64_intdigest(head) != digest:
        raise ValueError("its header is damaged")
    return msgspec.msgpack.decode(head, type=Header)


def _read_held(folder: Path, name: str) -> bytes:
    with _open(folder, name) as file:
        size = sum(_read_header(file).pieces)
        frame = file.read()
    # The frame says its own size, and the decompressor would allocate what it says.
    if zstandard.frame_content_size(frame) != size:
        raise ValueError("it is damaged")
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def _held_places(name: str, file: BinaryIO) -> dict[bytes, tuple[str, int]]:
    """Digest what a file holds, a chunk at a time: it may be as large as a report."""
    places: dict[bytes, tuple[str, int]] = {}
    header, offset = _read_header(file), 0
    with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as stream:
        for length in header.pieces:
            digest, left = xxh3_128(), length
            while left:
                chunk = stream.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise ValueError("it is damaged")
                digest.update(chunk)
                left -= len(chunk)
            places[digest.digest()] = (name, offset)
            offset += length
        if stream.read(1):  # at the end of the frame its checksum is looked at
            raise ValueError("it is damaged")
    return places


def _compressor(size_bytes: int) -> zstandard.ZstdCompressor:
    window_log = (size_bytes // _WINDOW_PART).bit_length() - 1
    window_log = min(max(window_log, _WINDOW_LOG_MIN), _WINDOW_LOG_MAX)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, source_size=size_bytes, window_log=window_log, min_match=_MATCH_MIN_BYTES, write_checksum=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)
