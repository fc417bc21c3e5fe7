"""What a poll costs: inside a shift, and as a flow run of its own (`make bench`).

Both ask the same RAS stand-in over its socket, and both talk to the same Prefect server, which the benchmark
starts. CPU milliseconds of the client (for a flow run of its own: the worker and the interpreters that it
starts) and of the server, from /proc; the machine may be busy, so ratios count, not single numbers.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from prefect.deployments.runner import RunnerDeployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.entrypoint import EntrypointType
from rich.console import Console
from rich.table import Table

from deployments.demo.ras_report import RasSnapshot
from deployments.demo.ras_server import RasServer
from deployments.demo.stage import free_ports
from deployments.deploy import WORK_POOL, ensure_pool
from tasks.ownership import server
from tests.bench.one_poll import REPORT, one_poll

POLLS_IN_SHIFT = 200
RUNS = 5
ROOT = Path(__file__).parents[2]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, of its living descendants and of those that it waited for."""
    total = 0.0
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def start(*command: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a program of this environment, quietly."""
    program = sys.executable if command[0] == "python" else str(Path(sys.executable).with_name(command[0]))
    quiet = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [program, *command[1:]],
        env={**os.environ, **quiet, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )


def in_shift(addr: str, api: str, server_pid: int) -> dict[str, float]:
    """CPU ms for each poll of a shift: a long one less a short one, so that starts cancel out."""
    taken: list[tuple[int, float, float]] = []
    for polls in (POLLS_IN_SHIFT // 10, POLLS_IN_SHIFT):
        before = cpu_s(server_pid)
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.shift", addr, str(polls)],
            env={**os.environ, "PREFECT_API_URL": api},
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        time.sleep(3)
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        taken.append((polls, told["client_s"], cpu_s(server_pid) - before))
    (few, client_few, server_few), (many, client_many, server_many) = taken
    return {
        "client": 1000 * (client_many - client_few) / (many - few),
        "server": 1000 * (server_many - server_few) / (many - few),
    }


def as_runs(addr: str, api: str, server_pid: int) -> dict[str, float]:
    """CPU ms for each poll that is a flow run, started by a process worker."""
    ensure_pool()
    deployment = RunnerDeployment.from_flow(
        one_poll,
        name="bench",
        parameters={"addr": addr},
        work_pool_name=WORK_POOL,
        entrypoint_type=EntrypointType.MODULE_PATH,
        job_variables={"env": {"PYTHONPATH": str(ROOT)}},
    ).apply()
    command = ("prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--limit", "1")
    worker = start(*command, PREFECT_API_URL=api, PREFECT_WORKER_QUERY_SECONDS="2")
    try:
        run_once(deployment)  # the first one compiles and fills caches
        before = cpu_s(worker.pid), cpu_s(server_pid)
        for _ in range(RUNS):
            run_once(deployment)
        return {
            "client": 1000 * (cpu_s(worker.pid) - before[0]) / RUNS,
            "server": 1000 * (cpu_s(server_pid) - before[1]) / RUNS,
        }
    finally:
        worker.terminate()
        worker.wait()


def run_once(deployment: Any) -> None:
    """Run a deployment to its end.

    Raises:
        RuntimeError: it did not complete.
    """
    with server() as client:
        run = client.create_flow_run_from_deployment(deployment)
        while not (state := client.read_flow_run(run.id).state) or not state.is_final():
            time.sleep(0.5)
    if not state.is_completed():
        raise RuntimeError(f"The flow run ended as {state.name}: {state.message}")


def main() -> None:
    """Measure both and print a table and one line of JSON."""
    ras = RasServer(lambda: RasSnapshot.from_json(json.loads(REPORT.read_bytes())))
    addr = ras.addr
    (port,) = free_ports(1)
    api = f"http://127.0.0.1:{port}/api"
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        os.environ |= {"PREFECT_HOME": home, "PREFECT_API_URL": api}
        stack.enter_context(temporary_settings({PREFECT_API_URL: api}))
        prefect = start("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        try:
            while not is_up(f"{api}/health"):
                time.sleep(0.5)
            results = {"in a shift": in_shift(addr, api, prefect.pid)}
            results["a flow run each"] = as_runs(addr, api, prefect.pid)
        finally:
            prefect.terminate()
            prefect.wait()
            ras.close()
    table = Table(title="CPU for one poll of an 8-rank job")
    for column in ("poll", "client ms", "server ms"):
        table.add_column(column, justify="left" if column == "poll" else "right")
    for name, cost in results.items():
        table.add_row(name, f"{cost['client']:.1f}", f"{cost['server']:.1f}")
    Console().print(table)
    sys.stdout.write(json.dumps(results) + "\n")


def is_up(url: str) -> bool:
    """Whether something answers at a URL."""
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
