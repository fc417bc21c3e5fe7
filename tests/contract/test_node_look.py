"""What node_part sees of processes in two samples, and what is made of it: real processes, the real py-spy,
a real pair of gloo ranks.
"""

import contextlib
import json
import multiprocessing as mp
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from deployments.training_job.rankwatch_job import start_in_worker
from tasks.adapters import node_part
from tasks.adapters.node_part import handle
from tasks.hang.witness import Look, read_look
from tests.ras_jobs import until

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
LIMIT_S = 120.0
TRAIN = textwrap.dedent("""
    import os, sys, time

    def sleeps():
        time.sleep(600)

    def computes():
        sum(range(10**12))

    def writes(path):
        with open(path, "wb", buffering=0) as file:
            while True:
                file.seek(0)
                file.write(bytes(2**20))
                time.sleep(0.02)

    def steps():
        sys.stdin.read(1)
        sleeps()

    def enters_the_kernel(fifo):
        actions = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions), 0)

    print("up", flush=True)
    globals()[sys.argv[1]](*sys.argv[2:])
""").lstrip()


@pytest.fixture
def start(tmp_path):
    """Starts processes that are gone after the test, whatever state they are in."""
    children = []
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def begin(*does):
        command = [sys.executable, str(script), *map(str, does)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        children.append(child)
        assert child.stdout.readline() == b"up\n"
        until(lambda: f"{does[0]} (train.py" in dump(child.pid) or state(child.pid) == "D")
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate(timeout=30)


@pytest.fixture(scope="module", autouse=True)
def _ptrace_allowed():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=-1) as child:
        tried = subprocess.run([PY_SPY, "dump", "--pid", str(child.pid)], capture_output=True, check=False)
        child.kill()
    if b"ermission" in tried.stderr or b"not permitted" in tried.stderr:
        pytest.skip(f"py-spy may not look into processes here: {tried.stderr.decode()[:200]}")


@pytest.fixture
def between(monkeypatch):
    """Sets what happens between the two samples, instead of waiting."""

    def set_(action: Callable[[], object]) -> None:
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: action())
        monkeypatch.setattr(node_part, "time", clock)

    return set_


def dump(pid: int) -> str:
    command = [PY_SPY, "dump", "--nonblocking", "--pid", str(pid)]
    return str(subprocess.run(command, capture_output=True, check=False, text=True).stdout)


def state(pid: int) -> str:
    processes = handle({"op": "identify", "pids": [pid]})["processes"]
    return str(processes[str(pid)]["state"])


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")


def samples(*pids: int, server: str = "", **changed: Any) -> dict[str, Any]:
    """What node_part answers of one process, or of several by pid."""
    request: dict[str, Any] = {
        "op": "look",
        "processes": [{"pid": pid, "worker_server": server} for pid in pids],
        "gap_s": 1.0,
        "deadline_s": 60.0,
        "stacks": True,
        "py_spy": "",
    }
    answer = handle({**request, **changed})
    assert answer["ok"], answer
    looks: dict[str, Any] = answer["looks"]
    return looks if len(pids) > 1 else dict(looks[str(pids[0])])


def look(pid: int, **changed: Any) -> Look:
    return read_look(0, samples(pid, **changed))


# ---- what moves, and what does not


def test_a_process_that_sleeps_does_not_move(start):
    child = start("sleeps")
    raw = samples(child.pid)
    assert raw["start_ticks"] > 0
    assert raw["state"] == "S"
    assert raw["ticks_per_s"] == os.sysconf("SC_CLK_TCK")
    first, second = raw["samples"]
    assert second["at_s"] - first["at_s"] >= 1.0
    assert first["threads"][0]["os_thread_id"] == child.pid
    assert first["threads"][0]["frames"][0]["locals"] is None
    assert first["threads_cpu_ticks"].keys() == {str(child.pid)}
    assert read_look(3, raw) == Look(
        rank=3,
        state="running",
        waits=False,
        where="train.py:4 in sleeps",
        frames=("train.py:4 sleeps", "train.py:25 <module>"),
        same_frames=True,
    )


def test_a_process_that_computes_moves_by_its_cpu(start):
    seen = look(start("computes").pid)
    assert seen.moved.startswith("its training thread used ")
    assert seen.same_frames


def test_a_process_that_writes_moves_by_its_bytes(start, tmp_path):
    raw = samples(start("writes", tmp_path / "checkpoint").pid)
    first, second = raw["samples"]
    assert second["io_bytes"] - first["io_bytes"] >= 2**20
    for sample in (first, second):  # whatever line it is caught at, and however slow the machine
        sample.update(threads=first["threads"], threads_cpu_ticks={}, cpu_ticks=None)
    assert read_look(0, raw).moved.startswith("it read or wrote ")


def test_a_stack_that_changes_is_a_move(start, between):
    child = start("steps")

    def step():
        child.stdin.write(b"\n")
        child.stdin.flush()
        until(lambda: "sleeps (train.py" in dump(child.pid))

    between(step)
    seen = look(child.pid)
    assert seen.moved == "its stack changed from train.py:17 in steps to train.py:4 in sleeps"
    assert seen.same_frames is False
    assert seen.where == "train.py:4 in sleeps"


