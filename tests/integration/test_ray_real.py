"""The Ray adapters against a real head: connecting and its refusals, node tasks, the key-value store.

A process can hold one connection only, so what needs another one runs in a driver of its own.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import ray

from tasks.adapters import ray_cluster, ray_init, ray_nodes
from tasks.adapters.ray_answers import parse_log
from tasks.adapters.ray_cluster import connect, disconnect
from tasks.adapters.ray_dashboard import RayDashboard
from tasks.adapters.ray_discovery import RayRunDirectory
from tasks.adapters.ray_kv import RayKv, RayVerdictChannel
from tasks.adapters.ray_nodes import RayNodes
from tasks.hang.errors import (
    ClusterAuthError,
    ClusterError,
    ClusterUnreachable,
    NodeError,
    RunNotFound,
    SettingsError,
    VersionMismatch,
)
from tasks.hang.run import Node
from tests.ray_head import REPOSITORY, free_ports, kill_session, members_of, ray_head, until

ODD_PART = """
import os, signal, time

def handle(request):
    if request["op"] == "sleep":
        with open(request["file"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    if request["op"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if request["op"] == "raise":
        raise OSError(28, "No space left on device")
    return 7
"""


@pytest.fixture(scope="session", autouse=True)
def prefect_server():
    """These tests need no Prefect server, unlike the others of this folder."""


@pytest.fixture(scope="module")
def head():
    with ray_head() as started:
        yield started


@pytest.fixture(scope="module")
def guarded():
    """A second head, with tokens."""
    with ray_head(token="right-token") as started:
        yield started


@pytest.fixture
def cluster(head):
    return connect(head.address, head.dashboard_url)


@pytest.fixture(scope="module", autouse=True)
def leave_at_the_end():
    yield
    disconnect()


@pytest.fixture
def node(cluster):
    found = next(row for row in ray.nodes() if row["Alive"])
    return Node(ip=found["NodeManagerAddress"], node_id=found["NodeID"])


@pytest.fixture
def no_init(monkeypatch):
    """Refused before ray.init, which would try for a while."""

    def refuse(*arguments):
        raise AssertionError(f"ray.init was reached with {arguments}")

    monkeypatch.setattr(ray_init, "init", refuse)


@pytest.fixture
def odd_part(tmp_path, monkeypatch):
    """Another module that travels by value."""
    part = types.ModuleType("odd_part")
    exec(ODD_PART, part.__dict__)
    monkeypatch.setitem(sys.modules, "odd_part", part)
    monkeypatch.setattr(ray_nodes, "node_part", part)
    return part


def drive(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run a driver of its own; its last line of output is what it found."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# ---- connecting ---------------------------------------------------------------------------------------


def test_connecting_twice_is_connecting_once(head, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.99:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "somebody else's")
    handler = signal.getsignal(signal.SIGTERM)
    first = connect(head.address, head.dashboard_url)
    driver = ray.get_runtime_context().get_job_id()
    second = connect(head.address, head.dashboard_url)
    assert second == first
    assert ray.get_runtime_context().get_job_id() == driver
    assert first.versions.ray == ray.__version__
    assert os.environ["RAY_ADDRESS"] == "192.0.2.99:1"
    assert os.environ["RAY_AUTH_TOKEN"] == "somebody else's"
    assert signal.getsignal(signal.SIGTERM) is handler


def test_leaving_and_coming_back(head):
    with connect(head.address, head.dashboard_url):
        assert ray.is_initialized()
    assert not ray.is_initialized()
    with pytest.raises(ClusterUnreachable, match="not connected"):
        RayKv().get("x")
    connect(head.address, head.dashboard_url)
    assert RayKv().get("x") is None


@pytest.mark.parametrize(
    "address", ["", "auto", "local", "head", "head:", ":6379", "http://head:6379", "h:0"]
)
def test_an_address_that_leaves_the_choice_to_ray(address, no_init):
    with pytest.raises(SettingsError, match="ray_address"):
        connect(address, "http://127.0.0.1:1")


def test_a_wrong_address_names_the_field(head, no_init):
    [port] = free_ports(1)
    with pytest.raises(ClusterUnreachable, match=rf"ray_address '127.0.0.1:{port}': Connection refused"):
        connect(f"127.0.0.1:{port}", head.dashboard_url)


def test_a_wrong_dashboard_names_the_field(head, no_init):
    [port] = free_ports(1)
    with pytest.raises(ClusterUnreachable, match=rf"127.0.0.1:{port} \(ray_dashboard_url\)"):
        connect(head.address, f"http://127.0.0.1:{port}")


def test_another_version_of_ray(head, no_init, monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "__version__", "2.9.3")
    with pytest.raises(VersionMismatch, match=r"runs Ray 2\.[0-9]+\.[0-9]+ on Python .* has Ray 2\.9\.3"):
        connect(head.address, head.dashboard_url)


def test_another_version_of_python(head, no_init, monkeypatch):
    monkeypatch.setattr(ray_cluster.platform, "python_version", lambda: "3.99.1")
    with pytest.raises(VersionMismatch, match=r"on Python 3\.99\.1"):
        connect(head.address, head.dashboard_url)


def test_what_listens_need_not_be_ray(head):
    """ray.init is given up at the deadline, is not started a second time beside the first, and does not
    keep the process from ending.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = drive(
            """
            import json, sys
            from tasks.adapters.ray_cluster import connect
            from tasks.hang.errors import ClusterUnreachable
            said = []
            for _ in range(2):
                try:
                    connect(*sys.argv[1:3], deadline_s=1.0)
                except ClusterUnreachable as error:
                    said.append(str(error))
            print(json.dumps({"said": said}))
            """,
            f"127.0.0.1:{silent.getsockname()[1]}",
            head.dashboard_url,
        )
    assert "(ray_address) listens, but Ray could not connect to it within 1 s" in found["said"][0]
    assert "ray://<head>:10001" in found["said"][0]
    assert "earlier attempt" in found["said"][1]


def test_nothing_is_shipped_under_uv(head, tmp_path):
    """`uv run` is seen by Ray in the parent's command line; it would send our folder to the nodes."""
    (tmp_path / "run").write_text('"$PYTHON" -c "$PROGRAM" "$@"\n')
    program = """
        import json, sys
        import ray
        from ray._private.runtime_env.uv_runtime_env_hook import _get_uv_run_cmdline
        from tasks.adapters.ray_cluster import connect
        connect(*sys.argv[1:3])
        context = ray.get_runtime_context()
        print(json.dumps({"uv": _get_uv_run_cmdline()[:2], "sent": dict(context.runtime_env)}))
    """
    done = subprocess.run(
        ["uv", "run", head.address, head.dashboard_url],
        executable="/bin/sh",
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHON": sys.executable,
            "PROGRAM": textwrap.dedent(program),
            "PYTHONPATH": str(REPOSITORY),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"A": "B"}}}',
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"uv": ["uv", "run"], "sent": {}}


