"""Who watches next: the end of a shift is the beginning of the next one."""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound

from tasks.ownership import now, read_window, server

WATCHED_ELSEWHERE = "Watched elsewhere"
RUN_ENDED = "Run ended"
REFUSED = "Refused"
_STARTS_WITHIN = timedelta(seconds=30)
_SOON = timedelta(seconds=5)


def deployment_of(slug: str) -> str:
    """Name of the deployment that watches a run."""
    return f"watch_run/watch-{slug}"


def start_shift(slug: str) -> bool:
    """Have the deployment of a run start now, unless a start is under way.

    Returns:
        Whether a flow run was created.
    """
    with server() as client:
        try:
            deployment = client.read_deployment_by_name(deployment_of(slug))
        except ObjectNotFound:
            return False
        return not deployment.paused and _start(client, deployment.id, slug)


def start_next_shift(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of the watch flow: the end of a shift is the beginning of the next one, of the same deployment.

    A shift that could not begin is left to the sweep and the schedule, which try again later and later. When
    the training run is over its deployment is paused; `rankwatch add` wakes it for the next run of that name.
    """
    del flow
    if state.name in (WATCHED_ELSEWHERE, REFUSED) or flow_run.deployment_id is None:
        return
    slug = str(flow_run.parameters["run"])
    with server() as client:
        deployment = client.read_deployment(flow_run.deployment_id)
        if state.name != RUN_ENDED and not deployment.paused:
            _start(client, deployment.id, slug)
        elif state.name == RUN_ENDED and deployment_of(slug).endswith(f"/{deployment.name}"):
            client.pause_deployment(deployment.id)


def _start(client: SyncPrefectClient, deployment_id: UUID, slug: str) -> bool:
    """Create a run of a deployment for a training run, unless one is about to start."""
    under_way = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]),
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING])
            ),
        )
    )
    last_owner, at = read_window(slug)[0].flow_run_id, now()
    mine = [run for run in under_way if run.parameters.get("run") == slug and str(run.id) != last_owner]
    if any(_is_starting(run, at) for run in mine):
        return False
    client.create_flow_run_from_deployment(deployment_id, parameters={"run": slug})
    return True


def _is_starting(run: FlowRun, at: datetime) -> bool:
    """Whether a run that never owned the window will do so soon.

    A run whose worker died with it stays Pending or Running for ever, so those states count for a while only.
    """
    match run.state_type:
        case StateType.SCHEDULED:
            return run.expected_start_time is not None and run.expected_start_time <= at + _SOON
        case StateType.PENDING:
            return run.expected_start_time is None or at - run.expected_start_time < _STARTS_WITHIN
        case _:
            return run.start_time is not None and at - run.start_time < _STARTS_WITHIN
