"""Capture evidence while the ranks are alive, and say which rank did it."""

import time

from prefect import flow

from tasks.capture import capture_name, capture_ras, capture_stacks, file_manifest, open_case
from tasks.explain import explain, show
from tasks.follow import diagnosed


@flow(
    name="diagnose_run",
    flow_run_name=capture_name,
)
def diagnose_run(run: str, incident: str = "") -> str:
    """Capture side by side, judge, file. Also run by hand, with or without a hang.

    Args:
        run: Name of the TrainingRun block.
        incident: The incident; empty for a capture by hand, which gets a folder of its own.

    Returns:
        Where the bundle is.
    """
    began = time.monotonic()
    case = open_case(run, incident)
    captures = capture_stacks.submit(case), capture_ras.submit(case)
    stacks, ras = captures[0].result(), captures[1].result()
    verdict = explain(case, stacks, ras)
    entries = (*stacks.entries, *ras.entries)
    show(case, verdict, entries, case.eyes.where(case.folder))
    where = file_manifest(case, entries, time.monotonic() - began)
    diagnosed(case, stacks, verdict, where)
    return where
