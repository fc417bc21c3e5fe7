"""Finds the ranks of a Ray Train run from outside: which process on which node is which world rank.

Three ways, in this order: (a) what the in-job part announces in the cluster's key-value store, exact and
with start times; (b) Ray Train's state tracking on the dashboard, which is off unless the job asks for it;
(c) the actors and their logs, which every run leaves, and only while it runs.

Each can lie. An announcement stays when its controller is killed, so a controller that is dead is not
believed. State tracking records an attempt that a callback failed as FINISHED while the run restarts
(`ray_ranks.status_of`). Actors live on for a moment after their run.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from msgspec.structs import replace

from tasks.adapters.ray_answers import (
    Actor,
    Announcement,
    Job,
    TrainRun,
    WorkerProcess,
    env_of,
    parse_announcement,
    parse_log,
    parse_suspension,
)
from tasks.adapters.ray_ranks import (
    Found,
    Seat,
    announced_status,
    has_same_processes,
    is_same_run,
    of_announcement,
    of_gang,
    of_run,
    status_of,
)
from tasks.hang.errors import ClusterError, ClusterUnreachable, RunNotFound
from tasks.hang.run import Attempt, RunStatus

_NAMES_SHOWN = 10
_LOG_LINES = 5
_LOGS_AT_ONCE = 8
# sys first: Ray writes a few lines there at each start, user code fills the other one.
_LOGS = ("train/ray-train-sys-worker-{}.log", "train/ray-train-app-worker-{}.log")


class KeyValues(Protocol):
    """The part of RayKv that announcements are read with."""

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`. Raises ClusterError."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value, None where there is none. Raises ClusterError."""
        ...


class Dashboard(Protocol):
    """The part of RayDashboard that runs are found with. All raise ClusterError."""

    def train_runs(self) -> list[TrainRun]:
        """The runs that state tracking knows."""
        ...

    def train_workers(self) -> list[Actor]:
        """The actors that hold a rank now."""
        ...

    def actor(self, actor_id: str) -> Actor | None:
        """One actor, dead or alive."""
        ...

    def worker_processes(self) -> list[WorkerProcess]:
        """The worker processes that are alive."""
        ...

    def log_tail(self, node_id: str, filename: str, *, lines: int) -> str:
        """The end of a log file."""
        ...

    def jobs(self) -> list[Job]:
        """All jobs."""
        ...


