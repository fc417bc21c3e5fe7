"""What Ray's dashboard and the in-job part tell, as types: parsing only, no network.

Ray adds keys from version to version and writes null where it knows nothing yet, and a watcher that dies
of either is blind just when it is needed: unknown keys are ignored, a null counts as the default.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from tasks.hang.errors import ClusterError

# What a job says of NCCL, torch and the watch travels on; its tokens and passwords do not.
JOB_ENV_PREFIXES = ("NCCL_", "TORCH_", "RAY_TRAIN_", "RANKWATCH_", "CUDA_", "GLOO_")
PROTOCOL = 1

T = TypeVar("T")


class Versions(Struct, frozen=True):
    """`python` is empty where the cluster's Ray is too old to tell."""

    ray: str
    session_name: str
    python: str = ""


class Actor(Struct, frozen=True, kw_only=True):
    """An actor as the state API shows it."""

    actor_id: str
    class_name: str = ""
    state: str = ""
    job_id: str = ""
    node_id: str = ""
    pid: int = 0
    placement_group_id: str = ""
    serialized_runtime_env: str = ""

    @property
    def env(self) -> dict[str, str]:
        """What the job's runtime environment sets, as far as it concerns us."""
        try:
            return env_of(json.loads(self.serialized_runtime_env or "{}"))
        except ValueError:
            return {}


class WorkerProcess(Struct, frozen=True, kw_only=True):
    """A worker process of the cluster: its `worker_id` is in the names of its log files."""

    worker_id: str
    node_id: str
    pid: int
    ip: str = ""


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node of the cluster."""

    node_id: str
    node_ip: str = ""
    state: str = ""
    is_head_node: bool = False


class Job(Struct, frozen=True, kw_only=True):
    """A job; `submission_id` is empty for a driver that was not started by the Jobs API."""

    job_id: str = ""
    submission_id: str = ""
    type: str = ""
    status: str = ""
    entrypoint: str = ""
    runtime_env: dict[str, Any] = {}


class TrainWorker(Struct, frozen=True, kw_only=True):
    """A rank as Ray Train's state tracking shows it."""

    world_rank: int
    pid: int
    node_id: str = ""
    node_ip: str = ""
    local_rank: int | None = None
    node_rank: int | None = None
    actor_id: str = ""
    gpu_ids: tuple[int | str, ...] = ()
    log_file_path: str = ""


class TrainAttempt(Struct, frozen=True, kw_only=True):
    """One start of the worker group. Its status is no proof: see `ray_discovery.status_of`."""

    attempt_id: str
    status: str = ""
    start_time_ns: int = 0
    workers: tuple[TrainWorker, ...] = ()


class TrainRun(Struct, frozen=True, kw_only=True):
    """A run as Ray Train's state tracking shows it."""

    id: str
    name: str
    status: str = ""
    status_detail: str = ""
    job_id: str = ""
    start_time_ns: int = 0
    controller_actor_id: str = ""
    run_settings: dict[str, Any] = {}
    job_details: Job = Job()
    attempts: tuple[TrainAttempt, ...] = ()

    @property
    def newest(self) -> TrainAttempt | None:
        """The attempt that started last."""
        return max(self.attempts, key=lambda attempt: attempt.start_time_ns, default=None)

    @property
    def storage_path(self) -> str:
        """Where the run keeps its checkpoints."""
        return str(self._run_config.get("storage_path", ""))

    @property
    def env(self) -> dict[str, str]:
        """The job's environment, and over it what the run sets for its workers."""
        return env_of(self.job_details.runtime_env) | env_of(self._run_config.get("worker_runtime_env", {}))

    @property
    def _run_config(self) -> dict[str, Any]:
        found = self.run_settings.get("run_config", {})
        return found if isinstance(found, dict) else {}


class Controller(Struct, frozen=True, kw_only=True):
    """The actor that drives a run."""

    actor_id: str = ""
    pid: int = 0
    node_id: str = ""


class AnnouncedWorker(Struct, frozen=True, kw_only=True):
    """A rank as the in-job part announces it; `worker_server` is the socket of torch's worker server."""

    world_rank: int
    pid: int
    local_rank: int | None = None
    node_rank: int | None = None
    node_id: str = ""
    node_ip: str = ""
    hostname: str = ""
    start_ticks: int | None = None
    gpu_ids: tuple[int | str, ...] = ()
    actor_id: str = ""
    log_file_path: str = ""
    worker_server: str = ""
    env: dict[str, Any] = {}


