"""A real Ray head for tests: its own ports, its own folder, and nothing left of it afterwards."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).parents[1]
START_S = 240
# The worker processes of this head cannot import our packages, as on a node that has nothing of ours.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tasks", "flows", "deployments", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@dataclass(frozen=True)
class Head:
    """Where a head is reached. `session` is the id of the kernel's session that its processes share."""

    address: str
    client_address: str
    dashboard_url: str
    session: int
    token: str | None
    ports: tuple[int, int, int]


@contextmanager
def ray_head(*, token: str | None = None, cpus: int = 2, ports: Sequence[int] = ()) -> Iterator[Head]:
    """Run a head until the block ends, on the ports of an earlier one where they are given.

    The folder is short and directly under the system's one: a socket's path may have 107 characters.
    """
    folder = Path(tempfile.mkdtemp(prefix="rw"))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(BLOCKER)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(folder / "site"), "RAY_AUTH_MODE": "token" if token else "disabled"}
    environment |= {"RAY_AUTH_TOKEN": token} if token else {}
    environment |= {"GRPC_ENABLE_FORK_SUPPORT": "0"}  # else each fifth Ray Client waits 30 s: see ray_init
    gcs, dashboard, client = ports or free_ports(3)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--disable-usage-stats"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    command += ["--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", f"--num-cpus={cpus}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += [f"--temp-dir={folder / 't'}", "--object-store-memory=100000000"]
    started = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        cwd=folder,
        stdout=(folder / "start.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        assert started.wait(timeout=START_S) == 0, (folder / "start.log").read_text()
        url = f"http://127.0.0.1:{dashboard}"
        until(lambda: node_is_alive(url, token), START_S, "the dashboard")
        until(lambda: listens(client), START_S, "the Ray Client server")
        yield Head(
            f"127.0.0.1:{gcs}", f"ray://127.0.0.1:{client}", url, started.pid, token, (gcs, dashboard, client)
        )
    finally:
        kill_session(started.pid)
        started.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def node_is_alive(url: str, token: str | None) -> bool:
    """Whether the dashboard shows a node, and its modules are up."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with suppress(httpx.HTTPError):
        nodes = httpx.get(f"{url}/api/v0/nodes", headers=headers, timeout=30)
        metadata = httpx.get(f"{url}/api/v0/cluster_metadata", headers=headers, timeout=30)
        return nodes.is_success and metadata.is_success and '"ALIVE"' in nodes.text
    return False


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def members_of(session: int) -> list[int]:
    """The living processes of a kernel session: Ray's daemons leave their group, not their session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    """Kill what is left of a head, and wait until it is gone. New processes may appear while we kill."""

    def killed() -> bool:
        left = members_of(session)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    until(killed, 60, "the end of the head")


def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for a condition; the limit only keeps a broken test from hanging."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s} s for {what}"
        time.sleep(0.05)
