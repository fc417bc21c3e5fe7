"""From what Ray and the in-job part say to attempts and ranks: no network, no state."""

from collections.abc import Sequence

from msgspec import Struct

from tasks.adapters.ray_answers import (
    Actor,
    AnnouncedWorker,
    Announcement,
    LogIdentity,
    TrainRun,
    TrainWorker,
    WorkerProcess,
)
from tasks.hang.run import Attempt, Node, Rank, RunStatus

_ENDS: dict[str, RunStatus] = {"FINISHED": "finished", "ERRORED": "failed", "ABORTED": "failed"}
_BETWEEN = ("RESTARTING", "RESIZING")
_ALIVE = ("INITIALIZING", "SCHEDULING", "RUNNING", *_BETWEEN)
_NO = ("0", "n", "no", "f", "false")  # what torch reads as false


class Found(Struct, frozen=True, kw_only=True):
    """An attempt, what its job's environment says, and since when (seconds since 1970)."""

    attempt: Attempt
    env: dict[str, str]
    since_s: float


class Seat(Struct, frozen=True):
    """A rank that was found through its actor, its process and its log."""

    actor: Actor
    process: WorkerProcess
    said: LogIdentity


def of_announcement(said: Announcement, status: RunStatus, submission_id: str) -> Found:
    """The attempt of an announcement, whose status its caller has checked."""
    workers = sorted(said.workers, key=lambda worker: worker.world_rank)
    watchdog_s, watchdog_source = watchdog_of(said)
    attempt = Attempt(
        run_name=said.run_name,
        run_id=said.run_id,
        attempt_id=said.attempt_id,
        ranks=tuple(_announced(worker) for worker in workers),
        status=status,
        announced_by="rankwatch_job",
        job_id=said.job_id,
        submission_id=submission_id,
        has_callback=True,
        storage_path=said.storage_path,
        started_at=said.started_at,
        watchdog_s=watchdog_s,
        watchdog_source=watchdog_source,
    )
    return Found(attempt=attempt, env=said.env, since_s=said.since_s)


def of_run(run: TrainRun) -> Found:
    """The newest attempt of a run that state tracking knows; without ranks while it has started none."""
    newest = run.newest
    workers = sorted(newest.workers, key=lambda worker: worker.world_rank) if newest else []
    attempt = Attempt(
        run_name=run.name,
        run_id=run.id,
        attempt_id=newest.attempt_id if newest else "",
        ranks=tuple(_tracked(worker) for worker in workers),
        status=status_of(run),
        announced_by="dashboard",
        job_id=run.job_id,
        submission_id=run.job_details.submission_id,
        storage_path=run.storage_path,
        started_at=newest.start_time_ns / 1e9 if newest else 0.0,
    )
    return Found(attempt=attempt, env=run.env, since_s=run.start_time_ns / 1e9)


def of_gang(group: str, seats: Sequence[Seat], submission_id: str) -> Found:
    """The attempt of a placement group; Ray gives its run no id here."""
    attempt = Attempt(
        run_name=seats[0].said.run_name,
        run_id="",
        attempt_id=group,
        ranks=tuple(_logged(seat) for seat in sorted(seats, key=lambda seat: seat.said.world_rank)),
        status="running",
        announced_by="state_api",
        job_id=seats[0].actor.job_id,
        submission_id=submission_id,
    )
    since_s = max(seat.said.timestamp_ns for seat in seats) / 1e9
    return Found(attempt=attempt, env=seats[0].actor.env, since_s=since_s)


def status_of(run: TrainRun) -> RunStatus:
    """The status of a run that state tracking knows.

    Only the run's own status says that it is over: an attempt that a callback failed is recorded as FINISHED
    while the run starts the next one.
    """
    newest = run.newest
    if run.status in _ENDS:
        return _ENDS[run.status]
    if run.status not in _ALIVE:
        return "unknown"
    if run.status in _BETWEEN or (newest is not None and newest.status in _ENDS):
        return "restarting"
    if run.status == "RUNNING" and newest is not None and newest.status != "PENDING":
        return "running"
    return "restarting" if len(run.attempts) > 1 else "starting"


