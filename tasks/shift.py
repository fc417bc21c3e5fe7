"""One flow run's watch over a training run."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
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
from tasks.hang.pace import advice, pace, suspended
from tasks.hang.policy import KINDS
from tasks.hang.report import RasReport
from tasks.hang.run import Attempt
from tasks.hang.states import Blank, Confirmed, Event, Sighting, Suspected
from tasks.hang.window import Window
from tasks.hang.witness import Witness
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
from tasks.witness import ask

_TELL_EVERY_S = 60.0
_FIND_EVERY_S = 60.0
_BEAT_EVERY_S = 5.0
_SCOUTS = 4
_KEYS_TOLD = 50
_SAME_PACE = 0.1  # an interval that differs by less is kept
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
        self.policy = eyes.plan.policy
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
        self._said: dict[str, str] = {}
        self._scouts = ThreadPoolExecutor(_SCOUTS, thread_name_prefix="witness")
        self._asked: dict[tuple[str, datetime], Future[Witness]] = {}
        self._fit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye, so that the next shift need not wait for our heartbeat to grow old."""
        reason = self.over or (f"failed: {error}" if error else "the shift is over")
        self._scouts.shutdown(wait=False, cancel_futures=True)
        if self.over == RUN_ENDED:  # nothing of it stands still any more
            self.window = Window(attempt_id=self.window.attempt_id, blind=self.window.blind)
        try:
            self._clerk.shutdown(wait=True, cancel_futures=True)
            write(self.tenure, farewell=reason, run_ended=self.over == RUN_ENDED, **self._fields())
            ended = f" The run {self.attempt.status}." if self.over == RUN_ENDED else ""
            self._show(f"Not watched any more: {reason}.{ended}" if self.over else "")
        except (NotOurs, *SERVER_ERRORS) as away:
            self._log.info("No goodbye was written: %s", away)

    def polls(self) -> Iterator[None]:
        """Yield once for each poll, evenly spaced however long a poll takes; jitter spreads the ends of the
        shifts of many runs.
        """
        begin = time.monotonic()
        length_s = self.eyes.plan.settings.shift_s * random.uniform(0.9, 1.0)  # noqa: S311  no secret
        due = begin
        while not self.over and due - begin <= length_s:
            time.sleep(max(0.0, due - time.monotonic()))
            yield
            late_s = max(0.0, time.monotonic() - due)
            interval_s = self.policy.poll_interval_s
            due += interval_s * (1 + int(late_s // interval_s))

    def look(self) -> tuple[Event, ...]:
        """One poll: find the attempt, hear the witnesses, ask RAS, take it into account, tell."""
        self._refresh()
        if self.over or self.attempt.status != "running":
            self._keep_record()
            return ()
        events = self._hear()
        if not self._rests():
            observation, trouble = poll(self.eyes, self.attempt)
            if isinstance(observation, Blank):
                self._found_at = 0.0
            self._say("trouble", str(trouble or ""))
            self.window, seen = look(self.window, observation, self.policy)
            events += seen
            if isinstance(observation, Sighting):
                self._keep_pace(observation.report)
        self._tell(events)
        self._ask()
        self._keep_record(changed=bool(events))
        return events

    def _rests(self) -> bool:
        """Whether RAS is not to be asked now: it would disturb the job, or cannot answer in this attempt."""
        if self.window.blind is not None and self.window.blind.permanent:
            self._say("rest", f"RAS is not asked again in this attempt: {self.window.blind.reason}")
            return True
        reason = suspended(self.attempt, time.time(), self.eyes.plan.settings.settle_s)
        self._say("rest", f"RAS is not asked now: {reason}." if reason else "", level="INFO")
        return bool(reason)

    def _keep_pace(self, report: RasReport) -> None:
        """What a question costs the job grows with the square of the rank entries: ask less often then."""
        plan = self.eyes.plan
        now_fit = pace(
            plan.policy.poll_interval_s,
            explicit="poll_interval_s" in plan.explicit,
            entries=report.entries,
            nccl_version=report.nccl_version,
            collection_time_s=report.collection_time_s,
        )
        self._say("version", advice(report.nccl_version))
        shortest_s = min(self.policy.confirm_s(kind) for kind in KINDS)
        interval_s = min(now_fit.interval_s, max(plan.policy.poll_interval_s, shortest_s / 4))
        if abs(interval_s - self.policy.poll_interval_s) > _SAME_PACE * self.policy.poll_interval_s:
            self._say("pace", f"RAS is polled every {interval_s:.0f} s: {now_fit.reason}.", level="INFO")
            self.policy = msgspec.structs.replace(self.policy, poll_interval_s=interval_s)

    def _fit(self) -> None:
        """Confirm and capture before the watchdog of this attempt ends its processes. A watch never refuses
        to watch: what does not fit is cut here, and refused where it is set.
        """
        plan = self.eyes.plan
        fitted, warning = plan.fitted(self.attempt)
        self.policy = fitted
        self._say("watchdog", warning)

    def _ask(self) -> None:
        """Send somebody to look at what the window asks for, beside the polls."""
        for question in self.window.questions:
            freeze = self.window.freeze(question.communicator)
            if freeze is None or freeze.asked_at is None or not freeze.processes:
                continue
            key = (question.communicator, freeze.asked_at)
            if key not in self._asked:
                members = {rank: process[:2] for rank, process in freeze.processes.items()}
                gap_s = self.policy.gap_s(freeze.kind)
                self._asked[key] = self._scouts.submit(ask, self.eyes, self.attempt, question, members, gap_s)

    def _hear(self) -> tuple[Event, ...]:
        """Take into account what the witnesses saw."""
        events: list[Event] = []
        for key in [key for key, answer in self._asked.items() if answer.done()]:
            answer = self._asked.pop(key)
            error = answer.exception()
            if error is not None:
                self._log.warning("A witness failed, which is a defect of rankwatch: %r", error)
                witness = Witness(observed_at=now(), communicator=key[0], looks=(), reason=repr(error))
            else:
                witness = answer.result()
            freeze = self.window.freeze(key[0])
            if freeze is not None and freeze.asked_at == key[1]:
                self.window, told = look(self.window, witness, self.policy)
                events += told
        return tuple(events)

    def _say(self, topic: str, text: str, *, level: str = "WARNING") -> None:
        """Log a sentence once, until it changes."""
        if text and text != self._said.get(topic):
            (self._log.warning if level == "WARNING" else self._log.info)("%s", text)
        self._said[topic] = text

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
        """Whether something in the attempt progresses, and nothing is suspected."""
        states = self.window.communicators.values()
        return self.window.moves and not any(isinstance(state, Suspected | Confirmed) for state in states)

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
            self._said.clear()
            self._asked.clear()
            self.attempt = found
            self._fit()
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
        for level, text in tell(events, self.run.run_name, self.eyes.plan.settings.action_for):
            (self._log.warning if level == "WARNING" else self._log.info)("%s", text)
        together: dict[tuple[str, str | None], list[Event]] = {}
        for event in events:
            together.setdefault((event.event, event.kind), []).append(event)
        for (name, _), alike in together.items():
            keys = [event.communicator for event in alike]
            payload = {**msgspec.to_builtins(alike[0]), "communicators": keys[:_KEYS_TOLD]}
            self._emit(name, {**payload, "communicators_count": len(keys)})
        kinds = {event.kind for event in events if event.event in ("suspected", "confirmed")}
        if kinds and "init" not in kinds:  # NCCL can crash when asked for text while a communicator is made
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
