"""What rankwatch does on a training node: ask RAS, look at processes, dump their stacks, kill one.

A training node has nothing of ours installed. So this is one file of standard library, for Python 3.9 and
newer, that is sent by value or run as `python3 - '{"op": "identify", "pids": [1]}' < node_part.py`.
`handle` takes and returns plain data and never raises: an exception of ours could not be read back there.

Sections: addresses of RAS, RAS over its socket, RAS through ncclras, child processes, processes, stacks,
two samples, Flight Recorder, kill, the entry.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import queue
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_HANDSHAKE_LINE_S = 1.0  # what NVIDIA's own client allows before it tries another process of the node
_REAP_S = 2.0
_LOOK_S = 5.0


class _Failure(Exception):
    """The reason why an operation has no result; becomes the answer's `code` and `detail`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


# ---- addresses of RAS ---------------------------------------------------------------------------------

_ALLOWED = (
    "Allowed: host, host:port, [ipv6] or [ipv6]:port with a port from 1 to 65535; empty is localhost:28028."
)
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PORT = re.compile(r"[0-9]{1,5}")


def parse_ras_addr(text: str) -> tuple[str, int]:
    """Read NCCL_RAS_ADDR. Splitting at the first colon would break on IPv6, and a wildcard, which is fine to
    listen on, is no address to connect to: it becomes the loopback of its family.

    Args:
        text: `host`, `host:port`, `[ipv6]`, `[ipv6]:port`, or empty for localhost:28028.

    Returns:
        Host (IPv6 without brackets) and port.

    Raises:
        ValueError: it is something else; the text holds the value and what is allowed.
    """
    if text == "":
        return "localhost", 28028
    if text.startswith("["):
        inside, closing, rest = text[1:].partition("]")
        return _host_v6(text, inside, closing), _port(text, rest)
    host, colon, port = text.partition(":")
    if ":" in port:
        raise ValueError(f"{text!r}: an IPv6 address needs brackets. {_ALLOWED}")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text!r}: {host!r} is no host name. {_ALLOWED}")
    return "127.0.0.1" if host == "0.0.0.0" else host, _port(text, colon + port)  # noqa: S104  not bound


def _host_v6(text: str, inside: str, closing: str) -> str:
    try:
        address = ipaddress.IPv6Address(inside if closing else "")
    except ValueError:
        raise ValueError(f"{text!r}: {inside!r} is no IPv6 address in brackets. {_ALLOWED}") from None
    return "::1" if address.is_unspecified else inside


def _port(text: str, rest: str) -> int:
    if not rest:
        return 28028
    port = int(rest[1:]) if rest[0] == ":" and _PORT.fullmatch(rest[1:]) else 0
    if not 1 <= port <= 65535:  # noqa: PLR2004  the range of a port
        raise ValueError(f"{text!r}: {rest!r} is no port. {_ALLOWED}")
    return port


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- RAS over its socket ------------------------------------------------------------------------------


class _Ask(NamedTuple):
    """One question to RAS; `until` is on the monotonic clock."""

    host: str
    port: int
    as_json: bool
    collect_timeout_s: int
    until: float
    reconnects: int
    binary: str

    @property
    def where(self) -> str:
        return _shown(self.host, self.port)


class _Report(NamedTuple):
    raw: bytes
    reconnects: int
    peer: str


class _Silent(Exception):
    """No reply to a handshake line: the process that took the connection is stopped, another may answer."""


def _ras_status(request: dict[str, Any]) -> dict[str, Any]:
    """One report, whole, as received."""
    began = time.monotonic()
    ask = _read_ask(request, began)
    query = {"socket": _query_socket, "ncclras_cli": _query_cli}[request["method"]]
    try:
        report = query(ask)
    except _Failure as failure:
        if failure.code == "unreachable":
            _blame_disabled(request.get("pids", ()))
        raise
    _check_whole(ask, report.raw)
    return {
        "raw": report.raw,
        "seconds": time.monotonic() - began,
        "reconnects": report.reconnects,
        "peer": report.peer,
    }