class Announcement(Struct, frozen=True, kw_only=True):
    """What the in-job part publishes at each start and end of a worker group.

    `started_at` is when the worker group started (unix seconds, of the controller's clock). `backend` and
    `process_group_timeout_s` are those of torch's process group, as far as Ray Train sets it up.
    """

    protocol: int
    run_id: str
    run_name: str
    state: str = ""
    job_id: str = ""
    attempt_id: str = ""
    attempt_index: int = 0
    announced_at: datetime = datetime.fromtimestamp(0, UTC)
    started_at: float = 0.0
    storage_path: str = ""
    backend: str = ""
    process_group_timeout_s: float | None = None
    controller: Controller = Controller()
    workers: tuple[AnnouncedWorker, ...] = ()

    @property
    def since_s(self) -> float:
        """When it was announced, in seconds since 1970 (a time without a zone is taken as UTC)."""
        moment = self.announced_at
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    @property
    def env(self) -> dict[str, str]:
        """The environment of the lowest rank, as far as it concerns us."""
        first = min(self.workers, key=lambda worker: worker.world_rank, default=None)
        return env_of({"env_vars": first.env}) if first else {}


class Suspension(Struct, frozen=True):
    """What the training says while it rebuilds a communicator: not to be polled `until` (unix seconds)."""

    until: float = 0.0
    reason: str = ""


class LogIdentity(Struct, frozen=True, kw_only=True):
    """Who wrote a worker's log: the only place where a run without tracking says its ranks."""

    run_name: str
    world_rank: int
    actor_id: str = ""
    local_rank: int | None = None
    node_rank: int | None = None
    timestamp_ns: int = 0


def parse(content: bytes | str, kind: type[T], where: str) -> T:
    """Read an answer.

    Args:
        content: JSON.
        kind: What it should be.
        where: Names the answer in an error.

    Raises:
        ClusterError: it is something else, say the page of a proxy.
    """
    try:
        return _convert(msgspec.json.decode(content), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _not_rays(where, error) from error


def parse_rows(content: bytes | str, kind: type[T], where: str) -> list[T]:
    """Read an answer of the state API, which wraps its rows thrice.

    Raises:
        ClusterError: the state API reports an error, or this is no answer of it.
    """
    answer = parse(content, dict[str, Any], where)
    data = answer.get("data")
    listing = data.get("result") if isinstance(data, dict) else None
    if not answer.get("result") or not isinstance(listing, dict):
        raise ClusterError(f"{where} answers with an error: {answer.get('msg') or answer}.")
    try:
        return [_convert(row, kind) for row in listing.get("result", [])]
    except msgspec.MsgspecError as error:
        raise _not_rays(where, error) from error


def parse_announcement(content: bytes) -> Announcement | None:
    """Read an announcement; None for one of another protocol or one that cannot be read, so that the
    other ways to find a run still count.
    """
    try:
        found = parse(content, Announcement, "The announcement of the in-job part")
    except ClusterError:
        return None
    return found if found.protocol == PROTOCOL else None


def parse_suspension(content: bytes | None) -> Suspension:
    """Read a suspension; none at all where it is absent or cannot be read."""
    try:
        return parse(content, Suspension, "The suspension") if content else Suspension()
    except ClusterError:
        return Suspension()


def parse_log(text: str) -> LogIdentity | None:
    """Find who writes a structured log of Ray Train, from its last lines.

    Lines that are cut off or not JSON, as user code may print, are passed over.
    """
    for line in reversed(text.splitlines()):
        try:
            return msgspec.json.decode(line, type=LogIdentity)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return None


def env_of(runtime_env: Any) -> dict[str, str]:
    """The variables of a runtime environment that concern the watch, without the job's secrets."""
    variables = runtime_env.get("env_vars") if isinstance(runtime_env, Mapping) else None
    if not isinstance(variables, Mapping):
        return {}
    return {str(k): str(v) for k, v in variables.items() if str(k).startswith(JOB_ENV_PREFIXES)}


def _convert(value: Any, kind: type[T]) -> T:
    return msgspec.convert(_without_nulls(value), kind, strict=False)


def _not_rays(where: str, error: Exception) -> ClusterError:
    return ClusterError(
        f"{where} answers something that is not Ray's: {error}.",
        "Check that ray_dashboard_url is the address of a Ray dashboard.",
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
