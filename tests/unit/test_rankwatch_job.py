"""The part inside the training job: it acts once, on the attempt that is meant, and never breaks a run."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller.state import ErroredState, FinishedState, RunningState
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from deployments.training_job import rankwatch_job
from deployments.training_job.rankwatch_job import (
    Mailbox,
    RankwatchCallback,
    resume_polling,
    start_in_worker,
    suspend_polling,
)
from tasks.adapters.ports import Ack
from tasks.adapters.ray_answers import parse, parse_announcement, parse_suspension

PIDS = (1000, 1001, 1002, 1003)
MESSAGE = "NCCL hang confirmed by rankwatch: rank 2 stands in report."


class FakeKv:
    """A store in memory that fails or hangs when told to."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def get(self, key: str) -> bytes | None:
        self._may_fail()
        return self.content.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._may_fail()
        self.content[key] = value

    def delete(self, key: str) -> None:
        self._may_fail()
        self.content.pop(key, None)

    def _may_fail(self) -> None:
        self.open.wait()
        if self.error:
            raise self.error


class FakeWorker:
    def __init__(self, rank: int, pid: int) -> None:
        self.distributed_context = types.SimpleNamespace(world_rank=rank, local_rank=rank, node_rank=0)
        self.metadata = types.SimpleNamespace(
            node_id="node", node_ip="10.0.0.1", hostname="host", pid=pid, gpu_ids=[str(rank)]
        )
        self.actor = types.SimpleNamespace(_actor_id=bytes([rank]))
        self.log_file_path = f"/logs/{rank}.log"

    def execute_async(self, function: Any, attempt_id: str, world_rank: int) -> Any:
        assert function is start_in_worker
        return attempt_id, world_rank, self.metadata.pid


class FakeRay:
    """What the callback uses of Ray: answers are there at once, but for the ranks in `lost`."""

    train = ray.train

    def __init__(self) -> None:
        self.lost: set[int] = set()

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(
            get_job_id=lambda: "02000000", get_actor_id=lambda: "ac", get_node_id=lambda: "node"
        )

    def wait(self, refs: Any, **options: Any) -> Any:
        assert options == {"num_returns": len(refs), "timeout": 10.0}
        return [ref for ref in refs if ref[1] not in self.lost], [ref for ref in refs if ref[1] in self.lost]

    def get(self, ref: Any) -> Any:
        attempt_id, rank, pid = ref
        path = f"/s/{attempt_id[:12]}/rank_{rank}.{pid}.sock"
        return {"pid": pid, "start_ticks": 77, "worker_server": path, "env": {"NCCL_RAS_ADDR": "h:1"}}


class Controller:
    """Calls the hooks in the order in which Ray's controller does."""

    def __init__(self) -> None:
        self.kv = FakeKv()
        self.callback = RankwatchCallback(self.kv)
        config = types.SimpleNamespace(name="demo", storage_path="s3://bucket/runs")
        backend = types.SimpleNamespace(backend="gloo", timeout_s=1800)
        self.callback.after_controller_start(
            types.SimpleNamespace(run_id="r1", get_run_config=lambda: config, backend_config=backend)
        )

    def group(self, pids: tuple[int, ...] = PIDS) -> str:
        group = types.SimpleNamespace(get_workers=lambda: list(map(FakeWorker, range(len(pids)), pids)))
        self.callback.after_worker_group_start(group)
        self.callback.after_worker_group_training_start(group)
        return str(self.announced().attempt_id)

    def announced(self) -> Any:
        self.settle()
        return parse_announcement(self.kv.content["run:r1"])

    def settle(self) -> None:
        arrived = threading.Event()
        assert self.callback._mailbox is not None
        self.callback._mailbox._jobs.put(arrived.set)
        assert arrived.wait(60)

    def post(self, incident: str = "i1", **fields: Any) -> None:
        verdict = {"incident": incident, "attempt_id": self.announced().attempt_id, "message": MESSAGE}
        verdict |= {"pids": list(PIDS), "ranks": {"2": "1 AllReduce behind"}, "posted_at": "now"}
        self.kv.content["verdict:r1"] = json.dumps({**verdict, **fields}).encode()

    def poll(self, statuses: dict[int, WorkerStatus] | None = None) -> WorkerGroupPollStatus:
        status = WorkerGroupPollStatus(statuses or {rank: WorkerStatus(running=True) for rank in range(4)})
        self.callback.after_worker_group_poll_status(status)
        return status

    def ack(self, incident: str = "i1") -> Ack | None:
        self.settle()
        content = self.kv.content.get(f"ack:r1:{incident}")
        return parse(content, Ack, "ack") if content else None


