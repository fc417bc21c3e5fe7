"""A real gloo job for tests: ranks that do what they are told, and what stands in for their RAS.

Each rank gives its Flight Recorder away as in a run of Ray, through what rankwatch_job starts in it.
"""

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ray import cloudpickle

from deployments.training_job.rankwatch_job import start_in_worker
from tasks.hang.run import Attempt, Node, Rank

ATTEMPT = "0123456789abcdef"
LIMIT_S = 120.0
RING = 20  # records that a Flight Recorder keeps


def rank_main(rank: int, size: int, folder: str, start: bytes, orders: Connection) -> None:
    """A rank that does what it is told, one operation for each word. `start` came by value, as in Ray."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANKWATCH_SOCKET_DIR"] = f"{folder}/s"
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(RING)
    import torch  # noqa: PLC0415  it reads the environment
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    pair = dist.new_group([0, 1])
    x, parts = torch.ones(4), [torch.zeros(4) for _ in range(size)]
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(x, 0),
        "broadcast from the neighbour": lambda: dist.broadcast(x, (rank + 1) % size),  # all wait, none sends
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(4 * size), x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(4 * size)),
        "gather": lambda: dist.gather(x, parts if rank == 0 else None),
        "scatter": lambda: dist.scatter(x, parts if rank == 0 else None),
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
    """Ranks of one attempt, each in a process of its own."""

    def __init__(self, folder: Path, size: int) -> None:
        context = mp.get_context("spawn")
        start = cloudpickle.dumps(start_in_worker)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(folder), start, theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.facts: list[dict[str, Any]] = []

    def meet(self) -> None:
        """Wait until every rank has said what it is."""
        self.facts = [self.hear(rank) for rank in range(len(self.pipes))]

    @property
    def attempt(self) -> Attempt:
        """The job as discovery would have found it."""
        here = Node(ip="127.0.0.1")
        ranks = [
            Rank(
                world_rank=rank,
                pid=fact["pid"],
                node=here,
                start_ticks=fact["start_ticks"],
                worker_server=fact["worker_server"],
            )
            for rank, fact in enumerate(self.facts)
        ]
        return Attempt(run_name="run", run_id="run-1", attempt_id=ATTEMPT, ranks=tuple(ranks))

    def hear(self, rank: int) -> Any:
        """The next thing that a rank says."""
        assert self.pipes[rank].poll(LIMIT_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def tell(self, *words: str, ranks: Sequence[int] | None = None) -> None:
        """Have ranks do something, all of them where none are named, and go on."""
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            self.pipes[rank].send(words)

    def do(self, *words: str) -> None:
        """Have all ranks do something, and wait until they have."""
        self.tell(*words)
        for rank in range(len(self.pipes)):
            self.hear(rank)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.facts[rank]["pid"], number)

    def kill(self) -> None:
        """End all ranks, the stopped ones too."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@contextlib.contextmanager
def gloo_job(size: int) -> Iterator[Job]:
    """A job whose ranks are ready, and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rw", dir="/tmp") as folder:  # a socket's path has to be short
        job = Job(Path(folder), size)
        try:
            job.meet()
            yield job
        finally:
            job.kill()


@contextlib.contextmanager
def standin_of(job: Job) -> Iterator[str]:
    """The address of a stand-in that runs as the demo starts it."""
    base = Path(job.facts[0]["worker_server"]).parent.parent
    command = [sys.executable, "-m", "deployments.demo.ras_standin", "--sockets", str(base), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    try:
        notice, addr = process.stdout.readline(), process.stdout.readline()
        assert "stands in for NCCL's RAS" in notice
        yield addr.strip().removeprefix("NCCL_RAS_ADDR=")
    finally:
        process.terminate()
        assert process.wait(30) == 0
