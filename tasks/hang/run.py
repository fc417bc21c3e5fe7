"""A training run as rankwatch knows it: which process is which rank, on which node.

RAS knows ranks of communicators by (host, pid, device); people and Ray know world ranks. This is where
the two meet.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Literal

from msgspec import Struct


class Node(Struct, frozen=True):
    """A machine (or container) that holds ranks. `node_id` is Ray's; empty where there is no Ray."""

    ip: str
    node_id: str = ""
    hostname: str = ""


class Rank(Struct, frozen=True, kw_only=True):
    """One process of the training run.

    `start_ticks` is field 22 of /proc/<pid>/stat, None where nobody looked yet: with the pid it names
    a process for good. `worker_server` is the address of torch's worker server in the process, which gives
    the Flight Recorder away; empty where none was started.
    """

    world_rank: int
    pid: int
    node: Node
    local_rank: int | None = None
    node_rank: int | None = None
    actor_id: str = ""
    gpu_ids: tuple[str, ...] = ()
    start_ticks: int | None = None
    log_file_path: str = ""
    worker_server: str = ""


RunStatus = Literal["starting", "running", "restarting", "finished", "failed", "unknown"]


class Attempt(Struct, frozen=True, kw_only=True, dict=True):
    """One start of the worker group.

    `attempt_id` comes from the in-job part, else from Ray, else from the processes themselves
    (`attempt_id_of`); it is empty while the run has not started any. `announced_by` says who told us:
    rankwatch_job, dashboard or state_api. `storage_path` is where the run keeps its checkpoints, empty
    where nobody said.

    `started_at` is when the worker group started (unix seconds, 0.0 where unknown). `watchdog_s` is how long
    after a collective stalls the earliest watchdog of torch kills the attempt by itself, None where none is
    known; `watchdog_source` says in words which one. `suspended_until` (unix seconds) is until when the
    training asks not to be polled, and `suspended_reason` why.
    """

    run_name: str
    run_id: str
    attempt_id: str
    ranks: tuple[Rank, ...]
    status: RunStatus = "running"
    announced_by: str = ""
    job_id: str = ""
    submission_id: str = ""
    has_callback: bool = False
    storage_path: str = ""
    started_at: float = 0.0
    watchdog_s: float | None = None
    watchdog_source: str = ""
    suspended_until: float = 0.0
    suspended_reason: str = ""

    def rank_of(self, host: str, pid: int) -> Rank | None:
        """The world rank behind a process that RAS names, None where it is not one of ours.

        A pid alone is enough when it is unique in the run: RAS prints the address of the bootstrap
        interface, which need not be the one Ray knows the node by.
        """
        same_pid = self._by_pid.get(pid, ())
        found = [rank for rank in same_pid if rank.node.ip == host] or same_pid
        return found[0] if len(found) == 1 else None

    @cached_property
    def _by_pid(self) -> dict[int, list[Rank]]:
        index: dict[int, list[Rank]] = {}
        for rank in self.ranks:
            index.setdefault(rank.pid, []).append(rank)
        return index

    @property
    def pids(self) -> frozenset[int]:
        """All process ids of the attempt."""
        return frozenset(rank.pid for rank in self.ranks)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in order of the first world rank on each."""
        return tuple(dict.fromkeys(rank.node for rank in self.ranks))

    @property
    def finished(self) -> bool:
        """Whether there will be no further attempt."""
        return self.status in ("finished", "failed")


def attempt_id_of(processes: Iterable[tuple[str, int, int]]) -> str:
    """Name an attempt by its processes where the platform gives it no name.

    Args:
        processes: (host, pid, start ticks) of each rank, in any order.

    Returns:
        16 hexadecimal digits, the same for the same set of processes.
    """
    text = "\n".join(f"{host} {pid} {start}" for host, pid, start in sorted(processes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def by_node(ranks: Iterable[Rank]) -> Mapping[Node, tuple[Rank, ...]]:
    """Group ranks by the node they run on."""
    grouped: dict[Node, list[Rank]] = {}
    for rank in ranks:
        grouped.setdefault(rank.node, []).append(rank)
    return {node: tuple(members) for node, members in grouped.items()}
