"""The JSON report of NCCL's RAS server from plain values: a stand-in for NCCL, for the demo and the tests.

It has the byte layout of NVIDIA's server (2.28.7 and newer), checked against recorded answers of it.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")

_IN_PROGRESS = 7
_EMPTY_ARRAY = re.compile(r'^( *)("\w+": \[)\](,?)$', re.MULTILINE)
_MISSING_STATUS = re.compile(r'("nvml_dev": -?\d+),(\n *"status": \{\n *"unresponsive")')


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank in its communicator, and the process and device behind it."""

    rank: int
    host: str
    pid: int
    cuda_dev: int = 0
    nvml_dev: int = 0

    def __str__(self) -> str:
        return f"GPU {self.cuda_dev} managed by process {self.pid} on node {self.host}"


@dataclass(frozen=True, kw_only=True)
class RasRank(Place):
    """A member that answered. `init_state` and `async_error` are values of ncclResult_t."""

    counts: Mapping[str, int] = field(default_factory=dict)
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False

    @property
    def word(self) -> str:
        """The status as the text report has it."""
        if self.abort_flag:
            return "ABORT"
        if self.finalize_called or self.destroy_flag:
            return "FINALIZE"
        return "INIT" if self.init_state else "RUNNING"


@dataclass(frozen=True, kw_only=True)
class RasMissingRank(Place):
    """A member that did not answer; with `unresponsive` False its process did, but is no member any more."""

    unresponsive: bool = True
    considered_dead: bool = False


@dataclass(frozen=True, kw_only=True)
class RasCommunicator:
    """A communicator; the hashes are written as NCCL writes them (`0x1f`, `0x1f:0x2e`)."""

    hash: str
    secondary_hash: str
    size: int
    ranks: Sequence[RasRank]
    missing: Sequence[RasMissingRank] = ()

    @property
    def status(self) -> str:
        """The highest status of all ranks."""
        order = ("INIT", "RUNNING", "FINALIZE", "ABORT")
        return max((rank.word for rank in self.ranks), key=order.index)

    @property
    def errors(self) -> str:
        """What the last column of the table says."""
        found = [
            ("INCOMPLETE", any(rank.unresponsive for rank in self.missing)),
            (
                "ERROR",
                any(is_failure(rank.init_state) or is_failure(rank.async_error) for rank in self.ranks),
            ),
            ("MISMATCH", self._differs()),
        ]
        return ",".join(word for word, holds in found if holds) or "OK"

    def _differs(self) -> bool:
        shown = {(rank.word, tuple(rank.counts.get(name, 0) for name in FUNCTIONS)) for rank in self.ranks}
        return len(shown) > 1 or any(not rank.unresponsive for rank in self.missing)


@dataclass(frozen=True, kw_only=True)
class RasSnapshot:
    """What one query collected."""

    communicators: Sequence[RasCommunicator]
    nccl_version: str = "2.30.7"
    cuda_runtime_version: int = 13000
    cuda_driver_version: int = 13000
    timeouts_count: int = 0
    collection_time_s: float = 0.001

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "RasSnapshot":
        """Read a recorded report, to replay it."""
        return cls(
            communicators=[_communicator(entry) for entry in document["communicators"]],
            nccl_version=document["nccl_version"],
            cuda_runtime_version=document["cuda_runtime_version"],
            cuda_driver_version=document["cuda_driver_version"],
            timeouts_count=document["ras"]["timeouts_count"],
            collection_time_s=document["ras"]["collection_time_sec"],
        )


def render_json(snapshot: RasSnapshot, *, missing_comma: bool = False) -> bytes:
    """The JSON report. `missing_comma` gives the invalid one of 2.28.7 to 2.28.9: they forget a comma in each
    missing rank.
    """
    ordered = sorted(snapshot.communicators, key=lambda comm: int(comm.hash, 16))
    document = {
        "nccl_version": snapshot.nccl_version,
        "cuda_runtime_version": snapshot.cuda_runtime_version,
        "cuda_driver_version": snapshot.cuda_driver_version,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "communicators_count": len(ordered),
        "communicators": [_communicator_fields(comm) for comm in ordered],
        "ras": {"collection_time_sec": 0, "timeouts_count": snapshot.timeouts_count},
    }
    text = _EMPTY_ARRAY.sub(r"\1\2\n\n\1]\3", json.dumps(document, indent=2))
    text = text.replace(
        '"collection_time_sec": 0,', f'"collection_time_sec": {snapshot.collection_time_s:.3f},'
    )
    if missing_comma:
        text = _MISSING_STATUS.sub(r"\1\2", text)
    return f"{text}\n".encode()


def _communicator(entry: Mapping[str, Any]) -> RasCommunicator:
    return RasCommunicator(
        hash=entry["hash"],
        secondary_hash=entry["secondary_hash"],
        size=entry["size"],
        ranks=[RasRank(**_flat(rank)) for rank in entry["ranks"]],
        missing=[RasMissingRank(**_flat(rank)) for rank in entry["missing_ranks"]],
    )


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in entry.items() if name not in ("status", "collective_counts")}
    counts = {"counts": entry["collective_counts"]} if "collective_counts" in entry else {}
    return {**flat, **entry["status"], **counts}


def _communicator_fields(comm: RasCommunicator) -> dict[str, Any]:
    return {
        "hash": comm.hash,
        "secondary_hash": comm.secondary_hash,
        "size": comm.size,
        "ranks_count": len(comm.ranks),
        "missing_ranks_count": len(comm.missing),
        "ranks": [
            {
                **_place_fields(rank),
                "status": {
                    "init_state": rank.init_state,
                    "async_error": rank.async_error,
                    "finalize_called": rank.finalize_called,
                    "destroy_flag": rank.destroy_flag,
                    "abort_flag": rank.abort_flag,
                },
                "collective_counts": {name: rank.counts.get(name, 0) for name in FUNCTIONS},
            }
            for rank in sorted(comm.ranks, key=lambda rank: rank.rank)
        ],
        "missing_ranks": [
            {
                **_place_fields(rank),
                "status": {"unresponsive": rank.unresponsive, "considered_dead": rank.considered_dead},
            }
            for rank in sorted(comm.missing, key=lambda rank: rank.rank)
        ],
    }


def _place_fields(place: Place) -> dict[str, Any]:
    return {
        "rank": place.rank,
        "host": place.host,
        "pid": place.pid,
        "cuda_dev": place.cuda_dev,
        "nvml_dev": place.nvml_dev,
    }


def is_failure(result: int) -> bool:
    """Whether a value of ncclResult_t is an error; a non-blocking communicator is in progress."""
    return result not in (0, _IN_PROGRESS)
