"""Whose processes a report shows, told from its bytes.

RAS may answer for another job that shares the port, for a part of ours, or from a process that takes
everybody else for dead. Each poll has to notice, and a report of a large job has 110 MB: so nothing is
decoded here, and most of it is not even scanned.
"""

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from tasks.hang.run import Rank

_PROCESS = re.compile(rb'"host":\s*"([^"]*)",\s*"pid":\s*(\d+)')
_COUNT = re.compile(rb'"communicators_count":\s*(\d+)')
_FIRST = re.compile(rb'"hash":\s*"([^"]*)",\s*"secondary_hash":\s*"([^"]*)"')
_ENTRY = b'"pid": '
_UNRESPONSIVE = b'"unresponsive": true'

_HEAD_BYTES = 2048
_SAMPLE_ABOVE_BYTES = 4 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 4096


class Mark(Struct, frozen=True):
    """What tells one mesh from another, from the head of a report: communicators are sorted, and a mesh
    shares none with another. It changes when communicators are made or end.
    """

    communicators_count: int
    first: bytes


def mark_of(raw: bytes) -> Mark:
    """The mark of the mesh that a report is about; a count of -1 where the head cannot be read."""
    head = raw[:_HEAD_BYTES]
    count, first = _COUNT.search(head), _FIRST.search(head)
    return Mark(int(count[1]) if count else -1, b"/".join(first.groups()) if first else b"")


class Roster:
    """The processes of an attempt, as a report names them.

    The host counts where it is the address of one of our nodes: containers number their processes alike. RAS
    prints the address of the bootstrap interface, which need not be the one that Ray knows the node by; of
    such a host the pid alone decides.

    Args:
        ranks: Of the attempt.
    """

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._ranks: set[int] = set()
        self._by_process: dict[tuple[bytes, bytes], list[int]] = {}
        self._by_pid: dict[bytes, list[int]] = {}
        self._hosts: set[bytes] = set()
        for rank in ranks:
            host, pid = rank.node.ip.encode(), str(rank.pid).encode()
            self._ranks.add(rank.world_rank)
            self._hosts.add(host)
            self._by_process.setdefault((host, pid), []).append(rank.world_rank)
            self._by_pid.setdefault(pid, []).append(rank.world_rank)

    def is_foreign(self, raw: bytes) -> bool:
        """Whether a report shows processes, and none of ours. One without any communicator shows nobody,
        and is fine.
        """
        strangers = False
        for host, pid in _processes(raw):
            if self._candidates(host, pid):
                return False
            strangers = True
        return strangers and bool(self._ranks)

    def seen(self, raw: bytes) -> set[int]:
        """The world ranks whose processes a report shows, be it as missing.

        Of ranks that only an unknown host could tell apart, each host that shows their pid counts for one:
        how many are seen is right, which of them is a guess.
        """
        found: set[int] = set()
        for host, pid in _processes(raw):
            ranks = self._candidates(host, pid)
            if host in self._hosts:
                found.update(ranks)
            else:
                found.update([rank for rank in ranks if rank not in found][:1])
            if len(found) == len(self._ranks):
                break
        return found

    def _candidates(self, host: bytes, pid: bytes) -> list[int]:
        if host in self._hosts:
            return self._by_process.get((host, pid), [])
        return self._by_pid.get(pid, [])


def lost_count(raw: bytes) -> int:
    """How many rank entries of a report are missing and unresponsive."""
    return raw.count(_UNRESPONSIVE)


def lost_share(raw: bytes) -> float:
    """The share of rank entries that are missing and unresponsive, 0.0 to 1.0.

    Of a large report it is an estimate from 1 MB in pieces spread evenly: reading all of it at each poll
    would cost as much as splitting it.
    """
    if len(raw) <= _SAMPLE_ABOVE_BYTES:
        pieces = [raw]
    else:
        step = len(raw) // _SAMPLES
        pieces = [raw[at : at + _SAMPLE_BYTES] for at in range(0, len(raw), step)]
    entries = sum(piece.count(_ENTRY) for piece in pieces)
    lost = sum(piece.count(_UNRESPONSIVE) for piece in pieces)
    return min(1.0, lost / entries) if entries else 0.0


def _processes(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Host and pid of each process that a report names, once each, as they come. A member whose process
    RAS does not know (pid -1) is nobody.
    """
    told: set[tuple[bytes, bytes]] = set()
    for found in _PROCESS.finditer(raw):
        process = (found[1], found[2])
        if process not in told:
            told.add(process)
            yield process