def _read_ask(request: dict[str, Any], began: float) -> _Ask:
    collect_timeout_s = int(request["collect_timeout_s"])
    if collect_timeout_s < 1:
        # With TIMEOUT 0 the job's process never frees what it collected for the query.
        raise _Failure("bad_request", f"collect_timeout_s is {collect_timeout_s}, it must be at least 1.")
    try:
        host, port = parse_ras_addr(request["addr"])
    except ValueError as error:
        raise _Failure("bad_request", f"Address of RAS {error}") from error
    return _Ask(
        host=host,
        port=port,
        as_json=request["format"] == "json",
        collect_timeout_s=collect_timeout_s,
        until=began + float(request["deadline_s"]),
        reconnects=int(request.get("reconnects", 3)),
        binary=request.get("binary") or "ncclras",
    )


def _query_socket(ask: _Ask) -> _Report:
    for turn in range(ask.reconnects + 1):
        with _connect(ask, turn) as sock:
            try:
                peer = _shown(*sock.getpeername()[:2])
                return _Report(_converse(ask, sock), turn, peer)
            except _Silent:
                if not _left(ask.until):
                    break
            except OSError as error:
                raise _Failure("truncated", f"{ask.where} closed the connection: {error}.") from error
    raise _Failure(
        "no_answer",
        f"{ask.where} took {turn + 1} connections and answered none: the process behind it is stopped, "
        "or it is no RAS server.",
    )


def _connect(ask: _Ask, turn: int) -> socket.socket:
    """Try every address of the name: a job binds only the first of its localhost, which may be ::1."""
    try:
        found = socket.getaddrinfo(ask.host, ask.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _Failure("unreachable", f"{ask.where} cannot be resolved: {error}.") from error
    addresses = list(dict.fromkeys(entry[4][:2] for entry in found))
    first = turn % len(addresses)
    refusals = []
    for host, port in addresses[first:] + addresses[:first]:
        wait_s = min(_HANDSHAKE_LINE_S, _left(ask.until))
        if not wait_s:
            raise _Failure("no_answer", f"{ask.where}: the deadline passed before a connection was made.")
        try:
            return socket.create_connection((str(host), int(port)), timeout=wait_s)
        except OSError as error:
            refusals.append(f"{_shown(str(host), int(port))} {error.strerror or error}")
    raise _Failure("unreachable", f"Nothing listens at {ask.where}: {', '.join(refusals)}.")


def _converse(ask: _Ask, sock: socket.socket) -> bytes:
    """Speak the protocol. Each reply is read before the next command, since NCCL before 2.28.7 answers STATUS
    in text after it refused json; and the write side stays open, since RAS spins on a half-closed one.
    """
    _command(ask, sock, "CLIENT PROTOCOL 2", "SERVER PROTOCOL ")
    _command(ask, sock, f"TIMEOUT {ask.collect_timeout_s}", "OK")
    if ask.as_json:
        _command(ask, sock, "SET FORMAT json", "OK")
    sock.sendall(b"STATUS\n")
    chunks: list[bytes] = []
    while True:
        chunk = _receive(sock, ask.until)
        if chunk is None:
            size = sum(map(len, chunks))
            raise _Failure("no_answer", f"{ask.where}: the deadline passed with {size} bytes of the report.")
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _command(ask: _Ask, sock: socket.socket, command: str, wanted: str) -> None:
    sock.sendall(command.encode() + b"\n")
    until = min(ask.until, time.monotonic() + _HANDSHAKE_LINE_S)
    line = b""
    while not line.endswith(b"\n"):
        chunk = _receive(sock, until)
        if chunk is None:
            raise _Silent
        if not chunk:
            raise _Failure("truncated", f"{ask.where} closed the connection after {command!r}.")
        line += chunk
    reply = line.decode("utf-8", "replace").strip()
    if "Unknown command SET FORMAT" in reply:
        raise _Failure("too_old", f"{ask.where} answered {reply!r}.")
    if not reply.startswith(wanted):
        raise _Failure("malformed", f"{ask.where} answered {reply[:100]!r} to {command!r}.")


def _receive(sock: socket.socket, until: float) -> bytes | None:
    """What has arrived; empty when the connection is closed, None when the time is over."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    # The clock counts first: a peer that never stops sending is always readable.
    if not _left(until) or not poller.poll(_left(until) * 1000):
        return None
    try:
        return sock.recv(1 << 18)
    except ConnectionError:
        return b""


def _check_whole(ask: _Ask, raw: bytes) -> None:
    """The only mark of a whole report is its end: RAS sends no length and no terminator."""
    if ask.as_json and raw and not raw.startswith(b"{"):
        raise _Failure("malformed", f"{ask.where} sent no JSON, it starts with {raw[:60]!r}.")
    # A brace at the start of a line closes the document; inner ones are indented.
    ends = b"\n}\n" if ask.as_json else b"\nWarnings\n========"
    whole = raw.endswith(ends) if ask.as_json else ends in raw
    if not whole:
        tail = raw[-40:]
        raise _Failure("truncated", f"{ask.where}: the report ends after {len(raw)} bytes, at {tail!r}.")


def _blame_disabled(pids: Iterable[int]) -> None:
    """Nothing listens: say so if a process of the job was told not to. Reads this one variable only."""
    for pid in pids:
        try:
            environment = Path(f"/proc/{int(pid)}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        values = [entry.partition(b"=")[2] for entry in environment if entry.startswith(b"NCCL_RAS_ENABLE=")]
        if values and values[-1].strip() != b"1":
            raise _Failure("disabled", f"Process {pid} was started with NCCL_RAS_ENABLE other than 1.")


# ---- RAS through ncclras ------------------------------------------------------------------------------

# First match wins. The exit code knows only 0 and 1, the reason is in the text.
_CLI_REASONS = (
    (re.compile(r"(invalid|unrecognized) option.*\bf\b"), "too_old"),
    (re.compile(r"Unknown command SET FORMAT"), "too_old"),
    (re.compile(r"Connection refused|Failed to connect|^Resolving ", re.MULTILINE), "unreachable"),
    (re.compile(r"unexpectedly closed|Connection reset"), "truncated"),
    (re.compile(r"Connection timed out(?!; retrying)"), "no_answer"),
)


def _query_cli(ask: _Ask) -> _Report:
    argv = [ask.binary, "-h", ask.host, "-p", str(ask.port), "-t", str(ask.collect_timeout_s)]
    argv += ["-f", "json"] if ask.as_json else []
    try:
        ran = _run(argv, _left(ask.until))
    except OSError as error:
        raise _Failure("no_binary", f"{ask.binary!r} cannot be run: {error.strerror or error}.") from error
    retries = ran.err.count("retrying...")
    said = "; ".join(line for line in ran.err.splitlines() if line.strip())[:300]
    if ran.killed:
        raise _Failure("no_answer", f"{ask.binary}: no answer of {ask.where} in time, ended. {said}".strip())
    if ran.code:
        code = next((code for pattern, code in _CLI_REASONS if pattern.search(ran.err)), "malformed")
        raise _Failure(code, f"{ask.binary} for {ask.where} ended with {ran.code}: {said}")
    return _Report(ran.out, retries, ask.where)


# ---- child processes ----------------------------------------------------------------------------------


class _Ran(NamedTuple):
    code: int | None
    out: bytes
    err: str
    killed: bool


def _run(argv: list[str], timeout_s: float) -> _Ran:
    """Run a tool in a process group of its own and end the whole group when the time is over. Never waits
    without bound: a tool stuck in the kernel is left behind.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C", "RUST_BACKTRACE": "0"},  # reasons are recognised by their text
    )
    killed = False
    out = err = b""
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        killed = True
        _end_group(child)
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = child.communicate(timeout=_REAP_S)
    finally:
        _end_group(child)
    return _Ran(child.returncode, out, err.decode("utf-8", "replace"), killed)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:  # not reaped yet, so the group is still its own
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)