class RayRunDirectory:
    """RunDirectory of one cluster.

    Args:
        kv: Where announcements are; None leaves way (a) out.
        dashboard: The cluster's.
    """

    def __init__(self, *, kv: KeyValues | None, dashboard: Dashboard) -> None:
        self._kv = kv
        self._dashboard = dashboard
        self._found: dict[str, Attempt] = {}
        self._announced_names: dict[str, str] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._actor_environments: dict[str, dict[str, str]] = {}
        self._jobs: dict[str, Job] = {}
        self._gangs: dict[str, Found] = {}

    def find(self, run_name: str) -> Attempt:
        """The newest attempt of a run.

        Args:
            run_name: Its name, or its id.

        Raises:
            RunNotFound: no run of that name or id; the names that are known are listed.
            ClusterError: the cluster cannot be asked.
        """
        found = self._locate(run_name)
        attempt = found.attempt
        before = self._found.get(run_name)
        # Ways (b) and (c) name an attempt differently, and (b) may be silent for a moment: that is no new
        # attempt. The name that the in-job part gives is never replaced, since it checks verdicts by it.
        if before is not None and not attempt.has_callback and has_same_processes(before, attempt):
            attempt = replace(attempt, attempt_id=before.attempt_id)
        attempt = self._with_suspension(attempt)
        self._found[run_name] = attempt
        self._environments[run_name] = self._environment_of(found)
        return attempt

    def job_environment(self, run_name: str) -> dict[str, str]:
        """The variables of NCCL, torch and the watch that the training job runs with.

        Raises:
            RunNotFound: as `find`.
            ClusterError: as `find`.
        """
        if run_name not in self._environments:
            self.find(run_name)
        return self._environments[run_name]

    def _locate(self, name: str) -> Found:
        """What the first way finds that is not over; else the end that came last."""
        ended: list[Found] = []
        names: set[str] = set()
        try:
            for found in self._ways(name, names):
                if any(is_same_run(found.attempt, past.attempt) for past in ended):
                    continue
                if not found.attempt.finished:
                    return found
                ended.append(found)
        except ClusterUnreachable:
            if not ended:
                raise
        if ended:
            return max(ended, key=lambda past: past.since_s)
        some = ", ".join(sorted(names)[:_NAMES_SHOWN]) or "none"
        raise RunNotFound(
            f"The cluster knows no training run named {name!r} (known: {some}).",
            "Set run_name to the name in RunConfig, or run_id to its id in Ray. A run that does not "
            "run now is seen only if its job has rankwatch_job or RAY_TRAIN_ENABLE_STATE_TRACKING=1.",
        )

    def _ways(self, name: str, names: set[str]) -> Iterator[Found]:
        """What each way finds; a way is asked only where those before did not settle it.

        Args:
            name: Name or id of a run.
            names: Collects the names that are known, for the error.
        """
        said = self._announced(name)
        names.update(self._announced_names.values())
        if said is not None:
            yield of_announcement(said, self._checked_status(said), self._job(said.job_id).submission_id)
        runs = self._dashboard.train_runs()
        names.update(run.name for run in runs)
        tracked = [of_run(run) for run in runs if name in (run.id, run.name)]
        if tracked:
            yield max(tracked, key=lambda found: found.since_s)
        gangs = self._running_gangs()
        names.update(gang.attempt.run_name for gang in gangs)
        running = [gang for gang in gangs if gang.attempt.run_name == name]
        if running:
            yield max(running, key=lambda found: found.since_s)

    def _announced(self, name: str) -> Announcement | None:
        """Way (a): the newest announcement. Where the store fails the other ways do without, unless the run
        was announced before: they would know it as another attempt.
        """
        if self._kv is None:
            return None
        try:
            keys = self._kv.keys("run:")
            found = [said for key in keys if (said := self._read(self._kv, key, name)) is not None]
        except ClusterError:
            before = self._found.get(name)
            if before is not None and before.has_callback:
                raise
            return None
        return max(found, key=lambda said: said.since_s, default=None)

    def _with_suspension(self, attempt: Attempt) -> Attempt:
        """Add what the training says of not being polled; a store that fails says nothing."""
        key = f"suspend:{attempt.run_id}"
        try:
            if self._kv is None or not attempt.run_id or key not in self._kv.keys(key):
                return attempt
            said = parse_suspension(self._kv.get(key))
        except ClusterError:
            return attempt
        return replace(attempt, suspended_until=said.until, suspended_reason=said.reason)

    def _read(self, kv: KeyValues, key: str, name: str) -> Announcement | None:
        """An announcement of the run. Those of other runs are read once: a run never changes its name."""
        run_id = key.removeprefix("run:")
        if name not in (run_id, self._announced_names.get(run_id, name)):
            return None
        content = kv.get(key)
        said = parse_announcement(content) if content else None
        if said is None:
            return None
        self._announced_names[run_id] = said.run_name
        return said if name in (said.run_id, said.run_name) else None

    def _checked_status(self, said: Announcement) -> RunStatus:
        """The status of an announcement; one whose controller died did not hear of the end."""
        claimed = announced_status(said)
        if claimed in ("finished", "failed") or not self._controller_is_gone(said):
            return claimed
        try:
            recorded = [status_of(run) for run in self._dashboard.train_runs() if run.id == said.run_id]
        except ClusterUnreachable:
            recorded = []
        return "finished" if recorded == ["finished"] else "failed"

    def _controller_is_gone(self, said: Announcement) -> bool:
        if not said.controller.actor_id:
            return False
        try:
            actor = self._dashboard.actor(said.controller.actor_id)
        except ClusterUnreachable:
            return False  # a dashboard that is down is no reason to stop watching
        return actor is None or actor.state == "DEAD"

    def _environment_of(self, found: Found) -> dict[str, str]:
        """What the job was submitted with, over it what Ray Train hands on from the driver's own environment
        (NCCL_RAS_ADDR is as often exported in a shell), over it what the ranks or the run say.
        """
        attempt = found.attempt
        env = env_of(self._job(attempt.job_id).runtime_env)
        if attempt.ranks and not attempt.finished:
            env |= self._actor_environment(attempt.ranks[0].actor_id)
        return env | found.env

    def _actor_environment(self, actor_id: str) -> dict[str, str]:
        if actor_id and actor_id not in self._actor_environments:
            try:
                actor = self._dashboard.actor(actor_id)
            except ClusterError:
                return {}
            self._actor_environments = {actor_id: actor.env if actor else {}}
        return self._actor_environments.get(actor_id, {})

    def _running_gangs(self) -> list[Found]:
        """Way (c), one for each placement group that holds ranks: a group is one attempt."""
        members: dict[str, list[Actor]] = {}
        for actor in self._dashboard.train_workers():
            members.setdefault(actor.placement_group_id, []).append(actor)
        self._gangs = {group: gang for group, gang in self._gangs.items() if group in members}
        gangs = list(self._gangs.values())
        unknown = {group: actors for group, actors in members.items() if group not in self._gangs}
        if unknown:
            processes = {(p.node_id, p.pid): p for p in self._dashboard.worker_processes()}
            for group, actors in unknown.items():
                with ThreadPoolExecutor(_LOGS_AT_ONCE, thread_name_prefix="logs") as pool:
                    looked = pool.map(lambda a: self._seat(a, processes.get((a.node_id, a.pid))), actors)
                    seats = [seat for seat in looked if seat is not None]
                if not seats:
                    continue  # no log says yet what run it is
                gang = of_gang(group, seats, self._job(actors[0].job_id).submission_id)
                gangs.append(gang)
                if len(seats) == len(actors):  # else a log was late: look again next time
                    self._gangs[group] = gang
        return gangs

    def _seat(self, actor: Actor, process: WorkerProcess | None) -> Seat | None:
        if process is None:
            return None
        for pattern in _LOGS:
            name = pattern.format(process.worker_id)
            said = parse_log(self._dashboard.log_tail(actor.node_id, name, lines=_LOG_LINES))
            if said is not None:
                return Seat(actor, process, said)
        return None

    def _job(self, job_id: str) -> Job:
        """The job of a run, asked once; an empty one where it cannot be had, since only its environment and
        stopping it whole depend on it.
        """
        if job_id and job_id not in self._jobs:
            try:
                found = {job.job_id: job for job in self._dashboard.jobs()}
            except ClusterError:
                return Job()
            self._jobs[job_id] = found.get(job_id, Job())
        return self._jobs.get(job_id, Job())
