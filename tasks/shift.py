"""One flow run's watch over a training run."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import msgspec
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run as current_run

from tasks.blocks import TrainingRun
from tasks.handover import RUN_ENDED
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

_TELL_EVERY_S = 60.0
_FIND_EVERY_S = 60.0
_BEAT_EVERY_S = 5.0
_LOST_FOR_S = 120.0  # then a new process shall connect anew


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
        self._beat_at = 0.0
        self._found_at = time.monotonic()
        self._lost_at = 0.0
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
            self._show(f"Not watched any more: {reason}." if self.over else "")
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

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Go on saying that we are there while something takes longer than a poll."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT_EVERY_S):
                self._keep_record()

        beating = threading.Thread(target=beat, name="heartbeat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            done.set()
            beating.join()

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
            self._lost_at = self._lost_at or time.monotonic()
            if time.monotonic() - self._lost_at > _LOST_FOR_S:
                self.over = f"The run cannot be found: {error}"
            elif isinstance(error, ClusterError):
                self._reconnect()
            return
        self._lost_at = 0.0
        self._found_at = time.monotonic()
        if found.attempt_id != self.attempt.attempt_id:
            self._log.info("%s is in attempt %s now.", self.run.run_name, found.attempt_id)
            self.window = Window(attempt_id=found.attempt_id)
            self._told_at = 0.0
            self._emit("attempt", {"attempt_id": found.attempt_id})
        self.attempt = found
        if found.finished:
            self.over = RUN_ENDED

    def _reconnect(self) -> None:
        """A head that was started again is another cluster at the same address."""
        try:
            self.eyes.reconnect()
        except ClusterError as error:
            self._log.info("%s", error)

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
        beat_due = due or time.monotonic() - self._beat_at >= _BEAT_EVERY_S
        if self._written is None and beat_due:
            self._beat_at = time.monotonic()
            self._written = self._clerk.submit(self._write, due)

    def _write(self, with_artifact: bool) -> None:
        write(self.tenure, **self._fields())
        if with_artifact:
            self._show()

    def _show(self, farewell: str = "") -> None:
        """Keep one artifact for each shift up to date, rather than a new one for each change."""
        at = now().isoformat(timespec="seconds")
        markdown = state_markdown(self.run.run_name, self.window, at, farewell)
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