def _in_parallel(jobs: Iterable[Callable[[], None]], until: float, *, at_once: int = 0) -> None:
    """Run jobs in daemon threads, as many at a time as there are CPUs, or `at_once`; return when all are done
    or the time is over. Reading /proc of a process that is stuck in the kernel may never return, so nothing
    is joined without bound, and no thread keeps the interpreter alive.
    """
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while _left(until):
                waiting.get_nowait()()

    width = min(waiting.qsize(), at_once or len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_left(until))


# ---- processes ----------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    state: str
    start_ticks: int

    @property
    def ended(self) -> bool:
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


_NOBODY = _Seen("X", 0)


def _look(pid: int) -> _Seen:
    """State and start of a process; a state of X where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return _NOBODY
    fields = stat.rpartition(")")[2].split()  # the name in the brackets may hold anything
    return _Seen(fields[0], int(fields[19]))


def _cmdline(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def _identify(request: dict[str, Any]) -> dict[str, Any]:
    """Who is behind each pid. A process whose command line cannot be read in time has an empty one."""
    pids = [int(pid) for pid in request["pids"]]
    lines: dict[int, str] = {}

    def reader(pid: int) -> Callable[[], None]:
        return lambda: lines.update({pid: _cmdline(pid)})

    _in_parallel(map(reader, pids), time.monotonic() + float(request.get("deadline_s", _LOOK_S)))
    return {"processes": {str(pid): _described(_look(pid), lines.get(pid, "")) for pid in pids}}


def _described(seen: _Seen, cmdline: str) -> dict[str, Any]:
    return {
        "alive": not seen.ended,
        "state": seen.state,
        "start_ticks": seen.start_ticks,
        "cmdline": cmdline,
    }


# ---- stacks -------------------------------------------------------------------------------------------

_PLAIN_S = 5.0
_RESERVE_S = 2.0  # kept back from the native dump for the rungs below it
_DENIED = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)
_NO_PYTHON = re.compile(r"failed to find python version|python interpreter", re.IGNORECASE)
_ALLOW_PTRACE = (
    "ptrace is denied. Run the node's processes as root, or add CAP_SYS_PTRACE to the container "
    "(securityContext.capabilities.add: [SYS_PTRACE]), or set kernel.yama.ptrace_scope=0"
)
_SIGSTOP_BIT = 1 << (signal.SIGSTOP - 1)


def _dump_stacks(request: dict[str, Any]) -> dict[str, Any]:
    """The stacks of all processes of the node, side by side, each from the best rung that works."""
    deadline_s = float(request["deadline_s"])
    until = time.monotonic() + deadline_s
    tools_until = until - min(1.0, deadline_s / 10)
    py_spy = request.get("py_spy") or _find_py_spy()
    native_s = float(request["native_timeout_s"])
    dumps = [_Dump(int(pid), py_spy, native_s, tools_until) for pid in request["pids"]]
    _in_parallel([dump.run for dump in dumps], until)
    return {"stacks": {str(dump.pid): dump.answer(deadline_s) for dump in dumps}}


def _find_py_spy() -> str:
    """The py-spy of this interpreter's environment, else the one in PATH; empty where there is none."""
    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):  # noqa: PTH120  3.9: may be ""
        found = shutil.which("py-spy", path=folder) if folder else None
        if found:
            return found
    return shutil.which("py-spy") or ""


