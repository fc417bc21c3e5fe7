"""The other side of the ports, for tests: scripted, and counting what is done to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tasks.adapters.object_store import LocalStore
from tasks.adapters.ports import Ack, RasSource, RunDirectory
from tasks.adapters.ras_ring import RasRing
from tasks.hang.errors import RankwatchError, RasUnreachable, RunNotFound
from tasks.hang.run import Attempt, Node, Rank
from tasks.settings import resolve
from tasks.wiring import Eyes

NODE = Node("10.0.0.1", "node-a", "host-a")


def attempt(
    attempt_id: str = "one", pids: tuple[int, ...] = (1000, 1001, 1002, 1003), **fields: Any
) -> Attempt:
    defaults: dict[str, Any] = {"run_name": "demo", "run_id": "r1", "announced_by": "rankwatch_job"}
    ranks = tuple(Rank(world_rank=i, pid=pid, node=NODE, start_ticks=7) for i, pid in enumerate(pids))
    return Attempt(attempt_id=attempt_id, ranks=ranks, **{**defaults, **fields})


class FakeDirectory:
    """A run whose attempt the test sets."""

    def __init__(self, found: Attempt | None) -> None:
        self.found = found

    def find(self, run_name: str) -> Attempt:
        if self.found is None or run_name not in (self.found.run_name, self.found.run_id):
            raise RunNotFound(f"No run named {run_name!r}.", "Known: none.")
        return self.found

    def job_environment(self, run_name: str) -> dict[str, str]:
        self.find(run_name)
        return {}


class FakeRas:
    """Answers with what the test says: a report, the reports of several meshes, or an error to raise."""

    def __init__(self, answer: bytes | tuple[bytes, ...] | RankwatchError) -> None:
        self.answer: bytes | tuple[bytes, ...] | RankwatchError = answer
        self.seen: tuple[int, int] | None = None
        self.asked = 0

    def status(self, attempt: Attempt) -> tuple[bytes, ...]:
        del attempt
        self.asked += 1
        if isinstance(self.answer, RankwatchError):
            raise self.answer
        return self.answer if isinstance(self.answer, tuple) else (self.answer,)

    def visible(self, attempt: Attempt) -> tuple[int, int] | None:
        del attempt
        return self.seen

    def text(self, attempt: Attempt) -> str:
        del attempt
        if isinstance(self.answer, RankwatchError):
            raise RasUnreachable(self.answer.what)
        return "NCCL version 2.30.7\n"


class FakeNodes:
    """Answers operations of node_part from a function, and keeps them."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        del node, deadline_s
        self.requests.append(request)
        return self.answer(request)

    def asked(self, op: str) -> list[dict[str, Any]]:
        return [request for request in self.requests if request["op"] == op]


class FakeChannel:
    """Acknowledges with `outcome`; None is an in-job part that never answers."""

    def __init__(self, outcome: Literal["failed_attempt", "refused"] | None) -> None:
        self.outcome: Literal["failed_attempt", "refused"] | None = outcome
        self.posted: list[dict[str, Any]] = []

    def post(self, run_id: str, verdict: dict[str, Any]) -> None:
        del run_id
        self.posted.append(verdict)

    def acknowledged(self, run_id: str, incident: str) -> Ack | None:
        del run_id
        known = any(verdict["incident"] == incident for verdict in self.posted)
        return Ack(incident=incident, outcome=self.outcome) if known and self.outcome else None

    def clear(self, run_id: str) -> None:
        del run_id


def eyes(folder: Path, ras: RasSource, directory: RunDirectory, **parts: Any) -> Eyes:
    """Real store, ring and settings in `folder`; everything else as given."""
    block = {
        "poll_interval_s": 0.05,
        "suspect_after_s": 0.1,
        "confirm_duration_s": 0.3,
        "repeat_every_s": 0.1,
        "acknowledge_within_s": 0.5,
        "spool_path": str(folder / "spool"),
        "shift_s": 60.0,
        **parts.pop("settings", {}),
    }
    made: dict[str, Any] = {
        "plan": resolve(block, {}),
        "directory": directory,
        "ras": ras,
        "nodes": FakeNodes(lambda _: {"ok": False, "detail": "nobody is there"}),
        "channel": FakeChannel("failed_attempt"),
        "store": LocalStore(folder / "storage"),
        "ring": RasRing(folder / "spool" / "ring", 20),
        "storage_path": str(folder / "storage"),
        "run_key": "r1",
        "reconnect": lambda: None,
    }
    return Eyes(**{**made, **parts})
