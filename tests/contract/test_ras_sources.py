"""Both ways to ask RAS, over the real protocol: the same answers and the same errors."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from deployments.demo.ras_report import render_json
from deployments.demo.ras_server import RasServer, RasSnapshot
from tasks.adapters.local_node import LocalNode
from tasks.adapters.process import start_ticks
from tasks.adapters.ras import NodeRas
from tasks.hang.errors import (
    NodeError,
    RasDisabled,
    RasError,
    RasMalformed,
    RasNoAnswer,
    RasNoBinary,
    RasTooOld,
    RasTruncated,
    RasUnreachable,
    RasWrongJob,
    SettingsError,
)
from tasks.hang.run import Node
from tests.ras_jobs import OURS, STANDIN, THEIRS, ScriptedServer, attempt, free_port, job, until

HANDSHAKE = (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n")


@pytest.fixture(params=["socket", "ncclras_cli"])
def ask(request):
    """Makes a source that asks at an address; a generous deadline unless the test is about it."""

    def make(addr, *, node_port=None, deadline_s=30.0, **options):
        options = {"binary": str(STANDIN), **options}
        return NodeRas(
            node_port or LocalNode(),
            method=request.param,
            addr=addr,
            collect_timeout_s=1,
            deadline_s=deadline_s,
            **options,
        )

    return make


class Nodes:
    """Real node parts; each node has a RAS address of its own, or cannot be reached at all (None)."""

    def __init__(self, addresses: Mapping[str, str | None]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        self.asked.append(node.ip)
        addr = self.addresses[node.ip]
        if addr is None:
            raise NodeError(f"Node {node.ip} is gone.", "Look at the node.")
        return LocalNode().call(node, {**request, "addr": addr}, deadline_s=deadline_s)


def spread(nodes: int) -> RasSnapshot:
    """The job of `attempt(nodes=nodes)`: each process on the node that it was dealt to."""
    world = job().communicators[0]
    ranks = [replace(rank, host=f"10.0.0.{rank.rank % nodes + 1}") for rank in world.ranks]
    return RasSnapshot(communicators=[replace(world, ranks=ranks)])


def refused() -> str:
    return f"127.0.0.1:{free_port()}"


def test_healthy(ask):
    with RasServer(job) as server:
        (raw,) = ask(server.addr).status(attempt())
        document = json.loads(raw)
        assert [rank["pid"] for rank in document["communicators"][0]["ranks"]] == list(OURS)


def test_text_for_people(ask):
    with RasServer(job) as server:
        text = ask(server.addr).text(attempt())
    assert text.startswith("NCCL version 2.30.7")
    assert "\nJob summary\n" in text
    assert text.rstrip().endswith("========")


def test_an_answer_that_lacks_a_comma_comes_through_as_received(ask):
    lost = job(OURS[:3], missing=OURS[3:])
    with RasServer(lambda: lost, missing_comma=True) as server:
        (raw,) = ask(server.addr).status(attempt())
    assert b'"nvml_dev": 0\n          "status"' in raw


def test_large_answers_arrive_whole(ask):
    pids = range(5_000_000, 5_004_000)
    with RasServer(lambda: job(pids)) as server:
        (raw,) = ask(server.addr).status(attempt(pids[-1:]))
    assert len(json.loads(raw)["communicators"][0]["ranks"]) == 4000


def test_nothing_listens(ask):
    addr = refused()
    with pytest.raises(RasUnreachable) as caught:
        ask(addr).status(attempt())
    assert addr in caught.value.what
    assert "10.0.0.1" in caught.value.what
    assert "NCCL_RAS_ADDR" in caught.value.fix


def test_name_that_does_not_exist(ask):
    with pytest.raises(RasUnreachable, match=r"no\.such\.host\.invalid"):
        ask("no.such.host.invalid").status(attempt())


@pytest.mark.parametrize(("value", "error"), [("0", RasDisabled), ("1", RasUnreachable)])
def test_refused_by_a_job_that_switched_ras_off(ask, value, error):
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    environment = {"NCCL_RAS_ENABLE": value, "SECRET": "never-shown"}
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"up\n"
        with pytest.raises(RasError) as caught:
            ask(refused()).status(attempt([rank.pid]))
        rank.communicate(b"\n")
    assert type(caught.value) is error
    assert "never-shown" not in str(caught.value)


def test_too_old_for_json_but_not_for_text(ask):
    with RasServer(
        lambda: RasSnapshot(communicators=[], nccl_version="2.27.5"), json_supported=False
    ) as server:
        with pytest.raises(RasTooOld, match="SET FORMAT"):
            ask(server.addr).status(attempt())
        assert "NCCL version 2.27.5" in ask(server.addr).text(attempt())


def test_takes_the_connection_and_is_silent(ask):
    with RasServer(job, silent=True) as server, pytest.raises(RasNoAnswer):
        ask(server.addr, deadline_s=2.5).status(attempt())


def test_gives_up_reconnecting_before_the_deadline():
    with RasServer(job, silent=True) as server:
        request = {
            "op": "ras_status",
            "method": "socket",
            "addr": server.addr,
            "format": "json",
            "collect_timeout_s": 1,
            "deadline_s": 60.0,
            "reconnects": 1,
            "pids": [],
        }
        answer = LocalNode().call(attempt().nodes[0], request, deadline_s=60.0)
        assert answer["code"] == "no_answer"
        assert server.connections == 2


def test_reconnects_to_another_process_of_the_node(ask):
    with RasServer(job, silent_first=1) as server:
        ask(server.addr).status(attempt())
        assert server.connections >= 2


def test_handshakes_and_never_reports(ask):
    stuck = threading.Event()

    def snapshot():
        stuck.wait(60)
        return job()

    with RasServer(snapshot) as server:
        with pytest.raises(RasNoAnswer):
            ask(server.addr, deadline_s=1.5).status(attempt())
        stuck.set()


@pytest.mark.parametrize("mark", [b"[\n    {\n", b"        },\n", b"        }\n", b"\n  }\n"])
def test_ends_in_the_middle(ask, mark):
    cut = render_json(job()).index(mark) + len(mark)
    with RasServer(job, truncate_at=cut) as server, pytest.raises(RasTruncated, match=str(cut)):
        ask(server.addr).status(attempt())


def test_text_that_ends_in_the_middle(ask):
    with RasServer(job, truncate_at=300) as server, pytest.raises(RasTruncated):
        ask(server.addr).text(attempt())


@pytest.mark.parametrize("replies", [(), HANDSHAKE[:1], HANDSHAKE])
def test_closes_before_it_reports(ask, replies):
    with ScriptedServer(replies) as server, pytest.raises(RasTruncated):
        ask(server.addr).status(attempt())


@pytest.mark.parametrize(
    "replies",
    [
        (b"HTTP/1.1 400 Bad Request\r\n",),
        (b"SERVER PROTOCOL 2\n", b"ERROR: Invalid timeout value 1\n"),
        (*HANDSHAKE, b"hello\n"),
    ],
)
def test_is_no_ras(ask, replies):
    with ScriptedServer(replies) as server, pytest.raises(RasMalformed):
        ask(server.addr).status(attempt())


@pytest.mark.parametrize("replies", [(b"SERVER PROTOCOL 2",), (*HANDSHAKE, b"{\n")])
def test_never_stops_sending(ask, replies):
    with ScriptedServer(replies, endless=b" ") as server, pytest.raises(RasNoAnswer):
        ask(server.addr, deadline_s=1.0).status(attempt())


def test_no_binary(tmp_path):
    not_executable = tmp_path / "ncclras"
    not_executable.write_text("")
    for binary in ("/no/such/ncclras", str(not_executable)):
        source = NodeRas(LocalNode(), method="ncclras_cli", binary=binary)
        with pytest.raises(RasNoBinary, match="ncclras") as caught:
            source.status(attempt())
        assert caught.value.permanent


def test_client_without_json(monkeypatch):
    monkeypatch.setenv("STANDIN_NCCLRAS_OLD", "1")
    with RasServer(job) as server:
        source = NodeRas(LocalNode(), method="ncclras_cli", addr=server.addr, binary=str(STANDIN))
        with pytest.raises(RasTooOld, match="invalid option"):
            source.status(attempt())
        assert "Job summary" in source.text(attempt())


def test_client_that_never_ends_is_ended_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    wrapper = tmp_path / "ncclras"
    wrapper.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! > {pid_file}.new\nmv {pid_file}.new {pid_file}\nwait\n"
    )
    wrapper.chmod(0o755)
    source = NodeRas(LocalNode(), method="ncclras_cli", binary=str(wrapper), deadline_s=3.0)
    with pytest.raises(RasNoAnswer):
        source.status(attempt())
    child = int(pid_file.read_text())
    until(lambda: start_ticks(child) is None)


@pytest.mark.parametrize("address", sorted({a[4][0] for a in socket.getaddrinfo("localhost", 1)}))
def test_any_address_of_the_name(ask, address):
    with RasServer(job, host=address) as server:
        ask(f"localhost:{server.address[1]}").status(attempt())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6(ask):
    with RasServer(job, host="::1") as server:
        assert server.addr.startswith("[::1]:")
        ask(server.addr).status(attempt())
        ask(f"[::]:{server.address[1]}").status(attempt())


def test_next_node_answers_and_is_asked_first_from_then_on(ask):
    with RasServer(lambda: spread(2)) as server:
        nodes = Nodes({"10.0.0.1": refused(), "10.0.0.2": server.addr})
        source = ask("", node_port=nodes)
        source.status(attempt(nodes=2))
        source.status(attempt(nodes=2))
        assert nodes.asked == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_asks_few_nodes_and_goes_on_where_it_stopped(ask):
    with RasServer(lambda: spread(4)) as server:
        lost = {f"10.0.0.{i}": refused() for i in (1, 2, 3)}
        nodes = Nodes({**lost, "10.0.0.4": server.addr})
        source = ask("", node_port=nodes)
        with pytest.raises(RasUnreachable):
            source.status(attempt(nodes=4))
        source.status(attempt(nodes=4))
        assert nodes.asked == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]


def test_no_further_node_when_the_time_is_over():
    nodes = Nodes(dict.fromkeys(("10.0.0.1", "10.0.0.2")))
    with pytest.raises(RasNoAnswer):
        NodeRas(nodes, deadline_s=0.0).status(attempt(nodes=2))
    assert nodes.asked == ["10.0.0.1"]


def test_a_node_that_is_gone_is_no_end(ask):
    with RasServer(job) as server:
        nodes = Nodes({"10.0.0.1": None, "10.0.0.2": server.addr})
        ask("", node_port=nodes).status(attempt(nodes=2))
    with pytest.raises(RasNoAnswer, match=r"Node 10\.0\.0\.1 is gone") as caught:
        ask("", node_port=Nodes({"10.0.0.1": None})).status(attempt())
    assert caught.value.fix == "Look at the node."


@pytest.mark.parametrize("old_first", [True, False])
def test_one_node_alone_does_not_make_an_error_permanent(ask, old_first):
    with RasServer(job, json_supported=False) as server:
        addresses = [server.addr, refused()] if old_first else [refused(), server.addr]
        nodes = Nodes(dict(zip(("10.0.0.1", "10.0.0.2"), addresses, strict=True)))
        with pytest.raises(RasUnreachable) as caught:
            ask("", node_port=nodes).status(attempt(nodes=2))
        assert not caught.value.permanent
        both = Nodes(dict.fromkeys(("10.0.0.1", "10.0.0.2"), server.addr))
        with pytest.raises(RasTooOld):
            ask("", node_port=both).status(attempt(nodes=2))


def test_nodes_that_disagree_in_permanent_errors():
    class Two:
        def call(self, node, *_, **__):
            code = "too_old" if node.ip == "10.0.0.1" else "disabled"
            return {"ok": False, "code": code, "detail": f"said {code}"}

    with pytest.raises(RasUnreachable, match=r"said too_old.*said disabled"):
        NodeRas(Two()).status(attempt(nodes=2))


def test_another_job_answers_once(ask):
    answers = [job(THEIRS), job()]
    with RasServer(lambda: answers.pop(0)) as server:
        (raw,) = ask(server.addr).status(attempt())
    assert b"5000001" in raw


def test_another_job_answers_always(ask):
    with RasServer(lambda: job(THEIRS)) as server:
        nodes = Nodes(dict.fromkeys(("10.0.0.1", "10.0.0.2"), server.addr))
        with pytest.raises(RasWrongJob) as caught:
            ask("", node_port=nodes).status(attempt(nodes=2))
        assert "NCCL_RAS_ADDR" in caught.value.fix
        assert nodes.asked == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_one_of_our_processes_is_enough_even_if_missing(ask):
    with RasServer(lambda: job(THEIRS, missing=OURS[:1])) as server:
        ask(server.addr).status(attempt())


def test_a_report_without_communicators_is_a_report(ask):
    with RasServer(lambda: RasSnapshot(communicators=[])) as server:
        assert json.loads(ask(server.addr).status(attempt())[0])["communicators"] == []


def test_a_run_without_ranks(ask):
    with pytest.raises(RasUnreachable, match="no ranks"):
        ask("").status(attempt([]))


@pytest.mark.parametrize("options", [{"addr": "::1"}, {"addr": "host:"}, {"collect_timeout_s": 0}])
def test_settings_that_cannot_be_right(options):
    with pytest.raises(SettingsError):
        NodeRas(LocalNode(), **options)


def test_a_defect_of_ours_is_told_as_one():
    with pytest.raises(RasNoAnswer, match="defect"):
        NodeRas(LocalNode(), method="carrier pigeon").status(attempt())


def test_local_node_leaves_behind_what_is_stuck(monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr("tasks.adapters.node_part.handle", lambda *_: stuck.wait(60))
    with pytest.raises(NodeError, match="identify"):
        LocalNode().call(attempt().nodes[0], {"op": "identify"}, deadline_s=0.05)
    stuck.set()
