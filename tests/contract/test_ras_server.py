"""The demo's RAS server against recorded answers of NVIDIA's: what was asked then is asked again."""

import ast
import json
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deployments.demo.ras_report import render_json
from deployments.demo.ras_server import RasServer, RasSnapshot
from deployments.demo.ras_text import render_text
from tests.ras_jobs import DATA, OURS, job, until

_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s*\n\s*"status")')
_VARYING = re.compile(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|(?<="collection_time_sec": )\d+\.\d+|\(\d+\.\d+s\)')
RECORDED = sorted(path.relative_to(DATA) for path in DATA.glob("v2.*/**/*.json"))
# Processes without a communicator are counted in NVIDIA's job summary; a snapshot does not know them.
_WITHOUT_SUMMARY = {"no_communicators_n8.txt", "bootstrap_not_finished_n4.txt"}
TEXTS = sorted(
    path.relative_to(DATA)
    for path in DATA.glob("v2.3*/*.txt")
    if path.with_name(path.name.split(".")[0] + ".json").exists()
)


def steady(text: str) -> str:
    """Without what differs from one query to the next."""
    return _VARYING.sub("~", text)


def recorded(path: Path) -> tuple[str, RasSnapshot, bool]:
    text = path.read_text()
    valid = _COMMA.sub(r"\1,\2", text)
    return text, RasSnapshot.from_json(json.loads(valid)), valid != text


def test_there_are_recordings():
    assert len(RECORDED) > 60
    assert len(TEXTS) > 30


@pytest.mark.parametrize("name", RECORDED, ids=str)
def test_json_has_the_bytes_of_nvidias_server(name):
    text, snapshot, missing_comma = recorded(DATA / name)
    assert steady(render_json(snapshot, missing_comma=missing_comma).decode()) == steady(text)


@pytest.mark.parametrize("name", TEXTS, ids=str)
def test_text_has_the_sections_and_sentences_of_nvidias_server(name):
    path = DATA / name
    _, snapshot, _ = recorded(path.with_name(path.name.split(".")[0] + ".json"))
    drawn = b"".join(render_text(snapshot, verbose=".verbose." in path.name)).decode()
    want = path.read_text()
    if path.name in _WITHOUT_SUMMARY:
        want, drawn = (text[text.index("Communicators...") :] for text in (want, drawn))
    assert steady(drawn) == steady(want)


@dataclass(frozen=True)
class Exchange:
    """One recorded connection."""

    title: str
    sent: bytes
    head: str
    tail: str
    size: int
    end: str


def exchanges(version: str) -> list[Exchange]:
    blocks = (DATA / version / "protocol_transcripts.txt").read_text().split("### ")[1:]
    return [_exchange(block) for block in blocks]


def _exchange(block: str) -> Exchange:
    title, sent, received, end = block.strip().split("\n")
    answer = ast.literal_eval(received.removeprefix("< "))
    shortened = re.fullmatch(r"(.*)\n\.\.\. \((\d+) bytes\) \.\.\.\n(.*)", answer, re.DOTALL)
    head, size, tail = shortened.groups() if shortened else (answer, len(answer), "")
    return Exchange(title, ast.literal_eval(sent.removeprefix("> ")), head, tail, int(size), end)


CASES = [
    pytest.param(version, exchange, id=f"{version}-{exchange.title}")
    for version in ("v2.30.7", "v2.27.5")
    for exchange in exchanges(version)
]


@pytest.fixture(scope="module")
def servers():
    # The job of the transcripts: its JSON has the same size, 2631 bytes.
    _, snapshot, _ = recorded(DATA / "v2.30.7" / "init_unvalid_comm_sorts_last_n4.json")
    old = replace(snapshot, nccl_version="2.27.5")
    with RasServer(lambda: snapshot) as new, RasServer(lambda: old, json_supported=False) as older:
        yield {"v2.30.7": new, "v2.27.5": older}


def read_to_end(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(("version", "exchange"), CASES)
def test_answers_as_recorded(servers, version, exchange):
    with socket.create_connection(servers[version].address, timeout=10) as connection:
        if exchange.title == "byte by byte":
            for byte in exchange.sent:
                connection.sendall(bytes([byte]))
        else:
            connection.sendall(exchange.sent)
        if "half close" in exchange.title:
            connection.shutdown(socket.SHUT_WR)
        if exchange.end.startswith("end: ConnectionReset"):
            with pytest.raises(ConnectionResetError):
                read_to_end(connection)
            return
        probe = ""
        if exchange.end.startswith("end: still open"):
            # The answer to one more command proves that nothing else was said and that it is open.
            connection.sendall(b"X\n")
            unfinished = exchange.sent.rpartition(b"\n")[2].decode()
            probe = f"ERROR: Unknown command {unfinished}X\n"
            connection.shutdown(socket.SHUT_WR)
        got = read_to_end(connection).decode()
    assert len(got) == exchange.size + len(probe)
    assert got.endswith(probe)
    got = got.removesuffix(probe)
    assert steady(got[: len(exchange.head)]) == steady(exchange.head)
    assert steady(got).endswith(steady(exchange.tail))


def test_truncates_at():
    with RasServer(job, truncate_at=100) as server, socket.create_connection(server.address, 10) as client:
        client.sendall(b"SET FORMAT json\nSTATUS\n")
        assert read_to_end(client) == b"OK\n" + render_json(job())[:100]


def test_missing_comma_only_where_ranks_are_missing():
    lost = job(OURS[:3], missing=OURS[3:])
    broken = render_json(lost, missing_comma=True)
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    assert json.loads(_COMMA.sub(r"\1,\2", broken.decode()))["communicators"][0]["missing_ranks_count"] == 1
    json.loads(render_json(job(), missing_comma=True))


def test_servers_share_a_port_like_the_processes_of_a_job():
    with RasServer(job) as first, RasServer(job, port=first.address[1]) as second:
        assert first.address == second.address
        for _ in range(64):
            with socket.create_connection(first.address, timeout=10) as client:
                client.sendall(b"STATUS\n")
                assert read_to_end(client).startswith(b"NCCL version")
        assert first.connections + second.connections == 64
        assert first.connections
        assert second.connections


def test_close_ends_open_connections_and_frees_the_port():
    server = RasServer(job, silent=True)
    with socket.create_connection(server.address, timeout=10) as client:
        until(lambda: server.connections == 1)
        server.close()
        assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, timeout=10)