def announced_status(said: Announcement) -> RunStatus:
    """The status that an announcement claims."""
    match said.state:
        case "finished":
            return "finished"
        case "failed":
            return "failed"
        case "running":
            return "running"
        case "starting":
            return "restarting" if said.attempt_index > 0 else "starting"
        case "stopping":
            return "restarting"
        case _:
            return "unknown"


def watchdog_of(said: Announcement) -> tuple[float | None, str]:
    """The earliest of torch's watchdogs that ends a stalled attempt by itself.

    Gloo's collectives end with the timeout of their process group whatever NCCL's variables say. NCCL's do
    only where errors are handled; and its heartbeat monitor may end a process whose watchdog is stuck.

    Returns:
        Seconds after a collective stalls, and which one in words; None and empty where none is known.
    """
    env = said.env
    is_gloo = said.backend == "gloo"
    ladder: list[tuple[float, str]] = []
    timeout_s = said.process_group_timeout_s
    handled = (
        env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "").strip() != "0"
        or env.get("TORCH_NCCL_BLOCKING_WAIT", "0").strip().lower() not in _NO
    )
    if timeout_s is not None and timeout_s > 0 and (is_gloo or handled):
        backend = said.backend or "default"
        ladder.append((timeout_s, f"the timeout of the process group ({backend} backend, {timeout_s:g} s)"))
    heartbeat_s = _seconds(env.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", ""))
    monitored = env.get("TORCH_NCCL_ENABLE_MONITORING", "1").strip().lower() not in _NO
    if heartbeat_s is not None and monitored and not is_gloo:
        ladder.append((heartbeat_s, f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC ({heartbeat_s:g} s)"))
    return min(ladder, default=(None, ""))


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def is_same_run(attempt: Attempt, past: Attempt) -> bool:
    """Whether another way sees what is left of a run that is known to be over: the same id, or, where a
    way knows no ids, actors of the same job.
    """
    if attempt.run_id:
        return attempt.run_id == past.run_id
    return bool(attempt.job_id) and attempt.job_id == past.job_id


def has_same_processes(one: Attempt, other: Attempt) -> bool:
    """Whether two attempts are made of the same processes, and so are one under two names."""
    processes, others = ({(r.node.ip, r.pid, r.world_rank) for r in a.ranks} for a in (one, other))
    return bool(processes) and processes == others


def _announced(worker: AnnouncedWorker) -> Rank:
    return Rank(
        world_rank=worker.world_rank,
        pid=worker.pid,
        node=Node(worker.node_ip, worker.node_id, worker.hostname),
        local_rank=worker.local_rank,
        node_rank=worker.node_rank,
        actor_id=worker.actor_id,
        gpu_ids=tuple(map(str, worker.gpu_ids)),
        start_ticks=worker.start_ticks,
        log_file_path=worker.log_file_path,
        worker_server=worker.worker_server,
    )


def _tracked(worker: TrainWorker) -> Rank:
    return Rank(
        world_rank=worker.world_rank,
        pid=worker.pid,
        node=Node(worker.node_ip, worker.node_id),
        local_rank=worker.local_rank,
        node_rank=worker.node_rank,
        actor_id=worker.actor_id,
        gpu_ids=tuple(map(str, worker.gpu_ids)),
        log_file_path=worker.log_file_path,
    )


def _logged(seat: Seat) -> Rank:
    return Rank(
        world_rank=seat.said.world_rank,
        pid=seat.actor.pid,
        node=Node(seat.process.ip, seat.actor.node_id),
        local_rank=seat.said.local_rank,
        node_rank=seat.said.node_rank,
        actor_id=seat.actor.actor_id,
    )
