"""What node_part does to processes: real ones, the real py-spy, and py-spys that misbehave."""

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from tasks.adapters import node_part
from tasks.adapters.node_part import handle
from tests.ras_jobs import until

SOURCE = Path(node_part.__file__)
PY_SPY = str(Path(sys.executable).with_name("py-spy"))
RANK = textwrap.dedent("""
    import time

    def train_step(secret):
        print("up", flush=True)
        time.sleep(600)

    train_step("never" + "-shown")
""")
IN_KERNEL = textwrap.dedent("""
    import os, sys

    def into_the_kernel(fifo):
        actions = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions), 0)

    into_the_kernel(sys.argv[1])
    print("out again")
""")


@pytest.fixture
def start():
    """Starts processes that are gone after the test, whatever state they are in."""
    children = []

    def begin(*command, **options):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate(timeout=30)


@pytest.fixture
def rank(start):
    child = start(sys.executable, "-c", RANK)
    assert child.stdout.readline() == b"up\n"
    until(lambda: state(child.pid) == "S")
    return child


@pytest.fixture(scope="module")
def _ptrace_allowed():
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        tried = subprocess.run([PY_SPY, "dump", "--pid", str(child.pid)], capture_output=True, check=False)
        child.kill()
    if tried.returncode:
        pytest.skip(f"py-spy may not look into processes here: {tried.stderr.decode()[:200]}")


@pytest.fixture
def wrapper(tmp_path):
    """Makes an executable script out of lines of sh; `$real` is py-spy, `$pid` the target."""

    def write(lines):
        script = tmp_path / "py-spy"
        script.write_text(f'#!/bin/sh\nreal={PY_SPY}\nfor pid in "$@"; do :; done\n{lines}\n')
        script.chmod(0o755)
        return str(script)

    return write


def state(pid: int) -> str:
    processes = handle({"op": "identify", "pids": [pid]})["processes"]
    return str(processes[str(pid)]["state"])


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    until(lambda: state(child.pid) == "T")


def dump(
    *pids: int, py_spy: str = "", native_timeout_s: float = 30.0, deadline_s: float = 60.0
) -> dict[str, Any]:
    answer = handle(
        {
            "op": "dump_stacks",
            "pids": list(pids),
            "native_timeout_s": native_timeout_s,
            "deadline_s": deadline_s,
            "py_spy": py_spy,
        }
    )
    assert answer["ok"], answer
    stacks: dict[str, Any] = answer["stacks"]
    return stacks if len(pids) != 1 else dict(stacks[str(pids[0])])


def functions(stack: dict[str, Any]) -> list[str]:
    return [frame["name"] for thread in stack["threads"] for frame in thread["frames"]]


# ---- stacks


@pytest.mark.usefixtures("_ptrace_allowed")
def test_running_process(rank):
    stack = dump(rank.pid)
    assert stack["rung"] == "native"
    assert "train_step" in stack["text"]
    assert "nanosleep" in stack["text"]
    assert "train_step" in functions(stack)
    assert stack["failed"] == []
    assert stack["state"] == "S"
    assert stack["start_ticks"] > 0
    assert stack["seconds"] > 0
    assert "never-shown" not in json.dumps(stack)
    assert state(rank.pid) == "S"


@pytest.mark.usefixtures("_ptrace_allowed")
def test_stopped_process_is_read_and_stays_stopped(rank):
    stop(rank)
    stack = dump(rank.pid)
    assert stack["rung"] == "nonblocking"
    assert "train_step" in stack["text"]
    assert "train_step" in functions(stack)
    assert stack["state"] == "T"
    assert any("stopped (state T)" in line for line in stack["failed"])
    assert state(rank.pid) == "T"


@pytest.mark.usefixtures("_ptrace_allowed")
def test_process_that_is_no_python(start):
    child = start("sleep", "600")
    stack = dump(child.pid)
    assert stack["rung"] == "proc"
    assert stack["threads"] == []
    assert "'sleep': state S" in stack["text"]
    assert "wchan" in stack["text"]
    assert len(stack["failed"]) == 1
    assert "python version" in stack["failed"][0]


