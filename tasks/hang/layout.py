"""Where things stand in a report, told from the layout in which NCCL writes it.

A report of a large job has 15 to 110 MB, of which a healthy poll needs a few bytes for each communicator.
NCCL prints with fixed indentation, and JSON allows no newline inside a string, so the line that starts a
communicator or a rank is recognised without reading what stands before it. Where the lines are not exactly
NCCL's the answer is None, and the caller reads the long way. Nothing here tells what is valid: the pieces are
JSON for the caller to decode, and together they are all of the document.
"""

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
_PLACE_BYTES = 1024  # a rank up to its status takes about 130
_NUMBER_BYTES = 12


class Members(NamedTuple):
    """The ranks of a communicator that answered, in pieces of its text.

    Args:
        numbers: What stands behind `"rank": `, of each rank.
        places: What stands between that and its status, from the comma on: host, pid and devices.
        states: From the comma before the status to the end, and of how many ranks in a row.
        end: The offset of the bracket that opens the missing ranks.
    """

    numbers: list[bytes]
    places: list[bytes]
    states: list[tuple[bytes, int]]
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


def head_end(raw: bytes, start: int, last: int) -> int:
    """The offset in a communicator at which its ranks begin; -1 where they do not."""
    return raw.find(_RANKS, start, min(last, start + _EDGE_BYTES))


def record_end(raw: bytes, start: int, last: int, ranks_count: int) -> int:
    """The offset behind a communicator.

    What its ranks take at least is skipped. One that names more ranks than it has is thus taken together with
    the next one; then there are fewer communicators than the document says.
    """
    found = raw.find(_NEXT_RECORD, start + ranks_count * _RANK_BYTES, last)
    return found + len(_END) if found >= 0 else last


def next_record(end: int) -> int:
    """The offset of the communicator behind the one that ends there."""
    return end + len(b",") + _INDENT


def running(raw: bytes, start: int, end: int) -> int:
    """How many ranks of a communicator say that they run and have no error."""
    return raw.count(_RUNNING, start, end)


def members(raw: bytes, start: int, end: int) -> Members | None:
    """Take the ranks of a communicator apart; None where they are laid out otherwise.

    Most ranks say the same behind their status, so that is compared with what the one before said, and only
    looked for where it differs.
    """
    at = raw.find(_RANKS, start, end) + len(_RANKS)
    if at < start + len(_RANKS) or not raw.startswith(_FIRST_RANK, at, end):
        return None
    at += len(_FIRST_RANK)
    found = Members([], [], [], 0)
    numbers, places = found.numbers.append, found.places.append
    find, startswith = raw.find, raw.startswith
    state, same, in_a_row = b"", _RANK_END, 0
    while True:
        comma = find(b",", at, at + _NUMBER_BYTES)
        status = find(_STATUS, comma, at + _PLACE_BYTES)
        if comma < 0 or status < 0:
            return None
        numbers(raw[at:comma])
        places(raw[comma:status])
        if startswith(same, status):
            in_a_row += 1
            at = status + len(same)
            continue
        stop = find(_RANK_END, status, end)
        if stop < 0:
            return None
        if raw[status:stop] != state:
            if in_a_row:
                found.states.append((state, in_a_row))
            state, in_a_row = raw[status:stop], 0
            same = state + _NEXT_RANK
        in_a_row += 1
        if startswith(_NEXT_RANK, stop):
            at = stop + len(_NEXT_RANK)
        elif startswith(_RANKS_END, stop):
            found.states.append((state, in_a_row))
            return found._replace(end=stop + len(_RANKS_END) - 1)
        else:
            return None


def rest(raw: bytes, start: int, end: int) -> bytes | None:
    """The missing ranks of a communicator, from the bracket at `start` on, as a list; None where something
    stands behind them.
    """
    return raw[start : end - len(_END)] if raw.endswith(_END, start, end) else None


def missing_start(raw: bytes, start: int, end: int) -> int:
    """The offset in a communicator at which its missing ranks begin; its start where that is not found."""
    return max(start, raw.rfind(_RANKS_END, start, end))
