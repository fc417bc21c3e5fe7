"""The stand-in of ncclras ends as the real client was recorded to end."""

import ast
import contextlib
import re
import socket
import subprocess
from dataclasses import dataclass

import pytest

from deployments.demo.ras_server import RasServer
from tests.ras_jobs import DATA, STANDIN, ScriptedServer, free_port, job

_RECORD = re.compile(
    r"### (?P<title>.*)\n\$ ncclras (?P<args>.*)\nexit: (?P<exit>.*?)   wall: .*\n"
    r"stdout: (?P<size>\d+) bytes (?P<stdout>.*)\nstderr: (?P<stderr>.*)\n"
)


@dataclass(frozen=True)
class Record:
    title: str
    args: list[str]
    exit: str
    stdout: str
    stderr: str


RECORDS = {
    found["title"]: Record(
        found["title"],
        found["args"].split(),
        found["exit"],
        ast.literal_eval(found["stdout"]),
        ast.literal_eval(found["stderr"]),
    )
    for found in _RECORD.finditer((DATA / "v2.30.7" / "cli_failures.txt").read_text())
}
ENDLESS = ["listener accepts but never replies", "listener accepts but never replies, -t 0"]


def served(title: str) -> contextlib.AbstractContextManager[RasServer | ScriptedServer]:
    """The peer that the recorded case was asked of."""
    if title.startswith("server before 2.28.7"):
        return RasServer(job, json_supported=False)
    handshake = [b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n"]
    return ScriptedServer(
        {
            "server with another protocol number, emulated": [b"SERVER PROTOCOL 3\n", b"OK\n", b"{}\n"],
            "server closes in the middle of the reply, emulated": [*handshake, b'{"half":'],
            "server closes at once, emulated": [],
        }[title]
    )


def run(args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STANDIN, *args], capture_output=True, text=True, timeout=60, check=False)


def check(record: Record, ran: subprocess.CompletedProcess[str], stderr: str) -> None:
    assert ran.returncode == int(record.exit)
    assert ran.stdout == record.stdout
    # The recording keeps the first 600 characters.
    assert ran.stderr == stderr if len(stderr) < 600 else ran.stderr.startswith(stderr)


def test_all_cases_are_read():
    assert len(RECORDS) == 15


@pytest.mark.parametrize("title", [t for t, r in RECORDS.items() if "-h 127" not in " ".join(r.args)])
def test_without_a_peer(title):
    record = RECORDS[title]
    port = str(free_port())
    if title == "nothing listens":
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 28028)) == 0:
                pytest.skip("something listens at NCCL's default port")
    ran = run([port if arg == "28999" else arg for arg in record.args])
    if title.startswith("nothing listens"):  # where localhost is ::1 as well, that was tried before
        ran.stderr = ran.stderr[ran.stderr.index("Connecting to 127.0.0.1") :]
    check(record, ran, record.stderr.replace("28999", port))


@pytest.mark.parametrize("title", [t for t in RECORDS if "emulated" in t])
def test_with_a_peer(title):
    record = RECORDS[title]
    with served(title) as peer:
        host, port = peer.addr.split(":")
        known = {"127.0.1.1": host, "28997": port}
        check(record, run([known.get(arg, arg) for arg in record.args]), record.stderr)


@pytest.mark.parametrize("title", ENDLESS)
def test_never_ends_on_a_silent_peer(title):
    record = RECORDS[title]
    with RasServer(job, silent=True) as peer:
        host, port = peer.addr.split(":")
        known = {"127.0.1.1": host, "28998": port}
        args = [known.get(arg, arg) for arg in record.args]
        with subprocess.Popen([STANDIN, *args], stdout=-1, stderr=-1, text=True) as client:
            assert client.stderr is not None
            if record.stderr:
                first_lines = [client.stderr.readline() for _ in range(2)]
                assert first_lines == record.stderr.splitlines(keepends=True)[:2]
            else:
                with pytest.raises(subprocess.TimeoutExpired):  # silence can only be waited for
                    client.wait(timeout=1.5)
            assert client.poll() is None
            client.kill()
            stdout, _ = client.communicate()
        assert stdout == ""