class _Dump:
    """Stacks of one process. Filled in as rungs succeed, so that what is late is cut and not lost."""

    def __init__(self, pid: int, py_spy: str, native_s: float, until: float) -> None:
        self.pid = pid
        self.py_spy = py_spy
        self.native_s = native_s
        self.until = until
        self.seen = _look(pid)
        self.rung = "none"
        self.text = ""
        self.threads: list[Any] = []
        self.failed: list[str] = []
        self.hopeless = False
        self.seconds: float | None = None

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._climb()
        except Exception as error:  # noqa: BLE001  one process must not cost the others their stacks
            self.failed.append(f"internal: {error!r}")
        self.seconds = time.monotonic() - began

    def answer(self, deadline_s: float) -> dict[str, Any]:
        cut = [] if self.seconds is not None else [f"cut: not finished within {deadline_s:g} s"]
        return {
            "rung": self.rung,
            "text": self.text,
            "threads": self.threads,
            "failed": [*self.failed, *cut],
            "start_ticks": self.seen.start_ticks,
            "state": self.seen.state,
            "seconds": deadline_s if self.seconds is None else self.seconds,
        }

    def _climb(self) -> None:
        if self.seen.ended:
            kind = "has ended (zombie)" if self.seen.state == "Z" else "is gone"
            self.failed.append(f"process {self.pid} {kind}")
            return
        if not self.py_spy:
            self.hopeless = True
            self.failed.append("py-spy: not beside this Python and not in PATH; install py-spy on the nodes")
        self.threads = self.read_threads()
        for rung, flags, timeout_s in (
            ("native", ["--native"], min(self.native_s, _left(self.until) - _RESERVE_S)),
            ("python", [], _PLAIN_S),
            ("nonblocking", ["--nonblocking"], _PLAIN_S),
        ):
            text = self._dump(flags, timeout_s)
            if text:
                self.rung, self.text = rung, text
                return
        text = _proc_text(self.pid)
        if text:
            self.rung, self.text = "proc", text
        else:
            self.failed.append(f"/proc/{self.pid}/task: nothing to read")

    def read_threads(
        self, ways: Sequence[Sequence[str]] = ((), ("--nonblocking",)), timeout_s: float = _PLAIN_S
    ) -> list[Any]:
        printed = next(filter(None, (self._dump([*way, "--json"], timeout_s) for way in ways)), "")
        try:
            threads = json.loads(printed) if printed else []
        except ValueError as error:
            self.failed.append(f"py-spy dump --json: printed something else: {error}")
            return []
        return threads if isinstance(threads, list) else []

    def _dump(self, flags: list[str], timeout_s: float) -> str:
        """What `py-spy dump` prints with these flags; empty where it failed, with the reason kept."""
        if self.hopeless:
            return ""
        name = " ".join(["py-spy dump", *flags])
        before = _look(self.pid)
        pauses = "--nonblocking" not in flags
        if pauses and before.stopped:  # ptrace could resume it, and whoever stopped it wants it so
            self.failed.append(f"{name}: the process is stopped (state {before.state}), so not tried")
            return ""
        timeout_s = min(timeout_s, _left(self.until))
        if timeout_s <= 0:
            self.failed.append(f"{name}: no time left")
            return ""
        try:
            ran = _run([self.py_spy, "dump", *flags, "--pid", str(self.pid)], timeout_s)
        except OSError as error:
            self.hopeless = True
            self.failed.append(f"{self.py_spy} cannot be run: {error.strerror or error}")
            return ""
        if pauses and (ran.killed or ran.code):
            self._resume(before, name)
        if ran.code == 0 and not ran.killed:
            return ran.out.decode("utf-8", "replace")
        self.failed.append(f"{name}: {self._why(ran, timeout_s)}")
        return ""

    def _why(self, ran: _Ran, timeout_s: float) -> str:
        if ran.killed:
            return f"no answer within {timeout_s:.1f} s, ended"
        said = ran.err.partition("Stack backtrace:")[0]
        said = " ".join(said.split())[:300] or "nothing on stderr"
        denied = bool(_DENIED.search(said))
        # The other ways to call it need the same right, and the same interpreter in the process.
        self.hopeless = denied or bool(_NO_PYTHON.search(said))
        return f"{_ALLOW_PTRACE} ({said})" if denied else f"exit {ran.code}: {said}"

    def _resume(self, before: _Seen, name: str) -> None:
        """A py-spy that is killed while it holds its target can leave it stopped, which turns a rank that
        hangs into one that is frozen. What was running before runs again; the stop may still be pending.
        """
        for _ in range(5):
            if _look(self.pid).start_ticks == before.start_ticks and _stopping(self.pid):
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGCONT)
                self.failed.append(f"{name}: left process {self.pid} stopped, sent SIGCONT")
                return
            time.sleep(0.02)


