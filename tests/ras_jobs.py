"""Jobs for tests: what RAS shows of them, how they look to rankwatch, and servers that misbehave."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deployments.demo.ras_server import RasCommunicator, RasMissingRank, RasRank, RasSnapshot
from tasks.hang.run import Attempt, Node, Rank

DATA = Path(__file__).parent / "data" / "ras"
STANDIN = Path(__file__).parent / "standins" / "ncclras"

# Above the highest pid that Linux hands out, so that /proc never has them.
OURS = (5_000_001, 5_000_002, 5_000_003, 5_000_004)
THEIRS = (5_000_101, 5_000_102)


def job(pids: Sequence[int] = OURS, *, all_reduce: int = 7, missing: Sequence[int] = ()) -> RasSnapshot:
    """One world communicator."""
    ranks = [
        RasRank(rank=i, host="10.0.0.1", pid=pid, cuda_dev=i, nvml_dev=i, counts={"AllReduce": all_reduce})
        for i, pid in enumerate(pids)
    ]
    lost = [
        RasMissingRank(rank=len(pids) + i, host="10.0.0.1", pid=pid, cuda_dev=len(pids) + i)
        for i, pid in enumerate(missing)
    ]
    world = RasCommunicator(
        hash="0x2f1", secondary_hash="0xa1:0xb2", size=len(ranks) + len(lost), ranks=ranks, missing=lost
    )
    return RasSnapshot(communicators=[world])


def attempt(pids: Sequence[int] = OURS, *, nodes: int = 1) -> Attempt:
    """The run as discovery would have found it; pids are dealt to the nodes in turn."""
    places = [Node(ip=f"10.0.0.{i + 1}", node_id=f"node{i}") for i in range(nodes)]
    ranks = [Rank(world_rank=i, pid=pid, node=places[i % nodes]) for i, pid in enumerate(pids)]
    return Attempt(run_name="run", run_id="run-1", attempt_id="attempt-1", ranks=tuple(ranks))


def until(condition: Callable[[], object], *, within_s: float = 20.0) -> None:
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def free_port() -> int:
    """A port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ScriptedServer:
    """Says one line for each thing it hears, then closes: a peer that is no RAS, or one that breaks off.
    With `endless` it goes on sending that instead.
    """

    def __init__(self, replies: Iterable[bytes], *, endless: bytes = b"") -> None:
        self._replies = tuple(replies)
        self._endless = endless
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.addr = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for connection in self._connections():
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                for reply in self._replies:
                    if not connection.recv(1024):
                        break
                    connection.sendall(reply)
                while self._endless:
                    connection.sendall(self._endless)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1024):  # unread bytes would turn the close into a reset
                    pass

    def _connections(self) -> Iterator[socket.socket]:
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(15)
        self._listener.close()