# ---- states


def test_a_stopped_process_is_read_and_stays_stopped(start, tmp_path):
    child = start("computes")
    stop(child.pid)
    seen = look(child.pid)
    assert (seen.state, seen.moved, seen.same_frames) == ("stopped", "", True)
    assert seen.where == "train.py:7 in computes"
    assert state(child.pid) == "T"


def test_a_process_that_ends_between_the_samples_is_gone(start, between):
    child = start("sleeps")

    def end():
        child.kill()
        until(lambda: state(child.pid) == "Z")

    between(end)
    raw = samples(child.pid)
    assert raw["state"] == "Z"
    assert raw["start_ticks"] > 0
    assert read_look(0, raw).state == "gone"
    child.wait()
    raw = samples(child.pid, gap_s=0.0)
    assert (raw["state"], raw["start_ticks"], raw["failed"]) == ("X", 0, [f"process {child.pid} is gone"])
    assert read_look(0, raw) == Look(rank=0, state="gone", problem=f"process {child.pid} is gone")


def test_a_pid_that_is_used_again_is_another_process(start, between, monkeypatch):
    child = start("sleeps")
    seen = node_part._look

    def later():
        monkeypatch.setattr(node_part, "_look", lambda pid: seen(pid)._replace(start_ticks=5))

    between(later)
    raw = samples(child.pid, stacks=False)
    assert raw["state"] == "X"
    assert raw["start_ticks"] == seen(child.pid).start_ticks
    assert raw["failed"] == [f"pid {child.pid} became another process"]


def test_a_process_in_the_kernel_is_read_without_ptrace(start, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = start("enters_the_kernel", fifo)
    until(lambda: state(child.pid) == "D")
    try:
        seen = look(child.pid)
        assert (seen.state, seen.same_frames, seen.problem) == ("uninterruptible", True, "")
        assert seen.where == "train.py:22 in enters_the_kernel"
    finally:
        with contextlib.suppress(OSError):  # nobody waits any more
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def test_a_probe_tells_a_stopped_process_from_a_gone_one(start):
    stopped, gone = start("sleeps"), start("sleeps")
    stop(stopped.pid)
    gone.kill()
    gone.wait()
    probed = samples(stopped.pid, gone.pid, stacks=False, gap_s=0.0, py_spy="/no/such/py-spy")
    assert [len(one["samples"]) for one in probed.values()] == [1, 1]
    assert read_look(0, probed[str(stopped.pid)]) == Look(rank=0, state="stopped")
    assert read_look(1, probed[str(gone.pid)]).state == "gone"


# ---- what goes wrong


@pytest.fixture
def wrapper(tmp_path):
    """Makes an executable script out of lines of sh; `$real` is py-spy, `$pid` the target."""

    def write(lines):
        script = tmp_path / "py-spy"
        script.write_text(f'#!/bin/sh\nreal={PY_SPY}\nfor pid in "$@"; do :; done\n{lines}\n')
        script.chmod(0o755)
        return str(script)

    return write


def test_py_spy_that_dies_holding_its_target(start, wrapper):
    child = start("sleeps")
    holding = wrapper(
        'case "$*" in *--nonblocking*) exec "$real" "$@";; *) kill -STOP "$pid"; exec sleep 600;; esac'
    )
    seen = look(child.pid, py_spy=holding, gap_s=0.1, deadline_s=6.0)
    assert seen.same_frames
    assert "sent SIGCONT" in seen.problem
    until(lambda: state(child.pid) == "S")


def test_py_spy_that_never_ends_costs_the_stacks_only(start, wrapper):
    child = start("sleeps")
    seen = look(child.pid, py_spy=wrapper("exec sleep 600"), gap_s=0.1, deadline_s=2.0)
    assert (seen.state, seen.waits, seen.same_frames, seen.where) == ("running", None, None, "")
    assert "no answer within" in seen.problem
    assert state(child.pid) == "S"


def test_no_py_spy(start, monkeypatch, tmp_path):
    child = start("sleeps")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = look(child.pid, gap_s=0.1)
    assert "install py-spy" in seen.problem
    assert seen.waits is None


def test_a_process_that_cannot_be_looked_at_does_not_cost_the_others_theirs(start, monkeypatch):
    stuck, other = start("sleeps"), start("sleeps")
    release, used = threading.Event(), node_part._used

    def sticks(pid, **how):
        if pid == stuck.pid:
            release.wait(60)
        return used(pid, **how)

    monkeypatch.setattr(node_part, "_used", sticks)
    try:
        both = samples(stuck.pid, other.pid, gap_s=0.1, deadline_s=4.0)
    finally:
        release.set()
    assert both[str(stuck.pid)]["samples"] == []
    assert both[str(stuck.pid)]["failed"] == [
        "cut: the first sample did not end in time",
        "cut: the second sample did not end in time",
    ]
    assert read_look(0, both[str(stuck.pid)]).state == "unknown"
    assert read_look(1, both[str(other.pid)]).same_frames


@pytest.fixture
def served(tmp_path):
    """A worker server that gives one answer to everything, or none."""
    with tempfile.TemporaryDirectory(prefix="rw", dir="/tmp") as folder:  # a socket's path has to be short
        path: str = f"{folder}/s"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()

        def serve(answer: bytes) -> str:
            def run() -> None:
                while True:
                    try:
                        connection = listener.accept()[0]
                    except OSError:
                        return
                    with connection:
                        connection.recv(1000)
                        connection.sendall(answer)

            threading.Thread(target=run, daemon=True).start()
            return path

        yield SimpleNamespace(path=path, serve=serve)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answer(document: object) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(document).encode()


def recorder(pid: int, server: str) -> tuple[Any, list[str]]:
    raw = samples(pid, server=server, gap_s=0.0, py_spy="/bin/false", deadline_s=20.0)
    reasons = [reason for reason in raw["failed"] if reason.startswith("Flight Recorder")]
    return raw["samples"][0]["flight_recorder"], reasons


def test_both_recorders_are_asked_and_numbers_may_be_text(start, served):
    status = {
        "last_enqueued_collective": "7",
        "last_completed_collective": 6,
        "last_started_collective": "-1",
    }
    path = served.serve(answer({"pg_status": {"0": status, "1": {"last_enqueued_collective": None}}}))
    found, reasons = recorder(start("sleeps").pid, path)
    both = [{"group": name, "enqueued": 7, "completed": 6} for name in ("nccl 0", "0")]
    assert (found, reasons) == ({"groups": both}, [])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "refuses it (dump_nccl_trace_json 404, fr_trace_json 404)"),
        (b"what?", "answers b'what?'"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "Expecting property name"),
        (answer([1]), "sent list"),
    ],
)
def test_a_worker_server_that_is_none(start, served, said, reason):
    found, reasons = recorder(start("sleeps").pid, served.serve(said))
    assert found is None
    assert reason in reasons[0]


