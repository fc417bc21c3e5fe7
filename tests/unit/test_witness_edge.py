"""Asking nodes for samples: who is asked what, and what is said of ranks that cannot be seen."""

import os
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tasks.adapters.local_node import LocalNode
from tasks.adapters.process import start_ticks
from tasks.hang.errors import NodeError
from tasks.hang.run import Attempt, Node, Rank
from tasks.hang.witness import Look, Question, Witness
from tasks.witness import ask
from tests import fakes

NODES = tuple(Node(f"10.0.0.{i}", f"node-{i}", f"host-{i}") for i in (1, 2))
# World ranks 0 and 1 are on the first node, 2 and 3 on the second.
ATTEMPT = Attempt(
    run_name="demo",
    run_id="r1",
    attempt_id="one",
    ranks=tuple(
        Rank(world_rank=i, pid=1000 + i, node=NODES[i // 2], start_ticks=70 + i, worker_server=f"/s/{i}")
        for i in range(4)
    ),
)
# The communicator counts the other way round.
MEMBERS = {3 - rank.world_rank: (rank.node.ip, rank.pid) for rank in ATTEMPT.ranks}


class Nodes:
    """Answers for each node by its own function, and keeps what it was asked."""

    def __init__(self, answer: Callable[[Node, dict[str, Any]], dict[str, Any]]) -> None:
        self.answer = answer
        self.calls: dict[str, tuple[dict[str, Any], float]] = {}

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        self.calls[node.ip] = (request, deadline_s)
        return self.answer(node, request)


def process(pid: int, **changed: Any) -> dict[str, Any]:
    samples = [{"state": "S", "at_s": 1.0}, {"state": "S", "at_s": 11.0}]
    return {"start_ticks": pid - 1000 + 70, "samples": samples, "ticks_per_s": 100, "failed": [], **changed}


def sleeping(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "looks": {str(one["pid"]): process(one["pid"]) for one in request["processes"]}}


def witness(
    folder,
    nodes: Any,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    *,
    attempt=ATTEMPT,
    members=MEMBERS,
    stacks=True,
) -> Witness:
    eyes = fakes.eyes(folder, fakes.FakeRas(b""), fakes.FakeDirectory(attempt), nodes=nodes)
    return ask(eyes, attempt, Question(communicator="0x1/0x2", ranks=ranks, stacks=stacks), members, 10.0)


def test_each_node_is_asked_once_for_its_ranks(tmp_path):
    before = datetime.now(UTC)
    nodes = Nodes(sleeping)
    seen = witness(tmp_path, nodes, (2, 0, 3))
    assert [look.rank for look in seen.looks] == [2, 0, 3]
    assert [look.state for look in seen.looks] == ["running"] * 3
    assert (seen.communicator, seen.reason) == ("0x1/0x2", "")
    assert before <= seen.observed_at <= datetime.now(UTC)
    request, deadline_s = nodes.calls["10.0.0.1"]
    assert request == {
        "op": "look",
        "processes": [{"pid": 1001, "worker_server": "/s/1"}, {"pid": 1000, "worker_server": "/s/0"}],
        "gap_s": 10.0,
        "deadline_s": 17.0,
        "stacks": True,
        "py_spy": "",
    }
    assert deadline_s == 20.0
    assert nodes.calls["10.0.0.2"][0]["processes"] == [{"pid": 1003, "worker_server": "/s/3"}]


def test_nodes_are_asked_side_by_side(tmp_path):
    """Each answers only when both were asked."""
    both = threading.Barrier(2, timeout=30)

    def meet(node: Node, request: dict[str, Any]) -> dict[str, Any]:
        both.wait()
        return sleeping(node, request)

    assert [look.state for look in witness(tmp_path, Nodes(meet)).looks] == ["running"] * 4


def test_a_probe_is_short(tmp_path):
    nodes = Nodes(sleeping)
    witness(tmp_path, nodes, (0,), stacks=False)
    request, deadline_s = nodes.calls["10.0.0.2"]
    assert (request["stacks"], request["gap_s"]) == (False, 1.0)
    assert deadline_s == 11.0


def test_ranks_that_share_a_process_share_its_samples(tmp_path):
    nodes = Nodes(sleeping)
    seen = witness(tmp_path, nodes, (0, 1), members=dict.fromkeys((0, 1), ("10.0.0.1", 1000)))
    assert [(look.rank, look.state) for look in seen.looks] == [(0, "running"), (1, "running")]
    assert len(nodes.calls["10.0.0.1"][0]["processes"]) == 1


def test_a_node_that_does_not_answer_costs_its_own_ranks(tmp_path):
    def silent(node: Node, request: dict[str, Any]) -> dict[str, Any]:
        if node is NODES[0]:
            raise NodeError("Node 10.0.0.1 did not answer.", "Look at it.")
        return sleeping(node, request)

    seen = witness(tmp_path, Nodes(silent))
    assert [look.state for look in seen.looks] == ["running", "running", "unknown", "unknown"]
    assert seen.looks[2].problem == "Node 10.0.0.1 did not answer. Look at it."
    assert seen.reason == ""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"ok": False, "code": "internal", "detail": "KeyError"}, "node 10.0.0.1: KeyError"),
        ({}, "node 10.0.0.1: None"),
        ({"ok": True}, "node 10.0.0.1 says nothing of process 1000"),
        ({"ok": True, "looks": 3}, "node 10.0.0.1 says nothing of process 1000"),
        ({"ok": True, "looks": {"1000": 3, "1001": {"samples": "x"}}}, "the node's answer cannot be read"),
    ],
)
def test_when_nothing_is_seen_it_says_why(tmp_path, answer, reason):
    seen = witness(tmp_path, Nodes(lambda *_: answer), (3, 2))
    assert {look.state for look in seen.looks} == {"unknown"}
    assert all(look.problem for look in seen.looks)
    assert seen.reason.startswith(reason)