def _stopping(pid: int) -> bool:
    """Whether a thread is stopped or about to be: a SIGSTOP stays pending while it is in the kernel."""
    for _, status in _tasks(pid):
        pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
        if status.get("State", "")[:1] == "T" or pending & _SIGSTOP_BIT:
            return True
    return False


def _tasks(pid: int) -> Iterable[tuple[Path, dict[str, str]]]:
    """Folder and status of each thread that is still there."""
    try:
        folders = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda folder: int(folder.name))
    except OSError:
        return
    for folder in folders:
        lines = (line.partition(":") for line in _text_of(folder / "status").splitlines())
        status = {key: value.strip() for key, _, value in lines}
        if status:
            yield folder, status


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _proc_text(pid: int) -> str:
    """What the kernel says of each thread: where a process is stuck that no tool can read."""
    lines = []
    for folder, status in _tasks(pid):
        call = _text_of(folder / "syscall") or "not readable"
        wchan = _text_of(folder / "wchan") or "not readable"
        cpu_ticks = _text_of(folder / "stat").rpartition(")")[2].split()[11:13]
        lines.append(
            f"Thread {folder.name} {status.get('Name', '')!r}: state {status.get('State', '?')}, "
            f"wchan {wchan}, syscall {call}, CPU ticks (user, system) {' '.join(cpu_ticks)}"
        )
        lines += [f"    {frame}" for frame in _text_of(folder / "stack").splitlines()]
    return "\n".join(lines) + "\n" if lines else ""


# ---- two samples --------------------------------------------------------------------------------------

_AT_ONCE = 64  # the samples mostly wait for py-spy, and one that is stuck must not hold up the others
_FIRST_WAY = 0.6  # of a sample's time: what is left is for the way that works without stopping the process
_RECORDER_S = 2.0


