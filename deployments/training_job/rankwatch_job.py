"""The part of rankwatch that goes into the training job: this one file, standard library and Ray only.

Switched on by the environment of the job's driver, without a change to the training function:

    RAY_TRAIN_CALLBACKS=rankwatch_job.RankwatchCallback    (module path under which the driver finds it)
    RANKWATCH_SOCKET_DIR=/var/run/rankwatch                (optional; default /tmp/rankwatch-<uid>)

On the controller it announces each attempt (which process is which rank, on which node) in the cluster's
key-value store and reads verdicts there; a verdict about the running attempt fails it, and Ray Train's own
failure policy decides what follows. In each rank it starts torch's worker server, a thread that gives the
Flight Recorder away even when the rank is stuck.

It must never stop or disturb training by itself. So every hook swallows its errors and logs each kind once;
the store is used from a thread of its own, since a control service that restarts would hold the controller's
loop; nothing is imported into a rank that is not there already; and the file travels by value, so that only
the driver needs it.

A training function that tears down and rebuilds a communicator may say so, since NCCL can be harmed by
questions in between (`suspend_polling`, `resume_polling`); it need not.

Keys, in namespace `rankwatch`: `run:<run_id>` (announcement), `verdict:<run_id>` (read),
`ack:<run_id>:<incident>` (what was done about a verdict), `suspend:<run_id>` (until when not to poll).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import queue
import re
import socket
import stat
import sys
import threading
import time
import types
import uuid
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("ray.train.rankwatch")

try:
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
except ImportError:  # another Ray: the run goes on without us rather than not at all
    from ray.train.v2.api.callback import RayTrainCallback

    logger.warning("rankwatch: this version of Ray Train has other hooks; the run is not announced")

    class ControllerCallback(RayTrainCallback):  # type: ignore[misc,no-redef]
        """Has no hooks, so nothing is called."""

    class WorkerGroupCallback(RayTrainCallback):  # type: ignore[misc,no-redef]
        """Has no hooks, so nothing is called."""


PROTOCOL = 1
NAMESPACE = b"rankwatch"

_RANKS_S = 10.0  # how long the controller waits for the ranks; training has started by then
_READ_S = 0.5
_FLUSH_S = 2.0
_CONNECT_S = 0.5
_MOST_SUSPENDED_S = 600.0
_SUSPEND_WAIT_S = 0.5
_REASON_CHARS = 200
_SOCKET_PATH_BYTES = 108  # sun_path of Linux, with the zero at its end
_SOCKET_NAME = re.compile(r"rank_\d+\.(\d+)\.sock")
_WORKER_ENV = (
    "NCCL_RAS_ADDR",
    "NCCL_RAS_ENABLE",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
)
_ENDS = {"FINISHED": "finished", "ERRORED": "failed", "ABORTED": "failed"}


# ---- in each rank -------------------------------------------------------------------------------------


def start_in_worker(attempt_id: str, world_rank: int) -> dict[str, Any]:
    """Start torch's worker server in this process and say who this process is. Runs in every rank.

    Args:
        attempt_id: Names the folder of the socket, so that attempts never meet.
        world_rank: Of this process.

    Returns:
        pid, start_ticks, hostname, env, worker_server (path of the socket, None where there is none) and
        worker_server_reason (why not).
    """
    path, reason = None, ""
    try:
        path = _start_worker_server(attempt_id, world_rank)
    except Exception as error:  # noqa: BLE001  a rank without the server still trains
        reason = f"{type(error).__name__}: {error}"[:300]
    return {
        "pid": os.getpid(),
        "start_ticks": _start_ticks(),
        "hostname": socket.gethostname(),
        "env": {name: os.environ[name] for name in _WORKER_ENV if name in os.environ},
        "worker_server": path,
        "worker_server_reason": reason,
    }


def _start_worker_server(attempt_id: str, world_rank: int) -> str:
    loaded = sys.modules.get("torch")
    # Ray's torch backend has loaded it by now. Importing it for a job that does not use it, or beside a
    # training thread that is importing it, would be a change to the job.
    if loaded is None or getattr(loaded.__spec__, "_initializing", False):
        raise RuntimeError("torch is not loaded in this process")
    base = Path(os.environ.get("RANKWATCH_SOCKET_DIR") or f"/tmp/rankwatch-{os.geteuid()}")  # noqa: S108  made 0700 below
    folder = base / attempt_id[:12]
    path = folder / f"rank_{world_rank}.{os.getpid()}.sock"
    if len(os.fsencode(path)) >= _SOCKET_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, "set RANKWATCH_SOCKET_DIR to a shorter path", str(path))
    _own(base)
    _remove_dead_sockets(base, folder.name)
    _own(folder)
    with contextlib.suppress(ImportError):
        import torch.distributed.debug._handlers  # noqa: F401, PLC0415  registers further handlers
    from torch._C._distributed_c10d import _WorkerServer  # noqa: PLC0415  see above

    # This function came by value, so a global of it would end with the call; the server must not.
    keeper = sys.modules.setdefault("_rankwatch_worker", types.ModuleType("_rankwatch_worker"))
    if not path.exists():
        keeper.__dict__[str(path)] = _WorkerServer(str(path))
    return str(path)


def _own(folder: Path) -> None:
    """Make a folder that only we can enter; refuse one in which others could plant something."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "not a folder of this user", str(folder))
    if seen.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may write to this folder", str(folder))


