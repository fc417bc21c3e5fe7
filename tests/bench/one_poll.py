"""A poll that is a flow run of its own: what rankwatch does not do, and why."""

import json
from pathlib import Path

from prefect import flow

from tasks.adapters.local_node import LocalNode
from tasks.adapters.ras import NodeRas
from tasks.hang.report import parse_report
from tests.fakes import attempt

REPORT = Path(__file__).parents[1] / "data" / "ras" / "v2.30.7" / "healthy_world_n8.json"
JOB = attempt(pids=(json.loads(REPORT.read_bytes())["communicators"][0]["ranks"][0]["pid"],))


@flow
def one_poll(addr: str) -> int:
    """Ask RAS once, in a flow run."""
    ras = NodeRas(LocalNode(), method="socket", addr=addr, collect_timeout_s=5, deadline_s=10)
    (raw,) = ras.status(JOB)
    return len(parse_report(raw).records)