# ---- tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "said"), [(None, "wants a token"), ("wrong-token", "refuses the token")])
def test_a_token_that_is_missing_or_wrong(guarded, no_init, token, said):
    with pytest.raises(ClusterAuthError, match=rf"{said}.*ray_token"):
        connect(guarded.address, guarded.dashboard_url, token)


def test_the_right_token_works_and_does_not_stay_in_the_environment(guarded):
    found = drive(
        """
        import json, os, sys
        import ray
        from tasks.adapters.ray_cluster import connect
        from tasks.adapters.ray_kv import RayKv
        from tasks.adapters.ray_nodes import RayNodes
        from tasks.hang.run import Node
        connect(*sys.argv[1:4])
        RayKv().put("x", b"1")
        [node] = ray.nodes()
        answer = RayNodes().call(Node("", node["NodeID"]), {"op": "identify", "pids": [1]}, deadline_s=60)
        left = [name for name, value in os.environ.items() if sys.argv[3] in value]
        print(json.dumps({"ok": answer["ok"], "kv": RayKv().get("x").decode(), "left": left}))
        """,
        guarded.address,
        guarded.dashboard_url,
        guarded.token,
    )
    assert found == {"ok": True, "kv": "1", "left": []}


def test_one_process_drives_one_cluster(cluster, guarded):
    with pytest.raises(ClusterError, match=r"is connected to '127.0.0.1:.*One process drives one cluster"):
        connect(guarded.address, guarded.dashboard_url, guarded.token)
    assert RayKv().keys("nothing") == []


def test_address_and_dashboard_of_two_clusters(cluster, head, guarded):
    with pytest.raises(ClusterError, match="belong to two clusters"):
        connect(head.address, guarded.dashboard_url, guarded.token)
    assert RayKv().keys("nothing") == []


# ---- nodes --------------------------------------------------------------------------------------------


def test_the_node_part_runs_where_nothing_of_ours_is_installed(node, head):
    with pytest.raises(ray.exceptions.RayError, match="No module named 'tasks'"):
        ray.get(ray.remote(num_cpus=0, max_retries=0)(parse_log).remote(""), timeout=120)
    answer = RayNodes().call(node, {"op": "identify", "pids": [head.session, os.getpid()]}, deadline_s=120)
    assert answer["ok"]
    assert answer["processes"][str(os.getpid())]["alive"]


