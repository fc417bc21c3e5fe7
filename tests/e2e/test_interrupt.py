"""However the demo ends, nothing is left running."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deployments.demo.stage import marked

pytestmark = pytest.mark.e2e


@pytest.fixture
def demo(tmp_path):
    """A demo that has started its job, its mark, and its folder."""
    command = [sys.executable, "-m", "deployments.demo", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: (tmp_path / "logs" / "rankwatch.log").exists() or process.poll() is not None, 300)
        assert process.poll() is None, process.communicate()[0]
        yield process, mark_of(process.pid), tmp_path
        process.kill()


def wait_until(ready, within_s):
    end = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.2)


def mark_of(pid: int) -> str:
    (first, *_) = psutil.Process(pid).children()
    environment = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
    return next(e for e in environment if e.startswith(b"RANKWATCH_DEMO=")).decode().partition("=")[2]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_nothing_running(demo, ending):
    process, mark, _ = demo
    assert len(list(marked(mark))) > 5
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(ending)
    if ending == signal.SIGINT:
        time.sleep(0.5)
        process.send_signal(ending)  # people press it twice
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    assert "nothing is left running" in printed
    assert list(marked(mark)) == []
    assert [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_a_demo_that_fails_says_why_and_leaves_nothing_running(demo):
    process, mark, folder = demo
    ray = next(c for c in psutil.Process(process.pid).children() if "start" in c.cmdline())
    for one in [*ray.children(recursive=True), ray]:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(one.pid, signal.SIGKILL)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 1, printed
    assert "The demo failed" in printed
    assert str(folder) in printed.replace("\n", "")
    assert list(marked(mark)) == []
