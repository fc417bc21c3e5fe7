"""The demo's stand-in for RAS on recorded Flight Recorder dumps: counts, members, what is missing."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deployments.demo.launch_counts import RankLaunches, function_of
from deployments.demo.ras_report import render_json
from deployments.demo.ras_standin import Standin, ask_rank, is_stopped
from tasks.hang.report import parse_report

DATA = Path(__file__).parents[1] / "data" / "flight_recorder"
FOUR = [json.loads((DATA / f"_dump_fr_trace_json_rank{rank}.json").read_text()) for rank in range(4)]
TWO = [
    json.loads((DATA / "ray_run3" / f"run_run3_rank{rank}_fr_trace_json.json").read_text())
    for rank in range(2)
]
NO_PROCESS = 5_000_000  # above the highest pid of Linux


class Bench:
    """A stand-in whose ranks answer what the test says, at the time it says."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.now_s = 100.0
        self.answers: dict[int, Any] = {}
        self.asked: list[int] = []
        self.said: list[str] = []
        self.standin = self.another()

    def another(self) -> Standin:
        return Standin(
            self.base,
            "10.0.0.1",
            ask=self.answer,
            clock=lambda: self.now_s,
            say=self.said.append,
        )

    def answer(self, path: Path, pid: int) -> Any:
        del path
        self.asked.append(pid)
        return self.answers[pid]

    def rank(self, attempt: str, rank: int, pid: int, answer: Any) -> None:
        folder = self.base / attempt
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"rank_{rank}.*.sock"):
            old.unlink()
        (folder / f"rank_{rank}.{pid}.sock").touch()
        self.answers[pid] = answer

    def counts(self) -> list[dict[int, dict[str, int]]]:
        """For each communicator, the largest first, what each rank launched."""
        ordered = sorted(self.standin.snapshot().communicators, key=lambda comm: -comm.size)
        return [{rank.rank: dict(rank.counts) for rank in comm.ranks} for comm in ordered]


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def of(dump: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The dump of a ring that holds only the records from `first` up to `last`."""
    return {**dump, "entries": [e for e in dump["entries"] if first <= e["record_id"] <= last]}


def four(bench: Bench, attempt: str = "a1") -> None:
    for rank, dump in enumerate(FOUR):
        bench.rank(attempt, rank, 1000 + rank, dump)


def test_the_recorded_job_shows_the_rank_that_is_behind(bench):
    four(bench)
    others = {"AllReduce": 6, "AllGather": 1}
    world, pair = bench.counts()
    assert world == {0: others, 1: others, 2: {"AllReduce": 5, "AllGather": 1}, 3: others}
    assert pair == {0: {"AllReduce": 1}, 1: {"AllReduce": 1}}
    assert bench.counts() == [world, pair]


def test_the_run_of_ray_shows_the_rank_that_is_behind(bench):
    for rank, dump in enumerate(TWO):
        bench.rank("a1", rank, 1000 + rank, dump)
    assert bench.counts() == [{0: {"AllReduce": 6}, 1: {"AllReduce": 5}}]


def test_what_is_served_is_a_report_and_says_that_it_stands_in(bench):
    four(bench)
    report = parse_report(render_json(bench.standin.snapshot()))
    assert report.nccl_version == "2.30.7+standin"
    world = max((record.decode() for record in report.records.values()), key=lambda comm: comm.size)
    assert [(r.rank, r.host, r.pid, r.cuda_dev, r.nvml_dev, r.status) for r in world.ranks] == [
        (rank, "10.0.0.1", 1000 + rank, rank, rank, "RUNNING") for rank in range(4)
    ]


def test_hashes_are_those_of_attempt_and_group(bench):
    four(bench)
    names = {(comm.hash, comm.secondary_hash) for comm in bench.standin.snapshot().communicators}
    assert {(c.hash, c.secondary_hash) for c in bench.another().snapshot().communicators} == names
    four(bench, "a2")
    both = {(comm.hash, comm.secondary_hash) for comm in bench.another().snapshot().communicators}
    assert len(both) == 4
    assert names < both


def test_a_silent_rank_is_missing_and_after_a_minute_dead_for_good(bench):
    four(bench)
    world_before = bench.counts()[0]
    bench.answers[1002] = "silent"
    first = bench.standin.snapshot()
    assert first.timeouts_count == 1
    (world,) = [comm for comm in first.communicators if comm.size == 4]
    assert [rank.rank for rank in world.ranks] == [0, 1, 3]
    assert [(m.rank, m.pid, m.unresponsive, m.considered_dead) for m in world.missing] == [
        (2, 1002, True, False)
    ]
    bench.now_s += 59
    again = bench.standin.snapshot()
    assert again.timeouts_count == 0
    assert [m.considered_dead for comm in again.communicators for m in comm.missing] == [False]

    bench.answers[1002] = FOUR[2]
    assert bench.counts()[0] == world_before

    bench.answers[1002] = "silent"
    bench.standin.snapshot()
    bench.now_s += 60
    for answer in ("silent", FOUR[2], "silent"):
        bench.answers[1002] = answer
        found = bench.standin.snapshot().communicators
        assert [(m.rank, m.considered_dead) for comm in found for m in comm.missing] == [(2, True)]


def test_a_stopped_rank_is_waited_for_once(bench):
    four(bench)
    with subprocess.Popen(["sleep", "600"]) as stopped:
        try:
            assert not is_stopped(stopped.pid)
            stopped.send_signal(signal.SIGSTOP)
            assert until_stopped(stopped.pid)
            bench.rank("a1", 2, stopped.pid, "silent")
            for timeouts in (1, 0, 0):
                found = bench.standin.snapshot()
                assert found.timeouts_count == timeouts
                assert {m.pid for comm in found.communicators for m in comm.missing} == {stopped.pid}
            assert bench.asked.count(stopped.pid) == 1

            stopped.send_signal(signal.SIGCONT)
            bench.answers[stopped.pid] = FOUR[2]
            assert not any(comm.missing for comm in bench.standin.snapshot().communicators)
        finally:
            stopped.kill()
    assert not is_stopped(stopped.pid)


def until_stopped(pid: int) -> bool:
    """SIGSTOP is on its way when kill returns."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    return os.WIFSTOPPED(status) and is_stopped(pid)


def test_a_communicator_of_which_no_rank_answers_is_not_shown_until_one_does(bench):
    four(bench)
    before = bench.counts()
    bench.answers.update({1000: "gone", 1001: "silent", 1002: "silent", 1003: "gone"})
    assert bench.counts() == []
    bench.answers[1001] = FOUR[1]
    assert bench.counts()[0] == {1: before[0][1]}


def test_a_rank_that_is_gone_is_missing_while_others_live_and_an_attempt_without_any_is_not_shown(bench):
    four(bench)
    bench.standin.snapshot()
    bench.answers[1001] = "gone"
    found = bench.standin.snapshot()
    assert found.timeouts_count == 0
    assert [(m.rank, m.pid, m.unresponsive) for comm in found.communicators for m in comm.missing] == [
        (1, 1001, True),
        (1, 1001, True),
    ]
    bench.answers.update(dict.fromkeys((1000, 1001, 1002, 1003), "gone"))
    assert bench.counts() == []
    assert bench.counts() == []


def test_two_attempts_are_two_jobs(bench):
    four(bench, "old")
    for rank in range(4):
        bench.rank("new", rank, 2000 + rank, of(FOUR[rank], 0, 1))
    bench.answers.update(dict.fromkeys((1000, 1001, 1002), "gone"))
    found = {comm.size: comm for comm in bench.standin.snapshot().communicators if comm.ranks[0].pid >= 2000}
    assert [dict(rank.counts) for rank in found[4].ranks] == [{"AllReduce": 2}] * 4


def test_a_new_process_of_a_rank_starts_from_nothing(bench):
    four(bench)
    bench.standin.snapshot()
    bench.rank("a1", 2, 3002, of(FOUR[2], 0, 0))
    assert bench.counts()[0][2] == {"AllReduce": 1}


def test_a_rank_that_has_launched_nothing_is_a_member_of_the_default_group(bench):
    four(bench)
    bench.answers[1003] = {"version": "2.10", "pg_config": {}, "pg_status": {}}
    assert bench.counts()[0][3] == {}


def test_members_that_have_no_socket_are_missing(bench):
    bench.rank("a1", 0, 1000, TWO[0])
    (world,) = bench.standin.snapshot().communicators
    assert (world.size, [(m.rank, m.pid) for m in world.missing]) == (2, [(1, -1)])


def test_named_groups_count_their_own_ranks(bench):
    config = {"1": {"name": "1", "desc": "pair", "ranks": [1, 3]}}
    for rank, dump in enumerate(FOUR):
        bench.rank("a1", rank, 1000 + rank, {**dump, "pg_config": config})
    pair = next(comm for comm in bench.standin.snapshot().communicators if comm.size == 2)
    assert [rank.pid for rank in pair.ranks] == [1001, 1003]


@pytest.mark.parametrize("ring", [1, 3, 8])
def test_a_ring_that_goes_round_between_queries_loses_nothing(bench, ring):
    whole = len(FOUR[0]["entries"])
    for last in range(whole):
        for rank, dump in enumerate(FOUR):
            bench.rank("a1", rank, 1000 + rank, of(dump, last - ring + 1, last))
        found = bench.counts()
    assert found[0][0] == {"AllReduce": 6, "AllGather": 1}
    assert bench.said == []


def test_what_a_ring_has_lost_is_counted_by_sequence_number_and_said_once(bench):
    four(bench)
    bench.answers[1000] = of(FOUR[0], 4, 7)  # the first four all_reduces are overwritten
    assert bench.counts()[0][0] == {"AllReduce": 6, "AllGather": 1}
    bench.counts()
    assert len(bench.said) == 1
    assert "process 1000 went round: 4 collectives were not seen" in bench.said[0]


def test_send_and_receive_do_not_count():
    launches = RankLaunches()
    entry = {**FOUR[0]["entries"][0], "is_p2p": True, "profiling_name": "gloo:send"}
    launches.take({"entries": [entry]})
    assert launches.groups == {}


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gloo:all_reduce", "AllReduce"),
        ("gloo:barrier", "AllReduce"),
        ("nccl:all_reduce_barrier", "AllReduce"),
        ("nccl:allreduce_coalesced", "AllReduce"),
        ("gloo:broadcast", "Broadcast"),
        ("nccl:_broadcast_oop", "Broadcast"),
        ("gloo:reduce", "Reduce"),
        ("gloo:all_gather", "AllGather"),
        ("nccl:_all_gather_base", "AllGather"),
        ("nccl:all_gather_into_tensor_coalesced", "AllGather"),
        ("nccl:_reduce_scatter_base", "ReduceScatter"),
        ("nccl:reduce_scatter_tensor_coalesced", "ReduceScatter"),
        ("gloo:all_to_all", None),
        ("gloo:gather", None),
        ("gloo:scatter", None),
    ],
)
def test_names_of_operations(name, function):
    assert function_of(name) == function


def test_a_socket_without_listener_or_process_is_gone(tmp_path):
    assert ask_rank(tmp_path / "none.sock", os.getpid()) == "gone"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "bound.sock"))
        assert ask_rank(tmp_path / "bound.sock", os.getpid()) == "gone"


def test_a_socket_that_does_not_answer_is_silent_while_its_process_is_there(tmp_path):
    path = tmp_path / "listens.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert ask_rank(path, os.getpid(), deadline_s=0.1) == "silent"
        assert ask_rank(path, NO_PROCESS, deadline_s=0.1) == "gone"