def _look_twice(request: dict[str, Any]) -> dict[str, Any]:
    """What each process does: all are looked at side by side, then a pause, then all again. With a gap of 0
    they are looked at once. What is stopped stays stopped.
    """
    began, deadline_s, gap_s = time.monotonic(), float(request["deadline_s"]), float(request["gap_s"])
    until = began + deadline_s
    stacks = bool(request.get("stacks", True))
    py_spy = (request.get("py_spy") or _find_py_spy()) if stacks else ""
    subjects = [
        _Subject(int(one["pid"]), str(one.get("worker_server") or ""), py_spy, stacks=stacks)
        for one in request["processes"]
    ]
    turns = 2 if gap_s > 0 else 1
    each_s = max(0.0, deadline_s * 0.95 - gap_s) / turns
    for turn in range(turns):
        if turn:
            time.sleep(min(gap_s, _left(until)))
        end = min(until, time.monotonic() + each_s)
        looks = [partial(subject.look, turn, end - each_s / 10) for subject in subjects]
        _in_parallel(looks, end, at_once=_AT_ONCE)
    return {"looks": {str(subject.pid): subject.answer(turns) for subject in subjects}}


class _Subject:
    """One process that is looked at. Its samples are filled in as facts arrive, so that what is late is cut
    and not lost.
    """

    def __init__(self, pid: int, worker_server: str, py_spy: str, *, stacks: bool) -> None:
        self.pid = pid
        self.worker_server = worker_server
        self.py_spy = py_spy
        self.stacks = stacks
        self.start_ticks = 0
        self.samples: list[dict[str, Any] | None] = [None, None]
        self.finished = [False, False]
        self.failed: list[str] = []

    def look(self, turn: int, until: float) -> None:
        """Take sample number `turn`."""
        if turn and not self.finished[0]:
            return  # the first is still stuck in there
        try:
            self._take(turn, until)
        except Exception as error:  # noqa: BLE001  one process must not cost the others their samples
            self._fail(f"internal: {error!r}")
        self.finished[turn] = True

    def answer(self, turns: int) -> dict[str, Any]:
        """What is known by now; a sample that is still being taken is copied as far as it got."""
        taken = [dict(sample) for sample in self.samples if sample is not None]
        late = [name for turn, name in enumerate(("first", "second")[:turns]) if not self.finished[turn]]
        cut = [f"cut: the {name} sample did not end in time" for name in late]
        return {
            "start_ticks": self.start_ticks,
            "state": taken[-1]["state"] if taken else "",
            "samples": taken,
            "ticks_per_s": os.sysconf("SC_CLK_TCK"),
            "failed": [*self.failed, *cut],
        }

    def _fail(self, reason: str) -> None:
        if reason not in self.failed:  # both samples fail alike
            self.failed.append(reason)

    def _take(self, turn: int, until: float) -> None:
        seen = _look(self.pid)
        gone = f"process {self.pid} {'has ended (zombie)' if seen.state == 'Z' else 'is gone'}"
        if seen.start_ticks and self.start_ticks and seen.start_ticks != self.start_ticks:
            seen, gone = _NOBODY, f"pid {self.pid} became another process"
        self.start_ticks = self.start_ticks or seen.start_ticks
        sample: dict[str, Any] = {
            "state": seen.state,
            "at_s": time.monotonic(),
            **_used(self.pid, alive=not seen.ended),
            "threads": [],
            "flight_recorder": None,
        }
        self.samples[turn] = sample
        if seen.ended:
            self._fail(gone)
        elif self.stacks:
            sample["threads"] = self._threads(sample, until)
            sample["flight_recorder"] = self._recorder(seen, until)

    def _threads(self, sample: dict[str, Any], until: float) -> list[Any]:
        """Stacks without native frames: 0.1 s, and the process stands still for some milliseconds of it."""
        if not self.py_spy:
            self._fail("py-spy: not beside this Python and not in PATH; install py-spy on the nodes")
            return []
        in_kernel = "D" in sample["threads_state"].values()
        # A thread in the kernel does not stop for ptrace before it is out again.
        ways = (("--nonblocking",),) if in_kernel else ((), ("--nonblocking",))
        dump = _Dump(self.pid, self.py_spy, 0.0, until)
        threads = dump.read_threads(ways, _left(until) * _FIRST_WAY)
        for reason in dump.failed:
            self._fail(reason)
        return threads

    def _recorder(self, seen: _Seen, until: float) -> dict[str, Any] | None:
        if not self.worker_server:
            return None
        if seen.stopped:
            self._fail("Flight Recorder: the process is stopped, so not asked")
            return None
        try:
            return {"groups": _recorded(self.worker_server, min(until, time.monotonic() + _RECORDER_S))}
        except (_Failure, OSError, ValueError) as error:
            reason = error.detail if isinstance(error, _Failure) else str(error)
            self._fail(f"Flight Recorder: {reason}")
            return None