@pytest.fixture
def fake_ray(monkeypatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(rankwatch_job, "ray", fake)
    monkeypatch.setattr(rankwatch_job, "_READ_S", 60.0)  # a busy machine is no slow store
    return fake


@pytest.fixture
def controller(fake_ray) -> Controller:
    return Controller()


# ---- announcements ------------------------------------------------------------------------------------


def test_an_attempt_is_announced_from_its_start_to_its_end(controller):
    first = controller.group()
    said = controller.announced()
    assert (said.run_id, said.run_name, said.job_id, said.state) == ("r1", "demo", "02000000", "running")
    assert (said.storage_path, said.controller.node_id) == ("s3://bucket/runs", "node")
    assert [(w.world_rank, w.pid, w.start_ticks, w.gpu_ids) for w in said.workers] == [
        (rank, pid, 77, (str(rank),)) for rank, pid in enumerate(PIDS)
    ]
    assert said.workers[3].worker_server == f"/s/{first[:12]}/rank_3.1003.sock"
    assert said.env == {"NCCL_RAS_ADDR": "h:1"}

    controller.callback.before_worker_group_shutdown(None)
    assert controller.announced().state == "stopping"
    second = controller.group((2000, 2001, 2002, 2003))
    assert second != first
    assert controller.announced().attempt_index == 1

    controller.callback.after_controller_state_update(None, RunningState())
    assert controller.announced().state == "running"
    controller.callback.after_controller_state_update(None, FinishedState())
    assert controller.announced().state == "finished"


def test_the_end_of_a_run_is_announced_by_whichever_hook_comes(controller):
    controller.group()
    error = ray.train.WorkerGroupError("x", {})
    controller.callback.after_controller_state_update(None, ErroredState(training_failed_error=error))
    controller.callback.after_controller_finish(types.SimpleNamespace(error=error))
    assert controller.announced().state == "failed"
    controller.callback.after_controller_finish(types.SimpleNamespace(error=None))
    assert controller.announced().state == "finished"


def test_a_rank_that_does_not_answer_in_time_is_announced_without_its_worker_server(controller, fake_ray):
    fake_ray.lost = {1}
    controller.group()
    workers = controller.announced().workers
    assert [bool(worker.worker_server) for worker in workers] == [True, False, True, True]
    assert workers[1].pid == 1001


def test_an_attempt_is_announced_before_its_process_group_exists(controller):
    group = types.SimpleNamespace(get_workers=lambda: [FakeWorker(0, 1000)])
    controller.callback.after_worker_group_start(group)
    said = controller.announced()
    assert (said.state, [worker.pid for worker in said.workers]) == ("starting", [1000])


def test_when_an_attempt_began_and_what_would_end_it_is_announced(controller):
    before = time.time()
    controller.group()
    first = controller.announced()
    assert before <= first.started_at <= time.time()
    assert (first.backend, first.process_group_timeout_s) == ("gloo", 1800)
    controller.group((2000, 2001, 2002, 2003))
    assert controller.announced().started_at > first.started_at


def test_a_suspension_does_not_outlive_its_attempt(controller):
    """The rank that asked for it died while it rebuilt."""
    controller.group()
    controller.kv.content["suspend:r1"] = b"{}"
    controller.callback.before_worker_group_shutdown(None)
    controller.group((2000, 2001, 2002, 2003))
    controller.settle()
    assert "suspend:r1" not in controller.kv.content


# ---- verdicts -----------------------------------------------------------------------------------------


def test_a_verdict_fails_the_attempt_once(controller):
    attempt = controller.group()
    assert controller.poll().errors == {}
    controller.post()
    status = controller.poll()
    assert set(status.errors) == {2}
    error = status.get_worker_group_error().worker_failures[2]
    assert isinstance(error, ray.train.NCCLHangError)
    assert MESSAGE in str(error)
    assert str(error.worker_failures[2]) == "1 AllReduce behind"
    ack = controller.ack()
    assert ack is not None
    assert (ack.outcome, ack.attempt_id) == ("failed_attempt", attempt)

    controller.group((2000, 2001, 2002, 2003))
    assert controller.poll().errors == {}
    controller.post()  # the same incident again, about the new attempt even
    assert controller.poll().errors == {}


def test_the_error_stays_until_the_controller_acts_on_it(controller):
    controller.group()
    controller.post()
    assert set(controller.poll().errors) == {2}
    assert set(controller.poll().errors) == {2}  # the first was seen together with a preemption, say
    controller.group((2000, 2001, 2002, 2003))
    assert controller.poll().errors == {}


def test_a_verdict_about_an_attempt_that_is_over_is_refused(controller):
    old = controller.group()
    controller.group((2000, 2001, 2002, 2003))
    controller.post(attempt_id=old, pids=[2000, 2001, 2002, 2003])
    assert controller.poll().errors == {}
    ack = controller.ack()
    assert ack is not None
    assert (ack.outcome, old in ack.reason) == ("refused", True)
    del controller.kv.content["ack:r1:i1"]
    assert controller.poll().errors == {}
    assert controller.ack() is None


@pytest.mark.parametrize(
    ("attempt", "pids", "outcome"),
    [
        ("of another name", [1003, 1002, 1001, 1000], "failed_attempt"),
        ("", [1000, 1001, 1002, 1003], "failed_attempt"),
        ("of another name", [1000, 1001, 1002], "refused"),
        ("of another name", [1000, 1001, 1002, 1003, 1004], "refused"),
        ("of another name", [], "refused"),
        (None, None, "refused"),
    ],
)
def test_an_attempt_under_another_name_is_known_by_its_processes(controller, attempt, pids, outcome):
    controller.group()
    controller.post(attempt_id=attempt, pids=pids)
    assert bool(controller.poll().errors) == (outcome == "failed_attempt")
    ack = controller.ack()
    assert ack is not None
    assert ack.outcome == outcome


@pytest.mark.parametrize("ranks", [{}, None, {"17": "gone"}, {"unknown": "x"}])
def test_without_a_rank_to_blame_the_lowest_carries_the_error(controller, ranks):
    controller.group()
    controller.post(ranks=ranks)
    assert set(controller.poll().errors) == {0}


def test_an_attempt_that_finishes_by_itself_is_left_alone(controller):
    controller.group()
    controller.post()
    status = controller.poll({rank: WorkerStatus(running=False) for rank in range(4)})
    assert status.errors == {}
    ack = controller.ack()
    assert ack is not None
    assert (ack.outcome, "finished by itself" in ack.reason) == ("refused", True)


def test_the_reason_takes_the_place_of_a_death_and_keeps_it(controller):
    controller.group()
    controller.post(ranks={"1": "one", "2": "two"})
    death = WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())
    statuses = {rank: WorkerStatus(running=True) for rank in range(4)}
    statuses[2] = WorkerStatus(running=False, error=death)
    status = controller.poll(statuses)
    assert set(status.errors) == {1, 2}
    assert status.errors[2].__cause__ is death
    assert "WorkerHealthCheckFailedError" in str(status.errors[2])
    assert all(isinstance(error, ray.train.NCCLHangError) for error in status.errors.values())


