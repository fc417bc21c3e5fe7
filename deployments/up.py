"""What a single machine needs: a Prefect server where none is configured, a worker, and a sweep.

The sweep looks every few seconds for runs that nobody watches and starts a shift for them. It is the net
under the hooks of the watch flow: those do not run when the worker was killed together with its flow.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import httpx
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.deploy import WORK_POOL, deploy_by_hand, ensure_pool
from tasks.blocks import HangWindow, TrainingRun
from tasks.handover import start_shift
from tasks.ownership import SERVER_ERRORS, now, owner_is_there, read_window, server

LOCAL_SERVER = "http://127.0.0.1:4200/api"
SWEEP_EVERY_S = 5.0
_SERVER = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", "4200")
_SERVER_WITHIN_S = 180.0
_STOP_WITHIN_S = 15.0
_QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
# A start that does not become an owner is tried again later and later: a run whose cluster is away must not
# cost a new interpreter every few seconds.
_AGAIN_AFTER_S = (30.0, 60.0, 120.0, 300.0, 600.0)


class Sweep:
    """Starts a shift for each run that should be watched and is not."""

    def __init__(self) -> None:
        self._tries: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def __call__(self) -> list[str]:
        """Look once; returns the slugs for which a shift was started."""
        started: list[str] = []
        for slug in _runs():
            window, _ = read_window(slug)
            if not _needs_shift(window):
                self._tries.pop(slug, None)
                self._not_before.pop(slug, None)
            elif time.monotonic() >= self._not_before.get(slug, 0.0) and start_shift(slug):
                tries = self._tries.get(slug, 0)
                wait_s = _AGAIN_AFTER_S[min(tries, len(_AGAIN_AFTER_S) - 1)]
                self._tries[slug], self._not_before[slug] = tries + 1, time.monotonic() + wait_s
                started.append(slug)
        return started


def up() -> None:
    """Run server (where PREFECT_API_URL is not set), worker and sweep until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, _interrupt)
    children: dict[str, subprocess.Popen[bytes]] = {}
    url = PREFECT_API_URL.value()
    try:
        if not url:
            url = LOCAL_SERVER
            if not _answers(url):  # one that outlived an earlier `up` goes on
                children["server"] = _start(*_SERVER)
                _wait_for(url, children["server"])
        with temporary_settings({PREFECT_API_URL: url}):
            ensure_pool()
            deploy_by_hand()
            print(f"Prefect UI: {url.removesuffix('/api')}", flush=True)
            _supervise(children, url)
    except KeyboardInterrupt:
        print("Stopping.", flush=True)
    finally:
        for child in reversed(children.values()):
            _stop(child)


def _supervise(children: dict[str, subprocess.Popen[bytes]], url: str) -> None:
    """Keep the worker (and our own server) running, and sweep."""
    sweep = Sweep()
    while True:
        worker = children.get("worker")
        if worker is None or worker.poll() is not None:
            children["worker"] = _start(
                "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", PREFECT_API_URL=url
            )
        own = children.get("server")
        if own is not None and own.poll() is not None:
            children["server"] = _start(*_SERVER)
        try:
            for slug in sweep():
                print(f"{slug} was not watched: a shift was started.", flush=True)
        except SERVER_ERRORS as error:
            print(f"The Prefect server at {url} does not answer: {error}", flush=True)
        time.sleep(SWEEP_EVERY_S)


def _runs() -> list[str]:
    with server() as client:
        try:
            documents = client.read_block_documents_by_type(
                TrainingRun.get_block_type_slug() or "", include_secrets=False
            )
        except ObjectNotFound:
            return []
    return [document.name for document in documents if document.name]


def _needs_shift(window: HangWindow) -> bool:
    return not window.run_ended and not owner_is_there(window, now())


def _start(program: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a program of this environment, in a process group of its own."""
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    poll_often = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_WORKER_PREFETCH_SECONDS": "2"}
    return subprocess.Popen(  # noqa: S603  our own command lines
        command, env={**os.environ, **_QUIET, **poll_often, **environment}, start_new_session=True
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _wait_for(url: str, child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _SERVER_WITHIN_S
    while time.monotonic() < end and child.poll() is None:
        if _answers(url):
            return
        time.sleep(0.5)
    raise SystemExit(f"The Prefect server did not come up at {url} within {_SERVER_WITHIN_S:g} s.")


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).is_success
    except httpx.HTTPError:
        return False


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt
