"""Where things stand in a report, told from the layout in which NCCL writes it.

A report of a large job has 15 to 110 MB, of which a healthy poll needs a few bytes for each communicator.
NCCL prints with fixed indentation, and JSON allows no newline inside a string, so the line that starts a
communicator or a rank is recognised without reading what stands before it. Where the lines are not exactly
NCCL's the answer is None, and the caller reads the long way. Nothing here tells what is valid: the pieces are
JSON for the caller to decode, and together they are all of the document.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_OPENING = b'\n  "communicators": ['
_CLOSING = b"\n    }\n  ],\n"
_RECORD = b'\n    {\n      "hash": "'
_NEXT_RECORD = b'\n    },\n    {\n      "hash": "'
_INDENT = len(b"\n    ")
_END = b"\n    }"
_RANKS = b'\n      "ranks": ['
_FIRST_RANK = b'\n        {\n          "rank": '
_NEXT_RANK = b'\n        },\n        {\n          "rank": '
_RANK_END = b"\n        }"
_RANKS_END = b'\n        }\n      ],\n      "missing_ranks": ['
_NOBODY = b"[\n\n      ]\n    }"
_STATUS = b',\n          "status": {'
# It begins and ends where the search for it is fastest, of all places that say the same.
_RUNNING = b"""us": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false"""

# Before the first communicator, after the last, and before the ranks of one: a few hundred bytes.
_EDGE_BYTES = 4096
_RANK_BYTES = 400  # less than any rank that answered takes
_PLACES_TOGETHER = 512  # of a world of many thousands the texts of all would be as large as what is kept
_PLACE_BYTES = 1024  # a rank up to its status takes about 130


class Members(NamedTuple):
    """The ranks of a communicator that answered, in pieces of its text.

    Args:
        places: What stands between `"rank": ` and the status of each rank: its number, host, pid and devices;
            of up to 512 ranks together as the inside of a JSON list, and of how many.
        states: From the comma before the status to the end, and of how many ranks in a row; the next row may
            say the same.
        end: The offset of the bracket that opens the missing ranks.
    """

    places: list[tuple[bytes, int]]
    states: tuple[tuple[bytes, int], ...]
    end: int


def around(raw: bytes) -> tuple[int, int] | None:
    """Find the list of communicators.

    Returns:
        Offset of the first one, and behind the last one; None where there are none, or the layout is not
        NCCL's.
    """
    opening = raw.find(_OPENING, 0, _EDGE_BYTES)
    closing = raw.rfind(_CLOSING, max(0, len(raw) - _EDGE_BYTES))
    first, last = opening + len(_OPENING), closing + len(_END)
    if opening < 0 or closing < first or not raw.startswith(_RECORD, first):
        return None
    return first + _INDENT, last


class Head:
    """What a communicator says of itself before its ranks.

    Args:
        length_bytes: Of its record in the last report that added up, 0 at first. Mostly it is so long again.
    """

    __slots__ = ("key", "length_bytes", "missing_ranks_count", "ranks_count", "size")

    def __init__(self, key: str, size: int, ranks_count: int, missing_ranks_count: int) -> None:
        self.key = key
        self.size = size
        self.ranks_count = ranks_count
        self.missing_ranks_count = missing_ranks_count
        self.length_bytes = 0


def records(
    raw: bytes, start: int, last: int, read_head: Callable[[bytes], Head]
) -> list[tuple[Head, int, int]] | None:
    """Tell the communicators from each other; None where one has no ranks.

    Most of one is skipped: as much as it took the last time, if the next one begins there, else what its
    ranks take at least. Where that is too much, it is taken together with the next one; then there are fewer
    of them than the document says.

    Args:
        raw: The document.
        start: Offset of the first one.
        last: Offset behind the last one.
        read_head: Understands the text from the opening brace to the line that opens the ranks.

    Returns:
        What each says of itself, its offset, and the offset behind it.
    """
    found: list[tuple[Head, int, int]] = []
    find, startswith = raw.find, raw.startswith
    while start < last:
        ranks = find(_RANKS, start, start + _EDGE_BYTES)
        if not 0 <= ranks < last:
            return None
        head = read_head(raw[start:ranks])
        end = start + head.length_bytes
        if not (ranks < end < last and startswith(_NEXT_RECORD, end - len(_END))):
            following = find(_NEXT_RECORD, ranks + head.ranks_count * _RANK_BYTES, last)
            end = following + len(_END) if following >= 0 else last
        found.append((head, start, end))
        start = end + 1 + _INDENT
    return found


def running(raw: bytes, start: int, end: int) -> int:
    """How many ranks in a part of the document say that they run and have no error."""
    return raw.count(_RUNNING, start, end)


def members(raw: bytes, start: int, end: int) -> Members | None:
    """Take the ranks of a communicator apart; None where they are laid out otherwise.

    A rank mostly takes as many bytes as the one before it, and says the same behind its place: so that is
    tried first, and looked for only where it is not so.
    """
    at = raw.find(_RANKS, start, end) + len(_RANKS)
    if at < start + len(_RANKS) or not raw.startswith(_FIRST_RANK, at, end):
        return None
    at += len(_FIRST_RANK)
    places: list[bytes] = []
    joined: list[tuple[bytes, int]] = []
    states: list[tuple[bytes, int]] = []
    same, other, in_a_row = _NEXT_RANK, _NEXT_RANK, 0
    length_bytes = 0
    startswith, add = raw.startswith, places.append
    while True:
        status = at + length_bytes
        if not startswith(same, status):
            status = raw.find(_STATUS, at, at + _PLACE_BYTES)
            if status < 0:
                return None
            length_bytes = status - at
            if not startswith(same, status):
                states.append((same[: -len(_NEXT_RANK)], in_a_row))
                # Between one rank that says something else and the next, the others say as before.
                same, other, in_a_row = other, same, 0
                if not startswith(same, status):
                    stop = _state_end(raw, status, end, len(other) - len(_NEXT_RANK))
                    same = raw[status:stop] + _NEXT_RANK
                    if startswith(_RANKS_END, stop):
                        add(raw[at:status])
                        states.append((raw[status:stop], 1))
                        joined.append(_joined(places))
                        return Members(joined, tuple(states[1:]), stop + len(_RANKS_END) - 1)
                    if not startswith(_NEXT_RANK, stop):
                        return None
        add(raw[at:status])
        in_a_row += 1
        at = status + len(same)
        if len(places) == _PLACES_TOGETHER:
            joined.append(_joined(places))
            places.clear()


def _joined(places: Sequence[bytes]) -> tuple[bytes, int]:
    return b'{"rank":' + b'},{"rank":'.join(places) + b"}", len(places)


def _state_end(raw: bytes, status: int, end: int, length_bytes: int) -> int:
    """Where a rank ends, whose status begins at an offset: mostly it is as long as the one before it."""
    stop = status + length_bytes
    return stop if raw.startswith(_RANKS_END, stop) else max(status, raw.find(_RANK_END, status, end))


def missing(raw: bytes, start: int, end: int) -> bytes | None:
    """The missing ranks of a communicator as a list, empty where there are none; None where something stands
    behind them.

    Args:
        raw: The document.
        start: Offset of the bracket that opens them.
        end: Offset behind the communicator.
    """
    if raw[start:end] == _NOBODY:
        return b""
    return raw[start : end - len(_END)] if raw.endswith(_END, start, end) else None


def missing_start(raw: bytes, start: int, end: int) -> int:
    """The offset in a communicator at which its missing ranks begin; its start where that is not found."""
    return max(start, raw.rfind(_RANKS_END, start, end))