def test_the_message_survives_how_ray_shortens_long_errors(controller):
    controller.group()
    controller.post(message=f"{MESSAGE} {'x' * 3000}")
    shown = controller.poll({rank: WorkerStatus(running=rank == 0) for rank in range(4)}).get_error_string()
    assert "Output truncated" in shown
    assert MESSAGE in shown[:500]


# ---- nothing may break the run ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"null", b"{}", b'{"incident": "i1"}', b'{"incident":"i1","pids":["a"]}']
)
def test_a_verdict_that_cannot_be_read_changes_nothing(controller, content):
    controller.group()
    controller.kv.content["verdict:r1"] = content
    assert controller.poll().errors == {}
    controller.post("i2")
    assert set(controller.poll().errors) == {2}


HOOKS = {
    "after_controller_start": 1,
    "after_worker_group_start": 1,
    "after_worker_group_training_start": 1,
    "before_worker_group_shutdown": 1,
    "after_controller_state_update": 2,
    "after_controller_finish": 1,
    "after_worker_group_poll_status": 1,
}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_raises_whatever_it_is_given(hook, started, controller, caplog):
    callback = controller.callback if started else RankwatchCallback(FakeKv())
    if started:
        controller.group()
        controller.post()
        controller.kv.error = OSError("no store")
    for _ in range(3):
        getattr(callback, hook)(*[object()] * HOOKS[hook])
    assert sum(f"rankwatch: {hook}" in line for line in caplog.messages) <= 1