def _used(pid: int, *, alive: bool) -> dict[str, Any]:
    """CPU and bytes that a process has used since it began, and what its threads do. Pages that are mapped
    come in without a call to read, so what the storage layer moved is told as well.
    """
    threads = {folder.name: _stat(folder) for folder in _task_folders(pid)} if alive else {}
    there = {name: stat for name, stat in threads.items() if stat}
    own = _stat(Path(f"/proc/{pid}")) if alive else []
    lines = (line.partition(": ") for line in _text_of(Path(f"/proc/{pid}/io")).splitlines())
    io = {name: int(count) for name, _, count in lines if count.isdigit()} if alive else {}
    return {
        "cpu_ticks": _cpu_ticks(own) if own else None,
        "io_bytes": io["rchar"] + io["wchar"] if "rchar" in io else None,
        "storage_bytes": io["read_bytes"] + io["write_bytes"] if "read_bytes" in io else None,
        "threads_cpu_ticks": {name: _cpu_ticks(stat) for name, stat in there.items()},
        "threads_state": {name: stat[0] for name, stat in there.items()},
    }


def _task_folders(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _stat(folder: Path) -> list[str]:
    """Fields of a stat file from the state on; empty where the thread has ended."""
    return _text_of(folder / "stat").rpartition(")")[2].split()


def _cpu_ticks(stat: list[str]) -> int:
    return int(stat[11]) + int(stat[12])  # user and system


# ---- Flight Recorder ----------------------------------------------------------------------------------

# Two recorders: what NCCL does is not in the one that gloo writes to, and a build without CUDA has only that.
_RECORDERS = (("nccl ", "dump_nccl_trace_json?includecollectives=false"), ("", "fr_trace_json"))
_OK = 200


def _recorded(worker_server: str, until: float) -> list[dict[str, Any]]:
    """Sequence numbers of the last collective of each process group: enqueued, and completed.

    Raises:
        _Failure: the worker server has no recorder, or does not answer in time.
        OSError: it cannot be reached.
        ValueError: it answers something else.
    """
    groups: list[dict[str, Any]] = []
    refusals = []
    for prefix, handler in _RECORDERS:
        code, body = _post(worker_server, handler, until)
        if code == _OK:
            groups += _groups_of(prefix, json.loads(body))
        else:
            refusals.append(f"{handler.partition('?')[0]} {code}")
    if len(refusals) == len(_RECORDERS):
        raise _Failure("malformed", f"the worker server refuses it ({', '.join(refusals)})")
    return groups


def _post(worker_server: str, handler: str, until: float) -> tuple[int, bytes]:
    """Ask torch's worker server over its unix socket; a slow peer costs no more than the time there is."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(max(0.01, _left(until)))
        sock.connect(worker_server)
        sock.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
        chunks: list[bytes] = []
        while True:
            chunk = _receive(sock, until)
            if chunk is None:
                raise _Failure("no_answer", "the worker server does not answer in time")
            if not chunk:
                break
            chunks.append(chunk)
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():  # noqa: PLR2004  protocol and status
        raise _Failure("malformed", f"the worker server answers {head[:60]!r}")
    return int(words[1]), body


def _groups_of(prefix: str, dump: Any) -> list[dict[str, Any]]:
    """The numbers are numbers in some versions and text in others."""
    if not isinstance(dump, dict):
        raise ValueError(f"the worker server sent {type(dump).__name__} for a dump")  # noqa: TRY004  as json does
    groups = []
    for group, status in (dump.get("pg_status") or {}).items():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            enqueued, completed = status["last_enqueued_collective"], status["last_completed_collective"]
            groups.append({"group": prefix + group, "enqueued": int(enqueued), "completed": int(completed)})
    return groups


# ---- kill ---------------------------------------------------------------------------------------------


def _kill(request: dict[str, Any]) -> dict[str, Any]:
    """SIGKILL to each target that still is the process it was: pids are used again."""
    deadline_s = float(request.get("deadline_s", _LOOK_S))
    until = time.monotonic() + deadline_s
    targets = {int(target["pid"]): target for target in request["targets"]}
    outcomes: dict[int, dict[str, str]] = {}

    def killer(target: dict[str, Any]) -> Callable[[], None]:
        return lambda: outcomes.update({int(target["pid"]): _kill_one(target, until)})

    _in_parallel(map(killer, targets.values()), until + 1.0)
    late = _outcome("refused", f"not finished within {deadline_s:g} s")
    return {"outcomes": {str(pid): outcomes.get(pid, late) for pid in targets}}


def _outcome(outcome: str, reason: str) -> dict[str, str]:
    return {"outcome": outcome, "reason": reason}


def _kill_one(target: dict[str, Any], until: float) -> dict[str, str]:
    pid = int(target["pid"])
    if pid <= 1 or pid == os.getpid():
        return _outcome("refused", f"pid {pid} is never killed")
    fd = None
    try:
        fd = _pidfd(pid)  # before the checks: it goes on naming this process when the pid is used again
        doubt = _doubt(pid, target)
        if doubt:
            return doubt
        if fd is None:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return _await_end(pid, int(target["start_ticks"]), fd, until)
    except ProcessLookupError:
        return _outcome("gone", "no such process")
    except OSError as error:
        return _outcome("refused", f"SIGKILL to {pid}: {error.strerror or error}")
    finally:
        if fd is not None:
            os.close(fd)


def _pidfd(pid: int) -> int | None:
    """A descriptor of the process, None where kernel or sandbox have none.

    Raises:
        OSError: there is no such process (ProcessLookupError), or the number is that of a thread.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENODEV):
            return None
        raise


