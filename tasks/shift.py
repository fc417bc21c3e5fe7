"""One flow run's watch over a training run, and who watches next."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import msgspec
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.runtime import flow_run as current_run

from tasks.blocks import TrainingRun
from tasks.hang.errors import ClusterError, NotOurs, RunNotFound
from tasks.hang.incident import Incident, incident_of
from tasks.hang.memory import recall, remember
from tasks.hang.run import Attempt
from tasks.hang.window import Blank, Event, Progressing, Window
from tasks.ownership import (
    SERVER_ERRORS,
    Tenure,
    now,
    read_window,
    server,
    take_window,
    write,
)
from tasks.poll import look, poll
from tasks.reporting.wording import state_markdown, summary, tell
from tasks.wiring import Eyes, eyes_of, load_run

WATCHED_ELSEWHERE = "Watched elsewhere"
RUN_ENDED = "Run ended"
REFUSED = "Refused"
_TELL_EVERY_S = 60.0
_FIND_EVERY_S = 60.0
_STARTS_WITHIN = timedelta(seconds=30)
_SOON = timedelta(seconds=5)


class Shift:
    """Polls a run until the shift is over, the run has ended, or another shift took over.

    Talking to the Prefect server is left to a clerk (one thread): a server that is away delays what is
    written, never the next poll.
    """

    def __init__(
        self, run: TrainingRun, eyes: Eyes, attempt: Attempt, tenure: Tenure, window: Window
    ) -> None:
        self.run = run
        self.eyes = eyes
        self.attempt = attempt
        self.tenure = tenure
        self.window = window
        self.over = ""
        self.open_incident = ""
        self.failures: dict[str, int] = {}
        self.not_before = 0.0
        self._log = get_run_logger()
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="clerk")
        self._written: Future[None] | None = None
        self._artifact_id: UUID | None = None
        self._flow_run_id = UUID(str(current_run.id)) if current_run.id else None
        self._told_at = 0.0
        self._found_at = time.monotonic()
        self._trouble = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye, so that the next shift need not wait for our heartbeat to grow old."""
        reason = self.over or (f"failed: {error}" if error else "the shift is over")
        try:
            self._clerk.shutdown(wait=True, cancel_futures=True)
            write(self.tenure, farewell=reason, run_ended=self.over == RUN_ENDED, **self._fields())
        except (NotOurs, *SERVER_ERRORS) as away:
            self._log.info("No goodbye was written: %s", away)

    def polls(self) -> Iterator[None]:
        """Yield once for each poll, evenly spaced however long a poll takes; jitter spreads the ends of the
        shifts of many runs.
        """
        interval_s = self.eyes.plan.policy.poll_interval_s
        begin = time.monotonic()
        length_s = self.eyes.plan.settings.shift_s * random.uniform(0.9, 1.0)  # noqa: S311  no secret
        due = begin
        while not self.over and due - begin <= length_s:
            time.sleep(max(0.0, due - time.monotonic()))
            yield
            late_s = max(0.0, time.monotonic() - due)
            due += interval_s * (1 + int(late_s // interval_s))

    def look(self) -> tuple[Event, ...]:
        """One poll: find the attempt, ask RAS, take it into account, tell."""
        self._refresh()
        if self.over or self.attempt.status != "running":
            self._keep_record()
            return ()
        observation, trouble = poll(self.eyes, self.attempt)
        if isinstance(observation, Blank):
            self._found_at = 0.0
        if trouble and str(trouble) != self._trouble:
            self._log.warning("%s", trouble)
        self._trouble = str(trouble or "")
        self.window, events = look(self.window, observation, self.eyes)
        self._tell(events)
        self._keep_record(changed=bool(events))
        return events

    def incident(self) -> Incident | None:
        """The incident that the window holds."""
        return incident_of(self.run.run_name, self.window)

    @property
    def moves(self) -> bool:
        """Whether something in the attempt progressed: a communicator exists and none stands still."""
        return bool(self.window.communicators) and all(
            isinstance(state, Progressing) for state in self.window.communicators.values()
        )

    def _refresh(self) -> None:
        """Find the attempt again: at each poll where the in-job part tells, else after a failed poll and
        once a minute.
        """
        announced = self.attempt.announced_by == "rankwatch_job"
        if not announced and time.monotonic() - self._found_at < _FIND_EVERY_S:
            return
        try:
            found = self.eyes.find()
        except (RunNotFound, ClusterError) as error:
            self._log.info("%s", error)
            return
        self._found_at = time.monotonic()
        if found.attempt_id != self.attempt.attempt_id:
            self._log.info("%s is in attempt %s now.", self.run.run_name, found.attempt_id)
            self.window = Window(attempt_id=found.attempt_id)
            self._emit("attempt", {"attempt_id": found.attempt_id})
        self.attempt = found
        if found.finished:
            self.over = RUN_ENDED

    def _tell(self, events: tuple[Event, ...]) -> None:
        plan = self.eyes.plan
        for level, text in tell(events, self.run.run_name, plan.policy, plan.settings.action):
            (self._log.warning if level == "WARNING" else self._log.info)("%s", text)
        for event in events:
            self._emit(event.event, msgspec.to_builtins(event))
        if any(event.event in ("suspected", "confirmed") for event in events):
            self._clerk.submit(self._tell_text)

    def _tell_text(self) -> None:
        """NCCL's own report, for people, beside ours."""
        try:
            self._log.info("NCCL's own report:\n%s", self.eyes.ras.text(self.attempt))
        except (ClusterError, Exception) as error:  # noqa: BLE001  a second look is worth no risk
            self._log.info("NCCL's own report could not be had: %s", error)

    def _keep_record(self, *, changed: bool = False) -> None:
        """Leave the heartbeat, and at changes and once a minute event and artifact, to the clerk."""
        if self._written is not None and self._written.done():
            lost = self._written.exception()
            if isinstance(lost, NotOurs):
                self.over = str(lost)
            elif lost is not None:
                self._log.info("The Prefect server did not take the record: %s", lost)
            self._written = None
        due = changed or time.monotonic() - self._told_at >= _TELL_EVERY_S
        if due:
            self._told_at = time.monotonic()
            self._emit("watching", {"attempt_id": self.attempt.attempt_id, "summary": summary(self.window)})
        if self._written is None:
            self._written = self._clerk.submit(self._write, due)

    def _write(self, with_artifact: bool) -> None:
        write(self.tenure, **self._fields())
        if with_artifact:
            self._show()

    def _show(self) -> None:
        """Keep one artifact for each shift up to date, rather than a new one for each change."""
        at = now().isoformat(timespec="seconds")
        markdown = state_markdown(self.run.run_name, self.window, at)
        if self._artifact_id is None:
            artifact = ArtifactCreate(
                type="markdown",
                key=f"watch-{self.run.slug}",
                description=f"State of {self.run.run_name}",
                data=markdown,
                flow_run_id=self._flow_run_id,
            )
            with server() as client:
                self._artifact_id = client.create_artifact(artifact).id
            return
        with server() as client:
            client.update_artifact(self._artifact_id, ArtifactUpdate(data=markdown))

    def _fields(self) -> dict[str, Any]:
        return {"window": remember(self.window), "incident": self.open_incident}

    def _emit(self, name: str, payload: dict[str, Any]) -> None:
        emit_event(
            event=f"rankwatch.{name}",
            resource={
                "prefect.resource.id": f"rankwatch.run.{self.run.slug}",
                "prefect.resource.name": self.run.run_name,
            },
            payload=payload,
        )


def begin_shift(slug: str) -> Shift | None:
    """Take over the watch of a run.

    Returns:
        The shift, None where another one is at work.

    Raises:
        RankwatchError: run, cluster or settings cannot be used; one sentence names the field.
    """
    run = load_run(slug)
    known, _ = read_window(slug)
    eyes = eyes_of(run)
    interval_s = eyes.plan.policy.poll_interval_s
    tenure = take_window(
        slug,
        run.run_name,
        flow_run_id=str(current_run.id or ""),
        stale_after_s=max(3 * interval_s, 30.0),
    )
    if tenure is None:
        return None
    attempt = eyes.find()
    window = recall(known.window, attempt.attempt_id)
    shift = Shift(run, eyes, attempt, tenure, window)
    shift.open_incident = known.incident
    return shift


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

    A shift that could not begin is left to the sweep and the schedule, which try again later and later.
    """
    del flow
    if state.name in (WATCHED_ELSEWHERE, RUN_ENDED, REFUSED) or flow_run.deployment_id is None:
        return
    with server() as client:
        if not client.read_deployment(flow_run.deployment_id).paused:
            _start(client, flow_run.deployment_id, str(flow_run.parameters["run"]))


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