def _remove_dead_sockets(base: Path, current: str) -> None:
    """Sweep what earlier attempts left behind. A pid may be one of another container that shares the
    folder, so a socket goes only if nobody listens either.
    """
    for folder in base.iterdir():
        if folder.name == current or folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):  # not empty, or another rank is sweeping too
            dead = [path for path in folder.iterdir() if _is_dead(path)]
            for path in dead:
                path.unlink(missing_ok=True)
            if dead:  # an empty folder may be one that another job is about to use
                folder.rmdir()


def _is_dead(path: Path) -> bool:
    named = _SOCKET_NAME.fullmatch(path.name)
    return named is not None and not Path("/proc", named[1]).exists() and not _listens(path)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _start_ticks() -> int | None:
    """Field 22 of /proc/self/stat: with the pid it names a process for good."""
    try:
        return int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def suspend_polling(seconds: float, reason: str, run_id: str = "") -> bool:
    """Ask rankwatch not to question NCCL for a while, because a communicator is about to be rebuilt.

    One rank is enough: the one that begins first. Waits half a second at most for the store, and never
    raises. It ends by itself, so a rank that dies in between blinds nobody for long.

    Args:
        seconds: How long, 600 at most; `resume_polling` ends it earlier.
        reason: What people shall read.
        run_id: Of the run, where this is called outside a training function of Ray Train.

    Returns:
        Whether rankwatch can know by now.
    """
    try:
        for_s = min(max(0.0, float(seconds)), _MOST_SUSPENDED_S)
        document = {"until": time.time() + for_s, "reason": str(reason)[:_REASON_CHARS]}
    except Exception as error:  # noqa: BLE001  the promise of this file
        logger.warning("rankwatch: polling is not suspended: %r", error)
        return False
    return _say_suspension(document, run_id)


def resume_polling(run_id: str = "") -> bool:
    """End `suspend_polling`. Call it on the same rank, when the communicator is there again.

    Args:
        run_id: As it was given to `suspend_polling`.

    Returns:
        Whether rankwatch can know by now.
    """
    return _say_suspension(None, run_id)


def _say_suspension(document: dict[str, Any] | None, run_id: str) -> bool:
    try:
        mailbox = _process_mailbox()
        mailbox.put(f"suspend:{run_id or _own_run_id()}", document)
        return mailbox.flush(_SUSPEND_WAIT_S)
    except Exception as error:  # noqa: BLE001  the promise of this file
        logger.warning("rankwatch: polling is neither suspended nor resumed: %r", error)
        return False


def _own_run_id() -> str:
    from ray.train.v2._internal.execution.context import get_train_context  # noqa: PLC0415  not public

    return str(get_train_context().train_run_context.run_id)