def test_processes_that_nobody_knows(tmp_path):
    nodes = Nodes(sleeping)
    seen = witness(tmp_path, nodes, (0, 1), members={0: ("10.9.9.9", 4)})
    assert seen.looks[0].problem == "process 4 of 10.9.9.9 is none that the run is known by"
    assert seen.looks[1].problem == "RAS names no process of this rank"
    assert seen.reason == f"{seen.looks[0].problem}; {seen.looks[1].problem}"
    assert nodes.calls == {}
    assert witness(tmp_path, nodes, ()).reason == "no rank was asked for"


def test_a_pid_that_is_used_again_is_a_process_that_is_gone(tmp_path):
    nodes = Nodes(lambda *_: {"ok": True, "looks": {"1000": process(1000, start_ticks=99)}})
    seen = witness(tmp_path, nodes, (3,))
    assert seen.looks == (
        Look(rank=3, state="gone", problem="process 1000 is gone: its pid belongs to another one now"),
    )
    assert seen.reason == ""
    unannounced = msgspec.structs.replace(
        ATTEMPT, ranks=(msgspec.structs.replace(ATTEMPT.ranks[0], start_ticks=None),)
    )
    assert witness(tmp_path, nodes, (3,), attempt=unannounced).looks[0].state == "running"


def test_a_process_that_was_never_there_is_gone(tmp_path):
    gone = process(
        1000, start_ticks=0, samples=[{"state": "X", "at_s": 1.0}], failed=["process 1000 is gone"]
    )
    seen = witness(tmp_path, Nodes(lambda *_: {"ok": True, "looks": {"1000": gone}}), (3,), stacks=False)
    assert seen.looks == (Look(rank=3, state="gone", problem="process 1000 is gone"),)


def test_real_processes_through_a_real_node(tmp_path):
    child = subprocess.Popen(["sleep", "600"])
    try:
        pids = (os.getpid(), child.pid)
        ranks = tuple(
            Rank(world_rank=i, pid=pid, node=NODES[0], start_ticks=start_ticks(pid))
            for i, pid in enumerate(pids)
        )
        attempt = msgspec.structs.replace(ATTEMPT, ranks=ranks)
        members = {i: ("10.0.0.1", pid) for i, pid in enumerate(pids)}
        seen = witness(tmp_path, LocalNode(), (0, 1), attempt=attempt, members=members, stacks=False)
        assert [look.state for look in seen.looks] == ["running", "running"]
        child.kill()
        child.wait()
        seen = witness(tmp_path, LocalNode(), (1,), attempt=attempt, members=members, stacks=False)
        assert seen.looks[0].state == "gone"
    finally:
        child.kill()
        child.wait()
