"""What people type, and what they are told when it cannot work: one sentence that names the field."""

import http.server
import socket
import sys
import threading
import uuid

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.cli import _merged, main
from tasks.blocks import HangWindow, TrainingRun
from tasks.hang.errors import RunNotFound, SettingsError
from tasks.ownership import now
from tasks.wiring import load_run


@pytest.fixture
def rankwatch(monkeypatch, capsys):
    """Run the command line; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankwatch", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        told = capsys.readouterr()
        return code, told.out, " ".join(told.err.split())

    return run


@pytest.fixture
def nobody():
    """host:port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


def add(rankwatch, tmp_path, nobody, *more, storage=None):
    address = ("--ray-address", nobody, "--ray-dashboard-url", f"http://{nobody}")
    return rankwatch("add", "ghost", *address, "--storage-path", storage or tmp_path, *more)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--poll-interval-s", "700"), "poll_interval_s (700 s) is longer than confirm_duration_s (600 s)"),
        (("--poll-interval-s", "0"), "poll-interval-s"),
        (("--confirm-duration-s", "-5"), "confirm-duration-s"),
        (("--ras-addr", "host:port:1"), "host:port:1"),
        (("--action", "kill"), "kill"),
        (("--source", "telepathy"), "telepathy"),
        (("--poll-interval-s", "soon"), "soon"),
        ((), "Nothing answers at ray_address"),
    ],
)
def test_what_cannot_work_is_refused_by_name_before_anything_starts(rankwatch, tmp_path, nobody, more, named):
    code, _, told = add(rankwatch, tmp_path, nobody, *more)
    assert code == 2
    assert named in told
    assert "Traceback" not in told
    with pytest.raises(RunNotFound):
        load_run("ghost")


@pytest.mark.parametrize("address", ["auto", "", "head", "http://head:1"])
def test_an_address_must_be_explicit(rankwatch, tmp_path, address):
    code, _, told = rankwatch("add", "ghost", "--ray-address", address, "--storage-path", tmp_path)
    assert code == 2
    assert "ray_address" in told or "ray-address" in told


def test_the_port_of_a_web_server_is_told_apart_at_once(rankwatch, tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        code, _, told = add(rankwatch, tmp_path, f"127.0.0.1:{web.server_port}")
        web.shutdown()
    assert code == 2
    assert "A web server answers at ray_address" in told


def test_a_known_run_keeps_what_is_not_given():
    name = f"run-{uuid.uuid4().hex[:6]}"
    fields = {"run_name": name, "ray_address": "h:1", "ray_dashboard_url": "http://h:1"}
    TrainingRun(**fields, storage_path="/old", action="fail", poll_interval_s=1).save(name)
    block, changes = _merged(name, {"storage_path": "/new"})
    assert (block.action, block.poll_interval_s, block.storage_path) == ("fail", 1, "/new")
    assert changes == ["storage_path: /old -> /new"]


def test_a_new_run_needs_its_addresses_by_name():
    with pytest.raises(SettingsError, match="--storage-path is needed"):
        _merged(f"run-{uuid.uuid4().hex[:6]}", {"ray_address": "h:1"})


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", "foo"])
def test_a_wrong_server_is_not_a_missing_run(rankwatch, url):
    with temporary_settings({PREFECT_API_URL: url}):
        code, _, told = rankwatch("status", "demo")
    assert code == 2
    assert "PREFECT_API_URL is" in told


def test_a_server_without_api_in_its_address_is_told(rankwatch):
    right = PREFECT_API_URL.value() or ""
    with temporary_settings({PREFECT_API_URL: right.removesuffix("/api")}):
        code, _, told = rankwatch("status", "demo")
    assert code == 2
    assert "no Prefect API" in told


def test_brackets_in_a_message_survive(rankwatch, tmp_path, nobody):
    code, _, told = add(rankwatch, tmp_path, nobody, "--ras-addr", "::1")
    assert code == 2
    assert "[ipv6]:port" in told


def test_a_storage_path_that_cannot_be_written_is_refused(rankwatch, tmp_path, nobody):
    (tmp_path / "file").write_text("not a folder")
    code, _, told = add(rankwatch, tmp_path, nobody, storage=tmp_path / "file" / "evidence")
    assert code == 2
    assert "storage_path" in told
    assert str(tmp_path / "file") in told


def test_a_store_that_this_version_has_not_is_refused(rankwatch, tmp_path, nobody):
    code, _, told = add(rankwatch, tmp_path, nobody, storage="s3://bucket/prefix")
    assert code == 2
    assert "s3://bucket/prefix" in told


def test_a_token_is_never_shown(rankwatch, tmp_path, nobody):
    code, out, told = add(rankwatch, tmp_path, nobody, "--ray-token", "hunter2-secret")
    assert code == 2
    assert "hunter2" not in out + told


def test_without_a_server_the_command_says_how_to_get_one(rankwatch, monkeypatch):
    monkeypatch.setattr("deployments.cli.LOCAL_SERVER", "http://127.0.0.1:9/api")
    with temporary_settings({PREFECT_API_URL: None}):
        code, _, told = rankwatch("status", "demo")
    assert code == 2
    assert "PREFECT_API_URL is not set" in told
    assert "rankwatch up" in told


def test_an_unknown_run_has_no_status(rankwatch):
    code, _, told = rankwatch("status", f"nobody-{uuid.uuid4().hex[:6]}")
    assert code == 2
    assert "rankwatch add" in told


def test_the_status_of_a_run_says_who_watches_it(rankwatch):
    name = f"run-{uuid.uuid4().hex[:6]}"
    TrainingRun(
        run_name=name, ray_address="h:1", ray_dashboard_url="http://h:1", storage_path="/nowhere"
    ).save(name)
    code, out, _ = rankwatch("status", name)
    assert (code, "no sign" in out) == (0, True)
    HangWindow(run_name=name, owner="far-away-1:2:3", heartbeat_at=now()).save(name)
    code, out, _ = rankwatch("status", name)
    assert (code, "far-away-1:2:3" in out) == (0, True)
