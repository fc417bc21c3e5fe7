"""The demo's processes: a Ray cluster, a Prefect server, rankwatch, RAS for the job, and the job itself.

Everything lives in one folder and on free ports of this machine, so a Ray or Prefect of your own is left
alone. Every process inherits a mark in its environment; at the end all that bear it are killed, whoever
started them.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx

from tasks.adapters.process import start_ticks

RUN_NAME = "demo"
WORKERS = 4
CULPRIT_RANK = 2  # its shard holds the corrupt record; train.py, which says so, imports torch
_MARK = "RANKWATCH_DEMO"
_HOST = "127.0.0.1"
_PORTS = (20000, 32000)  # Ray refuses 10002-19999, and Linux hands out 32768 and above by itself
_NOT_YET = "No available agent"  # the dashboard answers before the agent that starts jobs is there


class DemoFailed(Exception):
    """Something that the demo needs did not happen; the text says what and where to look."""


class Stage:
    """Starts and ends the demo's processes.

    Args:
        folder: Logs, evidence and checkpoints; stays when the demo is over.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        # Unix sockets allow 107 characters, and Ray puts some 60 of its own behind its folder.
        self._short = Path(tempfile.mkdtemp(prefix="rwd-", dir="/tmp"))
        names = (
            "gcs",
            "dashboard",
            "client",
            "agent",
            "agent_grpc",
            "metrics",
            "env_agent",
            "prefect",
            "ras",
        )
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def storage(self) -> Path:
        """Checkpoints and evidence."""
        return self.folder / "storage"

    @property
    def ui(self) -> str:
        """Address of the Prefect UI."""
        return f"http://{_HOST}:{self._ports['prefect']}"

    @property
    def dashboard(self) -> str:
        """Address of Ray's dashboard."""
        return f"http://{_HOST}:{self._ports['dashboard']}"

    @property
    def gcs(self) -> str:
        """Address of the Ray cluster."""
        return f"{_HOST}:{self._ports['gcs']}"

    @property
    def ras(self) -> str:
        """Address of RAS."""
        return f"{_HOST}:{self._ports['ras']}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of all processes."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "PREFECT_", "NCCL_", "RANKWATCH_", "TORCH_"))
        }
        return {
            **inherited,
            _MARK: self.mark,
            "PREFECT_API_URL": f"{self.ui}/api",
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "DO_NOT_TRACK": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RANKWATCH_SPOOL_PATH": str(self.folder / "spool"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        patient = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it
        try:
            self.end()
        finally:
            signal.signal(signal.SIGINT, patient)

    def end(self) -> None:
        """Kill every process of the demo, gently first, and remove its temporary folder.

        A process that sets its title overwrites its environment, and the mark with it, as Ray's agents do: so
        the family is noted before it is scattered.
        """
        family = dict(_descendants({child.pid for child in self._children.values()}))
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()
        end = time.monotonic() + 5
        while time.monotonic() < end and any(child.poll() is None for child in self._children.values()):
            time.sleep(0.1)
        while left := {*marked(self.mark), *(p for p, s in family.items() if start_ticks(p) == s)}:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for child in self._children.values():
            child.wait()
        shutil.rmtree(self._short, ignore_errors=True)

    def start_ray(self) -> None:
        """Start a one-node cluster; `wait_for_ray` says when it is up."""
        port = {name: str(number) for name, number in self._ports.items()}
        self._start(
            "ray",
            *("ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", str(WORKERS + 2)),
            *("--node-ip-address", _HOST, "--port", port["gcs"], "--ray-client-server-port", port["client"]),
            *("--dashboard-host", _HOST, "--dashboard-port", port["dashboard"]),
            *("--dashboard-agent-listen-port", "0", "--dashboard-agent-grpc-port", "0"),
            *("--metrics-export-port", "0", "--runtime-env-agent-port", "0"),
            *("--object-store-memory", str(100 * 2**20), "--temp-dir", str(self._short / "r")),
        )

    def start_prefect(self) -> None:
        """Start a Prefect server with its UI."""
        self._start(
            "prefect",
            *("prefect", "server", "start", "--host", _HOST, "--port", str(self._ports["prefect"])),
        )

    def start_rankwatch(self) -> None:
        """Start `rankwatch up`: worker and sweep."""
        self._start("rankwatch", "rankwatch", "up")

    def start_ras(self) -> None:
        """Start what stands in for NCCL's RAS server."""
        self._start(
            "ras",
            *("python", "-m", "deployments.demo.ras_standin", "--sockets", str(self._short / "s")),
            *("--host", _HOST, "--port", str(self._ports["ras"])),
        )

    def submit_job(self, *, steps: int, step_s: float, fault: str = "skip") -> str:
        """Submit the training job; returns its submission id.

        Args:
            steps: Of the training run.
            step_s: Seconds that a step takes at least.
            fault: What makes it hang, see train.py.
        """
        train = [
            *(sys.executable, "-m", "deployments.demo.train", "--run-name", RUN_NAME),
            *("--storage-path", str(self.storage), "--workers", str(WORKERS)),
            *("--steps", str(steps), "--step-s", str(step_s), "--fault", fault),
        ]
        env = {
            "NCCL_RAS_ADDR": self.ras,
            "RANKWATCH_SOCKET_DIR": str(self._short / "s"),
            "RAY_TRAIN_CALLBACKS": "deployments.training_job.rankwatch_job.RankwatchCallback",
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "TORCH_FR_BUFFER_SIZE": "2000",
        }
        job: dict[str, Any] = {"entrypoint": " ".join(train), "runtime_env": {"env_vars": env}}

        def submit() -> str:
            answer = httpx.post(f"{self.dashboard}/api/jobs/", json=job, timeout=60)
            if answer.is_error and _NOT_YET not in answer.text:
                raise DemoFailed(f"Ray did not take the job: {answer.text[-500:]}")
            return str(answer.json()["submission_id"]) if answer.is_success else ""

        return str(self.wait_for("Submitting the job", submit, within_s=120, child="ray"))

    def job(self, submission_id: str) -> dict[str, Any]:
        """The job as Ray's dashboard tells it."""
        answer = httpx.get(f"{self.dashboard}/api/jobs/{submission_id}", timeout=30)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        return told

    def job_log(self, submission_id: str) -> str:
        """What the job has printed."""
        answer = httpx.get(f"{self.dashboard}/api/jobs/{submission_id}/logs", timeout=30)
        return str(answer.json().get("logs", "")) if answer.is_success else ""

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts of the training run, oldest first, as Ray's state tells them."""
        answer = httpx.get(f"{self.dashboard}/api/train/v2/runs/v1", timeout=60)
        runs = answer.json()["train_runs"] if answer.is_success else []
        return [attempt for run in runs if run["name"] == RUN_NAME for attempt in run["attempts"]]

    def rankwatch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line of rankwatch to its end."""
        return subprocess.run(
            [_program("rankwatch"), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def wait_for(self, what: str, ready: Callable[[], Any], *, within_s: float, child: str = "") -> Any:
        """Wait until `ready` gives something true.

        Raises:
            DemoFailed: it did not in time, or the process behind it ended.
        """
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError, OSError):
                if found := ready():
                    return found
            if child and (code := self._children[child].poll()) is not None:
                raise DemoFailed(f"{what}: {child} ended with code {code}; see {self.log(child)}")
            time.sleep(0.25)
        raise DemoFailed(f"{what} did not happen within {within_s:g} s; see {self.folder / 'logs'}")

    def check(self) -> None:
        """See that every process of the demo is there.

        Raises:
            DemoFailed: one has ended.
        """
        for name, child in self._children.items():
            if (code := child.poll()) is not None:
                raise DemoFailed(f"{name} ended with code {code}; see {self.log(name)}")

    def is_up(self, url: str) -> Callable[[], bool]:
        """Whether something answers at a URL."""
        return lambda: httpx.get(url, timeout=5).is_success

    def pid(self, name: str) -> int:
        """Process id of ray, prefect, rankwatch or ras."""
        return self._children[name].pid

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def _start(self, name: str, program: str, *arguments: str) -> None:
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                [_program(program), *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def _program(name: str) -> str:
    return sys.executable if name == "python" else str(Path(sys.executable).with_name(name))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        start = _PORTS[0] + uuid.uuid4().int % (_PORTS[1] - _PORTS[0])
        for step in range(_PORTS[1] - _PORTS[0]):
            port = _PORTS[0] + (start - _PORTS[0] + step) % (_PORTS[1] - _PORTS[0])
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((_HOST, port))
                found.append(port)
            if len(found) == count:
                return found
    raise DemoFailed(f"No {count} free ports between {_PORTS[0]} and {_PORTS[1]}.")


def marked(mark: str) -> Iterator[int]:
    """Processes that inherited the mark, but for this one."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0") and _alive(folder):
                yield int(folder.name)


def _descendants(pids: set[int]) -> Iterator[tuple[int, int | None]]:
    """(pid, start ticks) of all descendants of some processes."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    waiting = list(pids)
    while waiting:
        for pid in children.get(waiting.pop(), []):
            waiting.append(pid)
            if (ticks := start_ticks(pid)) is not None:
                yield pid, ticks


def _alive(folder: Path) -> bool:
    return (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
