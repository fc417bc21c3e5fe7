"""Reports for tests, in the layout of NCCL's RAS server."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

T0 = datetime(2026, 12, 1, 3, 0, tzinfo=UTC)

RUNNING = {
    "init_state": 0,
    "async_error": 0,
    "finalize_called": False,
    "destroy_flag": False,
    "abort_flag": False,
}


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def rank(number: int, counts: Mapping[str, int] | int, **fields: Any) -> dict[str, Any]:
    """A member; a bare number is its AllReduce count."""
    named = {"AllReduce": counts} if isinstance(counts, int) else dict(counts)
    every = {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 0, **named}
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": 1000 + number,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": RUNNING,
        "collective_counts": every,
        **fields,
    }


def missing(number: int, *, unresponsive: bool = True, considered_dead: bool = False) -> dict[str, Any]:
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": 1000 + number,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {"unresponsive": unresponsive, "considered_dead": considered_dead},
    }


def communicator(
    ranks: Iterable[dict[str, Any]],
    absent: Iterable[dict[str, Any]] = (),
    *,
    name: str = "0xa",
    secondary: str = "0x1:0x2",
) -> dict[str, Any]:
    present, gone = list(ranks), list(absent)
    return {
        "hash": name,
        "secondary_hash": secondary,
        "size": len(present) + len(gone),
        "ranks_count": len(present),
        "missing_ranks_count": len(gone),
        "ranks": present,
        "missing_ranks": gone,
    }


def report(*communicators: dict[str, Any], **fields: Any) -> bytes:
    document = {
        "nccl_version": "2.30.7",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-12-01 03:00:00",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
        **fields,
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def world(*counts: int, **fields: Any) -> dict[str, Any]:
    """A communicator with these AllReduce counts."""
    return communicator([rank(i, count) for i, count in enumerate(counts)], **fields)