def test_process_that_is_gone(rank):
    rank.kill()
    until(lambda: state(rank.pid) == "Z")
    zombie = dump(rank.pid)
    assert (zombie["rung"], zombie["text"]) == ("none", "")
    assert "zombie" in zombie["failed"][0]
    rank.wait()
    gone = dump(rank.pid)
    assert gone["rung"] == "none"
    assert gone["failed"] == [f"process {rank.pid} is gone"]


@pytest.mark.usefixtures("_ptrace_allowed")
def test_several_processes_each_get_their_own(rank, start):
    other = start("sleep", "600")
    stacks = dump(rank.pid, other.pid)
    assert {pid: stack["rung"] for pid, stack in stacks.items()} == {
        str(rank.pid): "native",
        str(other.pid): "proc",
    }


def test_py_spy_that_never_ends(rank, wrapper, tmp_path):
    children = tmp_path / "children"
    hanging = wrapper(f"sleep 600 & echo $! >> {children}; wait")
    stack = dump(rank.pid, py_spy=hanging, deadline_s=3.0)
    assert stack["rung"] == "proc"
    assert "state S" in stack["text"]
    assert "no answer within" in stack["failed"][0]
    ended = [int(pid) for pid in children.read_text().split()]
    until(lambda: {state(pid) for pid in ended} <= {"Z", "X"})
    assert state(rank.pid) == "S"


@pytest.mark.usefixtures("_ptrace_allowed")
def test_py_spy_that_dies_holding_its_target(rank, wrapper):
    """The plain dump after it works only on a process that runs again."""
    holding = wrapper(
        'case "$*" in *--native*) kill -STOP "$pid"; exec sleep 600;; *) exec "$real" "$@";; esac'
    )
    stack = dump(rank.pid, py_spy=holding, native_timeout_s=3.0)
    assert stack["rung"] == "python"
    assert "train_step" in stack["text"]
    assert any("sent SIGCONT" in line for line in stack["failed"])
    until(lambda: state(rank.pid) == "S")


def test_py_spy_that_never_ends_on_a_stopped_process(rank, wrapper):
    stop(rank)
    stack = dump(rank.pid, py_spy=wrapper("exec sleep 600"), deadline_s=2.0)
    assert stack["rung"] == "proc"
    assert "state T" in stack["text"]
    assert not any("SIGCONT" in line for line in stack["failed"])
    assert state(rank.pid) == "T"


@pytest.fixture
def in_kernel(start, tmp_path):
    """A process in state D, for real: posix_spawn waits in the kernel for its child, and that waits for the
    other end of a pipe. Given with the pipe that lets it out.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = start(sys.executable, "-uc", IN_KERNEL, str(fifo))
    until(lambda: state(child.pid) == "D")
    yield child, fifo
    with contextlib.suppress(OSError):  # nobody waits any more
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.usefixtures("_ptrace_allowed")
def test_process_in_the_kernel_is_read_without_ptrace(in_kernel, monkeypatch):
    child, fifo = in_kernel
    monkeypatch.setattr(node_part, "_PLAIN_S", 1.5)
    stack = dump(child.pid, native_timeout_s=1.0)
    assert (stack["rung"], stack["state"]) == ("nonblocking", "D")
    assert "into_the_kernel" in functions(stack)
    assert len(stack["failed"]) == 3
    with fifo.open("w"):
        assert child.stdout.readline() == b"out again\n"


@pytest.mark.usefixtures("_ptrace_allowed")
def test_stop_that_waits_for_a_process_in_the_kernel_is_taken_back(in_kernel, wrapper, monkeypatch):
    child, fifo = in_kernel
    monkeypatch.setattr(node_part, "_PLAIN_S", 1.5)
    holding = wrapper(
        'case "$*" in *--nonblocking*) exec "$real" "$@";; *) kill -STOP "$pid"; exec sleep 600;; esac'
    )
    stack = dump(child.pid, py_spy=holding, native_timeout_s=1.0)
    assert any("sent SIGCONT" in line for line in stack["failed"])
    with fifo.open("w"):
        assert child.stdout.readline() == b"out again\n"


def test_ptrace_denied(rank, wrapper):
    """A py-spy of another user is denied, as one without CAP_SYS_PTRACE is in a container."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become somebody else")
    nobody = wrapper('exec setpriv --reuid=65534 --regid=65534 --clear-groups "$real" "$@"')
    shutil.copy(PY_SPY, Path(nobody).with_name("real-py-spy"))
    stack = dump(rank.pid, py_spy=nobody)
    assert stack["rung"] == "proc"
    assert len(stack["failed"]) == 1
    for remedy in ("root", "CAP_SYS_PTRACE", "kernel.yama.ptrace_scope=0"):
        assert remedy in stack["failed"][0]


