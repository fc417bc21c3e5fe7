"""The in-job worker server and the stand-in for RAS with real gloo processes: what is launched is served."""

import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from deployments.training_job.rankwatch_job import _remove_dead_sockets, start_in_worker
from tasks.adapters.node_part import handle
from tasks.hang.report import parse_report

ATTEMPT = "0123456789abcdef"
LIMIT_S = 120.0


def rank_main(rank: int, folder: str, start: bytes, orders: Connection) -> None:
    """A rank that does what it is told, one operation for each word. `start` came by value, as in Ray."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANKWATCH_SOCKET_DIR"] = f"{folder}/s"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20"
    import torch  # noqa: PLC0415  it reads the environment
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    x, both = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(both, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(8), x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.zeros(2), x),
        "gather": lambda: dist.gather(x, both if rank == 0 else None),
        "scatter": lambda: dist.scatter(x, both if rank == 0 else None),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros(4), x),
        "p2p": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        "all_reduce in a pair": lambda: dist.all_reduce(x, group=pair),
    }
    orders.send(pickle.loads(start)(ATTEMPT, rank))
    while True:
        for word in orders.recv():
            operations[word]()
        orders.send("done")


class Job:
    """Two ranks."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        start = cloudpickle.dumps(start_in_worker)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, str(folder), start, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.facts = [self.hear(rank) for rank in range(2)]

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(LIMIT_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def do(self, *words: str) -> None:
        for pipe in self.pipes:
            pipe.send(words)
        for rank in range(2):
            self.hear(rank)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@pytest.fixture
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="rw", dir="/tmp") as folder:  # a socket's path has to be short
        found = Job(Path(folder))
        try:
            yield found
        finally:
            found.kill()


@pytest.fixture
def standin(job) -> Iterator[str]:
    """The address of a stand-in that runs as the demo starts it."""
    base = Path(job.facts[0]["worker_server"]).parent.parent
    command = [sys.executable, "-m", "deployments.demo.ras_standin", "--sockets", str(base), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    try:
        notice, addr = process.stdout.readline(), process.stdout.readline()
        assert "stands in for NCCL's RAS" in notice
        yield addr.strip().removeprefix("NCCL_RAS_ADDR=")
    finally:
        process.terminate()
        assert process.wait(30) == 0


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
        assert fact["env"] == {"TORCH_FR_BUFFER_SIZE": "20"}
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

    for _ in range(5):  # the ring of 20 records goes round between the queries, and nothing is lost
        job.do(*["all_reduce"] * 9)
        (again, _), _ = ask(standin)
    assert again.key == world.key
    assert counts_of(again) == [{**launched, "AllReduce": 49}] * 2

    job.do(*["all_reduce"] * 50)  # now it is: the sequence numbers still tell how many
    assert counts_of(ask(standin)[0][0]) == [{**launched, "AllReduce": 99}] * 2

    job.pipes[0].send(("all_reduce",))  # the one that waits is ahead of the one it waits for
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