def test_a_node_whose_cpus_are_all_taken_still_answers(node):
    class Training:
        def ready(self):
            return True

    actor = ray.remote(num_cpus=2)(Training).remote()
    try:
        assert ray.get(actor.ready.remote(), timeout=120)
        assert ray.available_resources().get("CPU", 0) == 0
        assert RayNodes().call(node, {"op": "identify", "pids": [1]}, deadline_s=120)["ok"]
    finally:
        ray.kill(actor)


def test_a_node_that_does_not_exist(node):
    gone = Node(ip="192.0.2.7", node_id="00" * 28)
    with pytest.raises(NodeError, match=r"192\.0\.2\.7 .*did not run identify"):
        RayNodes().call(gone, {"op": "identify", "pids": []}, deadline_s=60)


@pytest.mark.parametrize("node_id", ["", "not hexadecimal"])
def test_a_node_that_ray_cannot_name(cluster, node_id):
    with pytest.raises(NodeError, match=r"192\.0\.2\.7"):
        RayNodes().call(Node("192.0.2.7", node_id), {"op": "identify", "pids": []}, deadline_s=60)


def test_a_task_that_is_stuck_is_given_up_and_ended(node, odd_part, tmp_path):
    """An answer that never comes must not hold a worker of the node."""
    file = tmp_path / "pid"
    nodes = RayNodes()
    with pytest.raises(NodeError, match="answers int to ping"):
        nodes.call(node, {"op": "ping"}, deadline_s=120)  # now a worker is up
    with pytest.raises(NodeError, match=rf"{node.ip} .*did not answer sleep within 3 s"):
        nodes.call(node, {"op": "sleep", "file": str(file)}, deadline_s=3)
    until(file.exists, 60, "the task to start")
    pid = int(file.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the end of the stuck task")
    with pytest.raises(NodeError, match="answers int to ping"):
        nodes.call(node, {"op": "ping"}, deadline_s=60)


def test_a_worker_that_is_killed_at_its_task(node, odd_part):
    with pytest.raises(NodeError, match=rf"{node.ip} .*did not run die: WorkerCrashedError"):
        RayNodes().call(node, {"op": "die"}, deadline_s=120)


def test_an_error_on_the_node(node, odd_part):
    with pytest.raises(NodeError, match=rf"{node.ip} .*failed at raise: .*No space left on device"):
        RayNodes().call(node, {"op": "raise"}, deadline_s=120)


# ---- key-value store ----------------------------------------------------------------------------------


def test_a_verdict_goes_to_another_driver_and_its_answer_comes_back(cluster, head):
    channel = RayVerdictChannel(RayKv())
    assert channel.acknowledged("r1", "i1") is None
    channel.post("r1", {"incident": "i1", "attempt_id": "a1", "pids": [1, 2]})
    seen = drive(
        """
        import json, sys
        import ray
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
        verdict = json.loads(_internal_kv_get(b"verdict:r1", namespace=b"rankwatch"))
        ack = {"incident": "i1", "attempt_id": "a1", "at": "2026-12-01T04:00:00+00:00",
               "outcome": "failed_attempt", "reason": "asked to"}
        _internal_kv_put(b"ack:r1:i1", json.dumps(ack).encode(), namespace=b"rankwatch")
        print(json.dumps(verdict))
        """,
        head.address,
        RAY_AUTH_MODE="disabled",
    )
    assert seen == {"incident": "i1", "attempt_id": "a1", "pids": [1, 2]}
    ack = channel.acknowledged("r1", "i1")
    assert ack is not None
    assert (ack.outcome, ack.attempt_id, ack.reason) == ("failed_attempt", "a1", "asked to")
    assert channel.acknowledged("r1", "i2") is None
    channel.clear("r1")
    assert RayKv().get("verdict:r1") is None


def test_an_answer_that_is_none_of_ours(cluster):
    RayKv().put("ack:r2:i1", b'{"incident": "i1", "outcome": "danced"}')
    with pytest.raises(ClusterError, match="danced"):
        RayVerdictChannel(RayKv()).acknowledged("r2", "i1")


def test_keys_and_values(cluster):
    kv = RayKv("rankwatch-test")
    kv.put("a:1", b"one")
    kv.put("a:1", b"two")
    kv.put("a:2", bytes(range(256)))
    kv.put("b:1", b"")
    assert kv.get("a:1") == b"two"
    assert kv.get("a:2") == bytes(range(256))
    assert kv.keys("a:") == ["a:1", "a:2"]
    kv.delete("a:1")
    kv.delete("a:1")
    assert kv.get("a:1") is None
    assert RayKv().keys("a:") == []


def test_a_run_is_found_through_the_real_store_and_dashboard(cluster, head):
    said = {
        "protocol": 1,
        "run_id": "r7",
        "run_name": "demo",
        "attempt_id": "u7",
        "state": "running",
        "announced_at": "2026-12-01T04:00:00+00:00",
        "controller": {"actor_id": "00" * 16},
        "workers": [{"world_rank": 0, "pid": 7, "node_ip": "127.0.0.1"}],
    }
    kv = RayKv()
    with RayDashboard(head.dashboard_url) as dashboard:
        runs = RayRunDirectory(kv=kv, dashboard=dashboard)
        with pytest.raises(RunNotFound, match="known: none"):
            runs.find("demo")
        kv.put("run:r7", json.dumps(said | {"controller": {}}).encode())
        assert (runs.find("demo").attempt_id, runs.find("demo").status) == ("u7", "running")
        kv.put("run:r7", json.dumps(said).encode())
        assert runs.find("demo").status == "failed"  # its controller is none that the cluster knows
        kv.delete("run:r7")


def test_from_outside_through_ray_client(head):
    """The way in for a watcher on another host."""
    found = drive(
        """
        import json, os, signal, sys
        import ray
        from tasks.adapters.ray_cluster import connect, disconnect
        from tasks.adapters.ray_kv import RayKv
        from tasks.adapters.ray_nodes import RayNodes
        from tasks.hang.errors import NodeError
        from tasks.hang.run import Node
        first = connect(*sys.argv[1:3])
        again = connect(*sys.argv[1:3])
        kv = RayKv("rankwatch-client")
        kv.put("x:1", b"one")
        [node] = ray.nodes()
        nodes = RayNodes()
        request = {"op": "identify", "pids": [os.getpid()]}
        answer = nodes.call(Node("", node["NodeID"]), request, deadline_s=120)
        try:
            nodes.call(Node("192.0.2.7", "00" * 28), {"op": "identify", "pids": []}, deadline_s=60)
            refused = ""
        except NodeError as error:
            refused = str(error)
        print(json.dumps({
            "same": first == again,
            "kv": [kv.get("x:1").decode(), kv.keys("x:"), kv.get("x:2")],
            "alive": answer["processes"][str(os.getpid())]["alive"],
            "refused": refused,
            "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        }))
        disconnect()
        """,
        head.client_address,
        head.dashboard_url,
    )
    assert "192.0.2.7" in found.pop("refused")
    assert found == {"same": True, "kv": ["one", ["x:1"], None], "alive": True, "sigterm": True}


def test_a_head_that_does_not_answer_is_given_up_once(cluster, head):
    """Its control service is stopped, not dead: connections stay open, and nothing comes back."""
    [gcs] = [
        pid
        for pid in members_of(head.session)
        if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    ]
    kv = RayKv(deadline_s=1.0)
    os.kill(gcs, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterUnreachable, match="within 1 s"):
            kv.get("x")
        with pytest.raises(ClusterUnreachable, match="still not answered"):
            kv.get("x")
    finally:
        os.kill(gcs, signal.SIGCONT)
    until(lambda: answers(kv), 60, "the store to answer again")


def test_a_head_that_is_started_anew_at_the_same_address(guarded):
    """The connection of before is of no use, and the next connect makes a new one. Ends the second head."""
    program = """
        import sys
        from tasks.adapters.ray_cluster import connect
        from tasks.adapters.ray_kv import RayKv
        print(connect(*sys.argv[1:4]).versions.session_name, flush=True)
        sys.stdin.readline()
        session = connect(*sys.argv[1:4]).versions.session_name
        RayKv().put("x", b"1")
        print(session, RayKv().get("x").decode(), flush=True)
    """
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            guarded.address,
            guarded.dashboard_url,
            guarded.token,
        ],
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert driver.stdout is not None
        before = driver.stdout.readline().strip()
        kill_session(guarded.session)
        with ray_head(token=guarded.token, ports=guarded.ports):
            said, _ = driver.communicate("go on\n", timeout=180)
    finally:
        driver.kill()
        driver.wait(timeout=30)
    session, value = said.split()
    assert before.startswith("session_")
    assert session != before
    assert value == "1"


def answers(kv: RayKv) -> bool:
    try:
        return kv.get("x") is None
    except ClusterUnreachable:
        return False