def _doubt(pid: int, target: dict[str, Any]) -> dict[str, str] | None:
    """Why this process is not to be killed; None where it is the one that was meant."""
    seen = _look(pid)
    if seen.ended:
        return _outcome("gone", "already a zombie" if seen.state == "Z" else "no such process")
    if seen.start_ticks != int(target["start_ticks"]):
        meant = int(target["start_ticks"])
        return _outcome("refused", f"pid {pid} started at tick {seen.start_ticks}, not {meant}: another one")
    cmdline = _cmdline(pid)
    prefix = str(target["cmdline_prefix"])
    if not cmdline.startswith(prefix):
        return _outcome("refused", f"pid {pid} runs {cmdline[:100]!r}, not {prefix!r}")
    return None


def _await_end(pid: int, start_ticks: int, fd: int | None, until: float) -> dict[str, str]:
    if fd is not None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if poller.poll(_left(until) * 1000):
            return _outcome("killed", "")
    while True:
        seen = _look(pid)
        if seen.ended or seen.start_ticks != start_ticks:
            return _outcome("killed", "")
        if not _left(until):
            return _outcome("refused", f"SIGKILL was sent, but pid {pid} is still in state {seen.state}")
        time.sleep(0.02)


# ---- the entry ----------------------------------------------------------------------------------------

_OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ras_status": _ras_status,
    "identify": _identify,
    "dump_stacks": _dump_stacks,
    "look": _look_twice,
    "kill": _kill,
}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Do one operation. Never raises: the caller is on another machine.

    Args:
        request: `op` (ras_status, identify, dump_stacks, look or kill) and its fields.

    Returns:
        `ok` True and the fields of the result; or `ok` False, `code` (that of a RasError, bad_request or
        internal) and `detail`, a sentence.
    """
    try:
        operation = _OPERATIONS.get(request["op"])
        if operation is None:
            raise _Failure("bad_request", f"There is no operation {request['op']!r}.")  # noqa: TRY301
        return {"ok": True, **operation(request)}
    except _Failure as failure:
        return {"ok": False, "code": failure.code, "detail": failure.detail}
    except Exception as error:  # noqa: BLE001  the promise above
        return {"ok": False, "code": "internal", "detail": repr(error)}


def _main() -> None:
    """Answer one request in JSON; bytes become text that `.encode("utf-8", "surrogateescape")` undoes."""
    answer = handle(json.loads(sys.argv[1]))
    print(json.dumps(answer, default=lambda raw: raw.decode("utf-8", "surrogateescape")))  # noqa: T201


if __name__ == "__main__" and len(sys.argv) == 2:  # noqa: PLR2004  a request was given
    _main()
