"""The deployments of rankwatch: one to watch each training run, and two that people start by hand."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.schedules import Interval, Schedule
from prefect.types.entrypoint import EntrypointType

from flows.diagnose import diagnose_run
from flows.remediate import remediate_run
from flows.watch import watch_run
from tasks.blocks import Claim, HangWindow, Incident, TrainingRun
from tasks.ownership import now, server

WORK_POOL = "rankwatch"
# The slow net: whatever else failed to start the next shift, this does. A run that finds an owner just ends.
SAFETY_NET = timedelta(minutes=15)


def ensure_pool() -> None:
    """Create the process work pool and register the block types, where that was not done."""
    with server() as client:
        try:
            client.read_work_pool(WORK_POOL)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
    for block in (TrainingRun, HangWindow, Incident, Claim):
        block.register_type_and_schema()


def deploy_watch(run: TrainingRun) -> UUID:
    """Create or update the deployment that watches a run."""
    return _apply(
        watch_run,
        f"watch-{run.slug}",
        description=f"Watches {run.run_name} for NCCL hangs, one shift after the other.",
        parameters={"run": run.slug},
        schedule=Interval(SAFETY_NET, anchor_date=now() + SAFETY_NET),
    )


def deploy_by_hand() -> None:
    """Create or update the deployments that people start from the UI."""
    _apply(diagnose_run, "diagnose", description="Capture evidence of a run now, with or without a hang.")
    _apply(remediate_run, "remediate", description="Decide on a diagnosed incident again.")


def _apply(
    flow: Flow[..., Any],
    name: str,
    *,
    description: str,
    parameters: dict[str, object] | None = None,
    schedule: Schedule | None = None,
) -> UUID:
    deployment = RunnerDeployment.from_flow(
        flow,
        name=name,
        description=description,
        parameters=parameters or {},
        schedule=schedule,
        paused=False,
        tags=["rankwatch"],
        work_pool_name=WORK_POOL,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    applied = deployment.apply()
    if not isinstance(applied, UUID):
        raise TypeError(f"Prefect answered the creation of deployment {name} with {applied!r}.")
    return applied