def test_a_store_that_fails_is_said_once_and_tried_again(controller, caplog):
    controller.group()
    controller.post()
    controller.kv.error = OSError("no store")
    for _ in range(5):
        assert controller.poll().errors == {}
    controller.callback.before_worker_group_shutdown(None)
    controller.settle()
    assert sum("no store" in line for line in caplog.messages) == 1 + 1  # one for reading, one for writing
    controller.kv.error = None
    assert set(controller.poll().errors) == {2}
    controller.settle()
    assert controller.announced().state == "stopping"


def test_a_store_that_hangs_holds_one_poll_for_a_moment_and_no_other(controller, caplog, monkeypatch):
    monkeypatch.setattr(rankwatch_job, "_READ_S", 0.5)
    controller.group()
    controller.post()
    controller.kv.open.clear()
    for _ in range(50):  # waiting in each would take 25 s
        assert controller.poll().errors == {}
    assert sum("did not answer" in line for line in caplog.messages) == 1
    controller.kv.open.set()
    controller.settle()
    assert set(controller.poll().errors) == {2}  # the late answer counts


PARTS = (RankwatchCallback(), start_in_worker, suspend_polling, resume_polling)


def test_the_callback_travels_by_value(tmp_path):
    """Neither the controller nor a rank has this file; a job in any folder does."""
    (tmp_path / "callback").write_bytes(ray.cloudpickle.dumps(PARTS))
    code = (
        "import pickle, sys, ray.train\n"
        "callback, start, *pause = pickle.load(open('callback', 'rb'))\n"
        "callback.after_worker_group_poll_status(None)\n"
        "assert 'deployments' not in sys.modules\n"
        "again = pickle.loads(ray.cloudpickle.dumps(start))\n"
        "print(again('a' * 32, 3)['worker_server_reason'])\n"
        "print([say(*given) for say, given in zip(pause, [(5, 'why', 'r1'), ('r1',)])])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "torch is not loaded" in answer.stdout
    assert "[False, False]" in answer.stdout  # no cluster, and no error


def test_another_version_of_ray_train_only_loses_the_watch(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal.execution.callback", None)
    spec = importlib.util.spec_from_file_location("rankwatch_other_ray", rankwatch_job.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from ray.train.v2.api.callback import RayTrainCallback  # noqa: PLC0415  what Ray asks of a callback

    assert issubclass(module.RankwatchCallback, RayTrainCallback)
    module.RankwatchCallback().after_worker_group_poll_status(None)


# ---- suspending the polls -----------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch) -> FakeKv:
    """The store of a process that is a rank of run r1."""
    kv = FakeKv()
    keeper = types.ModuleType("_rankwatch_worker")
    keeper.__dict__["mailbox"] = Mailbox(kv)
    monkeypatch.setitem(sys.modules, "_rankwatch_worker", keeper)
    monkeypatch.setattr(rankwatch_job, "_SUSPEND_WAIT_S", 60.0)
    context = types.SimpleNamespace(train_run_context=types.SimpleNamespace(run_id="r1"))
    monkeypatch.setattr("ray.train.v2._internal.execution.context.get_train_context", lambda: context)
    return kv


def test_a_rank_suspends_and_resumes(store):
    before = time.time()
    assert suspend_polling(30, "rebuilding the tensor group")
    said = parse_suspension(store.content["suspend:r1"])
    assert before + 30 <= said.until <= time.time() + 30
    assert said.reason == "rebuilding the tensor group"
    assert resume_polling()
    assert store.content == {}


def test_outside_a_training_function_the_run_is_named(store):
    assert suspend_polling(30, "why", "r2")
    assert set(store.content) == {"suspend:r2"}
    assert resume_polling("r2")
    assert store.content == {}


@pytest.mark.parametrize(("seconds", "longest"), [(1e9, 600), (float("inf"), 600), (-5, 0), (10, 10)])
def test_a_suspension_is_bounded(store, seconds, longest):
    before = time.time()
    assert suspend_polling(seconds, "x" * 5000)
    said = parse_suspension(store.content["suspend:r1"])
    assert before <= said.until <= time.time() + longest
    assert len(said.reason) == 200


@pytest.mark.parametrize("seconds", [None, "soon", float("nan")])
def test_nonsense_suspends_nothing_for_long_and_raises_nothing(store, seconds):
    suspend_polling(seconds, "why")
    content = store.content.get("suspend:r1")
    assert parse_suspension(content).until <= time.time()


def test_without_a_run_nothing_is_suspended_and_nothing_raised(store, monkeypatch, caplog):
    def nobody() -> None:
        raise RuntimeError("TrainContext has not been initialized.")

    monkeypatch.setattr("ray.train.v2._internal.execution.context.get_train_context", nobody)
    assert not suspend_polling(30, "why")
    assert not resume_polling()
    assert store.content == {}
    assert "neither suspended nor resumed" in caplog.text


def test_a_store_that_fails_is_no_matter_of_the_training(store):
    store.error = OSError("no store")
    assert not suspend_polling(30, "why")
    store.error = None
    assert resume_polling()  # the newer word counts
    assert store.content == {}


def test_a_store_that_hangs_holds_the_training_for_a_moment_only(store, monkeypatch):
    monkeypatch.setattr(rankwatch_job, "_SUSPEND_WAIT_S", 0.05)
    store.open.clear()
    assert not suspend_polling(30, "why")
    assert not resume_polling()
    store.open.set()
    monkeypatch.setattr(rankwatch_job, "_SUSPEND_WAIT_S", 60.0)
    assert resume_polling()
    assert store.content == {}  # a late suspend does not come after the resume


# ---- in a rank ----------------------------------------------------------------------------------------


@pytest.fixture
def base(monkeypatch, tmp_path) -> Path:
    """The folder of the sockets; torch counts as loaded, but what is tested here ends before it is used."""
    folder: Path = tmp_path / "s"
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setenv("RANKWATCH_SOCKET_DIR", str(folder))
    return folder


def test_a_rank_says_who_it_is_also_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("NCCL_RAS_ADDR", "localhost:28028")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    said = start_in_worker("a" * 32, 3)
    assert said["env"] == {"NCCL_RAS_ADDR": "localhost:28028"}
    assert said["start_ticks"] > 0
    assert (said["worker_server"], "not loaded" in said["worker_server_reason"]) == (None, True)


def test_a_folder_that_others_can_write_is_refused(base):
    base.mkdir()
    base.chmod(0o777)
    assert "others may write" in start_in_worker("a" * 32, 3)["worker_server_reason"]
    assert list(base.iterdir()) == []


def test_a_link_in_the_place_of_the_folder_is_refused(base, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    assert "not a folder of this user" in start_in_worker("a" * 32, 3)["worker_server_reason"]


def test_a_path_that_is_too_long_for_a_socket_is_refused(base, monkeypatch):
    monkeypatch.setenv("RANKWATCH_SOCKET_DIR", f"{base}/{'x' * 100}")
    assert "RANKWATCH_SOCKET_DIR to a shorter path" in start_in_worker("a" * 32, 3)["worker_server_reason"]
    assert not base.exists()
