"""The in-job worker server and the stand-in for RAS with real gloo processes: what is launched is served."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.training_job.rankwatch_job import _remove_dead_sockets
from tasks.adapters.node_part import handle
from tasks.hang.report import parse_report
from tests.gloo_job import LIMIT_S, RING, Job, gloo_job, standin_of


@pytest.fixture
def job() -> Iterator[Job]:
    """Two ranks."""
    with gloo_job(2) as found:
        yield found


@pytest.fixture
def standin(job) -> Iterator[str]:
    with standin_of(job) as addr:
        yield addr


def ask(addr: str) -> Any:
    """Ask as rankwatch does; returns the decoded communicators and the report."""
    request = {"op": "ras_status", "addr": addr, "method": "socket", "format": "json", "pids": []}
    answer = handle({**request, "collect_timeout_s": 5, "deadline_s": 20.0})
    assert answer["ok"], answer
    report = parse_report(answer["raw"])
    found = [record.decode() for record in report.records.values()]
    return sorted(found, key=lambda c: -sum(n for _, n in c.ranks[0].counts)), report


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT_S
    while True:
        found = condition()
        if found or time.monotonic() > end:
            return found
        time.sleep(0.05)


def missing(addr: str) -> Any:
    (world,), _ = ask(addr)
    return world.missing


def counts_of(communicator: Any) -> list[dict[str, int]]:
    """Launches of each rank by function, without zeros."""
    return [{function: n for function, n in rank.counts if n} for rank in communicator.ranks]


def test_what_is_launched_is_served(job, standin):
    for fact, process in zip(job.facts, job.processes, strict=True):
        assert fact["worker_server"], fact["worker_server_reason"]
        assert fact["pid"] == process.pid
        assert fact["env"] == {"TORCH_FR_BUFFER_SIZE": str(RING)}
        assert Path(fact["worker_server"]).parent.stat().st_mode & 0o777 == 0o700
    assert ask(standin)[0] == []

    job.do("all_reduce", "all_reduce", "barrier", "broadcast", "reduce", "all_gather", "all_reduce in a pair")
    job.do("all_gather_into_tensor", "reduce_scatter", "p2p", "gather", "scatter", "all_to_all")
    (world, pair), report = ask(standin)
    assert report.nccl_version == "2.30.7+standin"
    assert [rank.pid for rank in world.ranks] == [process.pid for process in job.processes]
    # 2 and a barrier, and the one that gloo makes a reduce_scatter of
    launched = {"Broadcast": 1, "Reduce": 1, "AllGather": 2, "AllReduce": 4}
    assert counts_of(world) == [launched] * 2
    assert counts_of(pair) == [{"AllReduce": 1}] * 2

    for _ in range(5):  # the ring of records goes round between the queries, and nothing is lost
        job.do(*["all_reduce"] * 9)
        (again, _), _ = ask(standin)
    assert again.key == world.key
    assert counts_of(again) == [{**launched, "AllReduce": 49}] * 2

    job.do(*["all_reduce"] * 50)  # now it is: the sequence numbers still tell how many
    assert counts_of(ask(standin)[0][0]) == [{**launched, "AllReduce": 99}] * 2

    job.tell("all_reduce", ranks=[0])  # the one that waits is ahead of the one it waits for
    hung = [{**launched, "AllReduce": 100}, {**launched, "AllReduce": 99}]
    assert wait_for(lambda: counts_of(ask(standin)[0][0]) == hung)


def test_a_stopped_rank_is_missing_until_it_goes_on_and_a_killed_one_for_good(job, standin):
    sockets = [Path(fact["worker_server"]) for fact in job.facts]
    folder = sockets[0].parent
    job.do("all_reduce")
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    lost = wait_for(lambda: missing(standin))
    assert [(rank.rank, rank.pid, rank.unresponsive) for rank in lost] == [(1, job.processes[1].pid, True)]
    os.kill(job.processes[1].pid, signal.SIGCONT)
    assert wait_for(lambda: not missing(standin))
    _remove_dead_sockets(folder.parent, "another")  # what lives is not swept
    assert all(path.is_socket() for path in sockets)

    job.processes[1].kill()
    job.processes[1].join()
    assert [(rank.rank, rank.unresponsive) for rank in missing(standin)] == [(1, True)]
    job.kill()
    assert ask(standin)[0] == []
    _remove_dead_sockets(folder.parent, folder.name)  # an attempt never sweeps itself
    assert all(path.is_socket() for path in sockets)
    _remove_dead_sockets(folder.parent, "another")
    assert not folder.exists()