@pytest.mark.parametrize(
    "said", ["Operation not permitted (os error 1)", "Permission Denied: Try running again"]
)
def test_texts_that_mean_ptrace_is_denied(rank, wrapper, said):
    stack = dump(rank.pid, py_spy=wrapper(f'echo "Error: {said}" >&2; exit 1'))
    assert stack["rung"] == "proc"
    assert "CAP_SYS_PTRACE" in stack["failed"][0]
    assert said in stack["failed"][0]


def test_py_spy_that_prints_no_json(rank, wrapper):
    stack = dump(rank.pid, py_spy=wrapper("echo hello"))
    assert stack["threads"] == []
    assert stack["text"] == "hello\n"
    assert "printed something else" in stack["failed"][0]


def test_no_py_spy(rank, monkeypatch, tmp_path):
    wrong = dump(rank.pid, py_spy="/no/such/py-spy")
    assert (wrong["rung"], len(wrong["failed"])) == ("proc", 1)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    none = dump(rank.pid)
    assert none["rung"] == "proc"
    assert "install py-spy" in none["failed"][0]


def test_finds_the_py_spy_of_its_own_environment(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert node_part._find_py_spy() == PY_SPY


def test_a_read_that_never_returns_is_cut(start, monkeypatch):
    child = start("sleep", "600")
    stuck = threading.Event()
    monkeypatch.setattr(node_part, "_proc_text", lambda *_: stuck.wait(60) and "")
    stack = dump(child.pid, py_spy="/no/such/py-spy", deadline_s=0.3)
    stuck.set()
    assert stack["rung"] == "none"
    assert stack["failed"][-1] == "cut: not finished within 0.3 s"
    assert stack["start_ticks"] > 0


# ---- identify


def test_identify(rank, start):
    stopped = start("sleep", "600", env={"SECRET": "never-shown"})
    stop(stopped)
    dead = start("true")
    dead.wait()
    answer = handle({"op": "identify", "pids": [rank.pid, stopped.pid, dead.pid]})
    seen = answer["processes"]
    assert seen[str(rank.pid)]["alive"]
    assert seen[str(rank.pid)]["cmdline"].startswith(f"{sys.executable} -c")
    assert seen[str(stopped.pid)].items() >= {"alive": True, "state": "T", "cmdline": "sleep 600"}.items()
    assert seen[str(dead.pid)] == {"alive": False, "state": "X", "start_ticks": 0, "cmdline": ""}
    assert "never-shown" not in json.dumps(answer)


# ---- kill


def target(child: subprocess.Popen[bytes], **changed: object) -> dict[str, Any]:
    seen = handle({"op": "identify", "pids": [child.pid]})["processes"][str(child.pid)]
    found = {"pid": child.pid, "start_ticks": seen["start_ticks"], "cmdline_prefix": seen["cmdline"][:5]}
    return {**found, **changed}


def kill(one: dict[str, Any]) -> dict[str, str]:
    answer = handle({"op": "kill", "targets": [one]})
    assert answer["ok"], answer
    return dict(answer["outcomes"][str(one["pid"])])


@pytest.fixture(params=["pidfd", "without pidfd"])
def _kernel(request, monkeypatch):
    if request.param == "without pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("no pidfd here")


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("stopped", [False, True])
def test_kills_the_process_that_is_meant(start, stopped):
    child = start("sleep", "600")
    if stopped:
        stop(child)
    assert kill(target(child)) == {"outcome": "killed", "reason": ""}
    assert state(child.pid) in "ZX"
    assert child.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"start_ticks": 1}, "started at tick"), ({"cmdline_prefix": "ray::"}, "'sleep 600', not 'ray::'")],
)
def test_spares_another_process(start, changed, reason):
    child = start("sleep", "600")
    outcome = kill(target(child, **changed))
    assert outcome["outcome"] == "refused"
    assert reason in outcome["reason"]
    assert child.poll() is None