def _process_mailbox() -> Mailbox:
    """The mailbox of this process, so that a resume never overtakes its suspend."""
    keeper = sys.modules.setdefault("_rankwatch_worker", types.ModuleType("_rankwatch_worker"))
    found: Mailbox | None = keeper.__dict__.get("mailbox")
    if found is None:
        found = keeper.__dict__.setdefault("mailbox", Mailbox(RayKv()))
    return found


# ---- the key-value store ------------------------------------------------------------------------------


class RayKv:
    """The store of the cluster's control service."""

    def get(self, key: str) -> bytes | None:
        """The value, None where there is none."""
        from ray.experimental import internal_kv  # noqa: PLC0415  not public: missing is an error of ours only

        found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=NAMESPACE)  # noqa: SLF001
        return found

    def put(self, key: str, value: bytes) -> None:
        """Store a value in place of whatever there is."""
        from ray.experimental import internal_kv  # noqa: PLC0415  see get

        internal_kv._internal_kv_put(key.encode(), value, True, namespace=NAMESPACE)  # noqa: SLF001

    def delete(self, key: str) -> None:
        """Remove a key if there is one."""
        from ray.experimental import internal_kv  # noqa: PLC0415  see get

        internal_kv._internal_kv_del(key.encode(), namespace=NAMESPACE)  # noqa: SLF001


class Mailbox:
    """Reads and writes from one thread. What could not be written is tried again with the next read; of two
    values for a key the newer counts.
    """

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unsent: dict[str, bytes | None] = {}
        self._lock = threading.Lock()
        self._reading: Future[bytes | None] | None = None
        threading.Thread(target=self._work, name="rankwatch", daemon=True).start()

    def put(self, key: str, document: dict[str, Any] | None) -> None:
        """Write soon, or delete where there is no document; returns at once."""
        with self._lock:
            self._unsent[key] = None if document is None else json.dumps(document).encode()
        self._jobs.put(self._send)

    def read(self, key: str) -> bytes | None:
        """The value, waiting half a second at most; a late answer is given by a later call.

        Raises:
            TimeoutError: the store is slow; said once for each question.
            Exception: whatever the store raised.
        """
        asked = self._reading is None
        if self._reading is None:
            self._reading = Future()
            self._jobs.put(functools.partial(self._get, key, self._reading))
        if not asked and not self._reading.done():
            return None
        try:
            return self._reading.result(timeout=_READ_S)
        except FutureTimeoutError as error:
            raise TimeoutError(f"the key-value store did not answer within {_READ_S} s") from error
        finally:
            if self._reading.done():
                self._reading = None

    def flush(self, within_s: float = _FLUSH_S) -> bool:
        """Give what was written some time to arrive; says whether all of it did."""
        turn = threading.Event()
        self._jobs.put(turn.set)
        if not turn.wait(within_s):
            return False
        with self._lock:
            return not self._unsent

    def _work(self) -> None:
        told = False
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as error:  # noqa: BLE001  it is tried again
                if not told:
                    logger.warning("rankwatch: the key-value store takes nothing: %r", error)
                told = True

    def _send(self) -> None:
        with self._lock:
            unsent = list(self._unsent.items())
        for key, value in unsent:
            if value is None:
                self._kv.delete(key)
            else:
                self._kv.put(key, value)
            with self._lock:
                if key in self._unsent and self._unsent[key] is value:
                    del self._unsent[key]

    def _get(self, key: str, answer: Future[bytes | None]) -> None:
        try:
            answer.set_result(self._kv.get(key))
        except Exception as error:  # noqa: BLE001  belongs to whoever reads
            answer.set_exception(error)
        self._send()


# ---- on the controller --------------------------------------------------------------------------------