def test_a_worker_server_that_does_not_answer_or_is_not_there(start, served, monkeypatch):
    monkeypatch.setattr(node_part, "_RECORDER_S", 0.3)
    child = start("sleeps")
    assert recorder(child.pid, served.path) == (
        None,
        ["Flight Recorder: the worker server does not answer in time"],
    )
    found, reasons = recorder(child.pid, f"{served.path}-gone")
    assert found is None
    assert "No such file" in reasons[0]


@pytest.mark.parametrize(
    "request_", [{"op": "look"}, {"op": "look", "processes": 3, "gap_s": 0, "deadline_s": 1}]
)
def test_a_request_that_cannot_be_right(request_):
    assert handle(request_)["code"] == "internal"


# ---- a real pair of ranks


def rank_main(rank: int, folder: str, start: bytes, orders: Connection) -> None:
    """All-reduces as often as it is told to. `start` came by value, as in Ray."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANKWATCH_SOCKET_DIR"] = f"{folder}/s"
    import torch  # noqa: PLC0415  it reads the environment
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    orders.send(pickle.loads(start)("0123456789abcdef", rank))
    while True:
        for _ in range(orders.recv()):
            dist.all_reduce(torch.ones(4))
        orders.send("done")


@pytest.fixture
def pair():
    """(pid, worker server, pipe) of two ranks that have reduced once."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rw", dir="/tmp") as folder:
        start = cloudpickle.dumps(start_in_worker)
        ranks = []
        processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, folder, start, theirs), daemon=True)
            process.start()
            processes.append(process)
            ranks.append(ours)
        try:
            servers = [heard(pipe)["worker_server"] for pipe in ranks]
            for pipe in ranks:
                pipe.send(1)
            assert [heard(pipe) for pipe in ranks] == ["done", "done"]
            yield [(p.pid, s, pipe) for p, s, pipe in zip(processes, servers, ranks, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S)
    return pipe.recv()


def test_a_rank_that_waits_for_one_that_does_not_come(pair, between):
    (waiting, server, pipe), (culprit, its_server, its_pipe) = pair
    pipe.send(1)
    until(lambda: "all_reduce" in dump(waiting))
    seen = look(waiting, server=server)
    assert seen.waits
    assert (seen.collective, seen.pending, seen.same_frames, seen.moved) == ("all_reduce", True, True, "")
    assert seen.where.startswith("test_node_look.py:")
    assert ", inside all_reduce " in seen.where
    other = look(culprit, server=its_server)
    assert (other.waits, other.pending, other.same_frames, other.moved) == (False, False, True, "")

    stop(culprit)
    other = look(culprit, server=its_server, gap_s=0.1)
    assert (other.state, other.pending, other.same_frames) == ("stopped", None, True)
    assert "the process is stopped" in other.problem
    os.kill(culprit, signal.SIGCONT)

    def comes() -> None:
        its_pipe.send(1)
        assert (heard(pipe), heard(its_pipe)) == ("done", "done")

    between(comes)
    assert look(culprit, server=its_server).moved == "it went from collective 1 to 2 in process group 0"
    assert look(waiting, server=server, gap_s=0.0).pending is None