@pytest.mark.usefixtures("_kernel")
def test_gone_is_not_killed(start):
    child = start("sleep", "600")
    found = target(child)
    child.kill()
    until(lambda: state(child.pid) == "Z")
    assert kill(found)["outcome"] == "gone"
    child.wait()
    assert kill(found)["outcome"] == "gone"


@pytest.mark.parametrize("pid", [-1, 0, 1, os.getpid()])
def test_never_kills(pid):
    assert kill({"pid": pid, "start_ticks": 0, "cmdline_prefix": ""})["outcome"] == "refused"


def test_a_process_that_survives_is_not_called_killed(start, monkeypatch):
    """SIGKILL does nothing to a process in state D. Here the signal is lost on its way."""
    child = start("sleep", "600")
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    answer = handle({"op": "kill", "targets": [target(child)], "deadline_s": 0.2})
    outcome = answer["outcomes"][str(child.pid)]
    assert outcome["outcome"] == "refused"
    assert "still in state S" in outcome["reason"]


# ---- the entry


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"op": "reboot"}, "bad_request"),
        ({}, "internal"),
        (None, "internal"),
        ({"op": "kill"}, "internal"),
        ({"op": "identify", "pids": ["x"]}, "internal"),
    ],
)
def test_never_raises(request_, code):
    answer = handle(request_)
    assert answer["ok"] is False
    assert answer["code"] == code
    assert answer["detail"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"addr": "::1"}, "Allowed"), ({"collect_timeout_s": 0}, "at least 1")],
)
def test_ras_request_that_cannot_be_right(changed, says):
    request = {"op": "ras_status", "method": "socket", "addr": "", "format": "json", "collect_timeout_s": 5}
    answer = handle({**request, "deadline_s": 1.0, **changed})
    assert answer["code"] == "bad_request"
    assert says in answer["detail"]


def test_a_node_needs_nothing_of_ours(rank, tmp_path):
    request = {"op": "identify", "pids": [rank.pid]}
    program = f"exec(open({str(SOURCE)!r}).read()); print(handle({request!r}))"
    isolated = {"env": {}, "cwd": tmp_path, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, **isolated)
    assert ast.literal_eval(ran.stdout)["processes"][str(rank.pid)]["alive"]
    with SOURCE.open() as script:
        command = [sys.executable, "-I", "-S", "-", json.dumps(request)]
        ran = subprocess.run(command, check=True, stdin=script, **isolated)
    assert json.loads(ran.stdout)["processes"][str(rank.pid)]["alive"]


def test_travels_by_value(rank):
    cloudpickle.register_pickle_by_value(node_part)
    try:
        sent = cloudpickle.dumps(handle)
    finally:
        cloudpickle.unregister_pickle_by_value(node_part)
    request = {"op": "identify", "pids": [rank.pid]}
    program = (
        "import pickle, sys; sys.modules['tasks'] = None; handle = pickle.load(sys.stdin.buffer); "
        f"print(handle({request!r}), handle({{'op': 'reboot'}})['code'], sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=True)
    answer, refusal = ran.stdout.decode().splitlines()
    assert ast.literal_eval(answer)["processes"][str(rank.pid)]["alive"]
    assert refusal == "bad_request"


def test_is_python_of_the_oldest_training_image():
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