def _harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """An error that leaves a hook fails the run, in some hooks beyond retry."""

    @functools.wraps(hook)
    def guarded(self: RankwatchCallback, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  the promise of this file
            with contextlib.suppress(Exception):
                self._complain(hook.__name__, error)

    return guarded


class RankwatchCallback(WorkerGroupCallback, ControllerCallback):  # type: ignore[misc]
    """Announces the run's attempts and carries out verdicts. Ray builds it on the driver and sends it to
    the controller, so it holds nothing that cannot be pickled before the controller has started.

    Args:
        kv: Takes the place of the cluster's store in tests.
    """

    def __init__(self, kv: Any = None) -> None:
        self._kv = kv
        self._mailbox: Mailbox | None = None
        self._said: dict[str, Any] = {}
        self._past: set[str] = set()
        self._handled: set[str] = set()
        self._last_read: bytes | None = None
        self._failing: dict[str, Any] | None = None
        self._complaints: set[tuple[str, str]] = set()

    @_harmless
    def after_controller_start(self, train_run_context: Any) -> None:
        """Learn which run this is."""
        config = train_run_context.get_run_config()
        here = ray.get_runtime_context()
        backend = getattr(train_run_context, "backend_config", None)
        self._said = {
            "protocol": PROTOCOL,
            "run_id": train_run_context.run_id,
            "run_name": config.name,
            "job_id": here.get_job_id(),
            "storage_path": str(config.storage_path),
            "backend": getattr(backend, "backend", None),
            "process_group_timeout_s": getattr(backend, "timeout_s", None),
            "controller": {
                "actor_id": here.get_actor_id(),
                "pid": os.getpid(),
                "node_id": here.get_node_id(),
            },
            "attempt_id": "",
            "attempt_index": -1,
            "started_at": 0.0,
            "workers": [],
        }
        self._mailbox = Mailbox(self._kv or RayKv())

    @_harmless
    def after_worker_group_start(self, worker_group: Any) -> None:
        """A new attempt: its processes are there, its process group is not yet."""
        if self._said["attempt_id"]:
            self._past.add(self._said["attempt_id"])
            if self._mailbox is not None:  # a rank that died while it rebuilt did not say that it is over
                self._mailbox.put(f"suspend:{self._said['run_id']}", None)
        self._said["attempt_id"] = uuid.uuid4().hex
        self._said["attempt_index"] += 1
        self._said["started_at"] = time.time()
        self._failing = None
        self._said["workers"] = [_worker(worker) for worker in worker_group.get_workers()]
        self._announce("starting")

    @_harmless
    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Training runs: start the worker servers, and say what the ranks say of themselves.

        Not earlier, because now torch is loaded where it is used; the ranks answer in milliseconds.
        """
        try:
            workers = worker_group.get_workers()
            answers = [
                worker.execute_async(start_in_worker, self._said["attempt_id"], place["world_rank"])
                for worker, place in zip(workers, self._said["workers"])  # noqa: B905  strict needs Python 3.10
            ]
            ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_RANKS_S)
            for place, answer in zip(self._said["workers"], answers):  # noqa: B905  see above
                if answer in ready:
                    with contextlib.suppress(Exception):  # the rank is gone: Ray's poll finds out
                        place.update(ray.get(answer))
        finally:
            self._announce("running")

    @_harmless
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """The attempt is over, whatever comes next."""
        del worker_group
        self._announce("stopping")

    @_harmless
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Say how the run ends."""
        del previous_state
        if current_state.is_terminal():
            name = current_state._state_type.state_name  # noqa: SLF001  Ray has no other name for it
            self._end(_ENDS.get(name, "failed"))

    @_harmless
    def after_controller_finish(self, result: Any) -> None:
        """The last hook of a run, also of one whose states we were not told."""
        self._end("finished" if result.error is None else "failed")

    @_harmless
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Read the verdict; one about this attempt becomes an error of the ranks that it names."""
        if self._mailbox is None:
            return
        if self._failing is not None:  # a preemption that was seen in the same poll came first: insist
            _inject(self._failing, worker_group_status.worker_statuses)
            return
        content = self._mailbox.read(f"verdict:{self._said['run_id']}")
        if not content or content == self._last_read:
            return
        self._last_read = content
        verdict = json.loads(content)
        incident = str(verdict["incident"])
        if incident in self._handled:
            return
        self._handled.add(incident)
        refusal = self._refusal(verdict, worker_group_status)
        if refusal:
            logger.warning("rankwatch: incident %s is not acted upon: %s", incident, refusal)
            self._acknowledge(incident, "refused", refusal)
            return
        ranks = _inject(verdict, worker_group_status.worker_statuses)
        self._failing = verdict
        self._acknowledge(incident, "failed_attempt", f"error set on ranks {ranks}")
        logger.error("rankwatch: incident %s fails this attempt: %s", incident, verdict.get("message"))

    def _refusal(self, verdict: dict[str, Any], status: Any) -> str:
        """Why the verdict is not about what runs now; empty where it is."""
        meant, current = str(verdict.get("attempt_id") or ""), self._said["attempt_id"]
        if status.finished and not status.errors:
            return f"attempt {current} has finished by itself"
        if meant == current:
            return ""
        if meant in self._past:
            return f"attempt {meant} is over, attempt {current} runs now"
        if {int(pid) for pid in verdict.get("pids") or ()} == {w["pid"] for w in self._said["workers"]}:
            return ""
        return f"attempt {meant or 'unnamed'} is unknown and its pids are not those of attempt {current}"

    def _announce(self, state: str) -> None:
        self._said["state"] = state
        if self._mailbox is not None:
            self._mailbox.put(f"run:{self._said['run_id']}", {**self._said, "announced_at": _now()})

    def _end(self, state: str) -> None:
        if self._mailbox is not None and self._said.get("state") != state:
            self._announce(state)
            self._mailbox.flush()

    def _acknowledge(self, incident: str, outcome: str, reason: str) -> None:
        document = {
            "incident": incident,
            "attempt_id": self._said["attempt_id"],
            "at": _now(),
            "outcome": outcome,
            "reason": reason,
        }
        if self._mailbox is not None:
            self._mailbox.put(f"ack:{self._said['run_id']}:{incident}", document)

    def _complain(self, where: str, error: Exception) -> None:
        kind = (where, type(error).__name__)
        if kind not in self._complaints:
            self._complaints.add(kind)
            logger.warning("rankwatch: %s: %r. Training goes on; not said again.", where, error)


def _inject(verdict: dict[str, Any], statuses: dict[int, Any]) -> list[int]:
    """Set the error where Ray Train's controller looks for one.

    Raising it from the hook would fail the attempt too, but Ray would then record the attempt as FINISHED
    without a word of why.

    Args:
        verdict: Its `ranks` say which, its `message` what to tell.
        statuses: World rank to WorkerStatus, changed in place.

    Returns:
        The ranks that carry the error.
    """
    said = dict(verdict.get("ranks") or {})
    named = {int(rank): str(why) for rank, why in said.items() if str(rank).isdecimal()}
    ranks = sorted(set(named) & set(statuses)) or [min(statuses)]
    for rank in ranks:
        cause = statuses[rank].error
        # The message comes first: of a long text Ray shows the first and the last 500 characters.
        text = str(verdict.get("message") or "NCCL hang confirmed by rankwatch")
        text += "".join(f"\nRank {other}: {named[other]}" for other in ranks if named.get(other))
        if cause is not None:
            text += f"\nThe rank itself had failed: {type(cause).__name__}: {cause}"[:400]
        # Only text goes along: the error travels to the driver, where the user's exception may not load.
        error = _error_class()(text, worker_failures={rank: RuntimeError(named.get(rank) or text[:500])})
        error.__cause__ = cause
        statuses[rank].error = error
    return ranks


def _error_class() -> Any:
    try:
        return ray.train.NCCLHangError
    except AttributeError:  # before 2.60
        return ray.train.WorkerGroupError


def _worker(worker: Any) -> dict[str, Any]:
    """What the controller knows of a rank."""
    place, process = worker.distributed_context, worker.metadata
    return {
        "world_rank": place.world_rank,
        "local_rank": place.local_rank,
        "node_rank": place.node_rank,
        "node_id": process.node_id,
        "node_ip": process.node_ip,
        "hostname": process.hostname,
        "pid": process.pid,
        "start_ticks": None,
        "gpu_ids": list(process.gpu_ids),
        "actor_id": worker.actor._actor_id.hex(),  # noqa: SLF001  as Ray Train itself does
        "log_file_path": getattr(worker, "log_file_path", None),
        "worker_server": None,
        "env": {},
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")  # noqa: UP017  Python 3.9 has no UTC


# By value: neither the controller's node nor the ranks need this file then.
with contextlib.suppress(Exception):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
