"""How a run is found, in which order, and what is not believed."""

import json
from pathlib import Path

import msgspec
import pytest

from tasks.adapters.ray_answers import Actor, Job, TrainRun, WorkerProcess, parse, parse_rows
from tasks.adapters.ray_discovery import RayRunDirectory
from tasks.hang.errors import ClusterUnreachable, RunNotFound

DATA = Path(__file__).parents[1] / "data" / "ray"
CONTROLLER = "c0ffee"
AWAY = ClusterUnreachable("away")


def recorded_runs(name: str) -> list[TrainRun]:
    answer = json.loads((DATA / name).read_bytes())
    return parse(json.dumps(answer["train_runs"]), list[TrainRun], name)


def announced(run_id: str = "r1", **fields: object) -> dict[str, bytes]:
    said = {
        "protocol": 1,
        "run_id": run_id,
        "run_name": "demo",
        "job_id": "02000000",
        "attempt_id": f"uuid-{run_id}",
        "attempt_index": 0,
        "state": "running",
        "announced_at": "2026-12-01T04:00:00+00:00",
        "storage_path": "/srv/run/storage",
        "controller": {"actor_id": CONTROLLER, "pid": 7, "node_id": "n1"},
        "workers": [
            {
                "world_rank": rank,
                "local_rank": rank,
                "node_rank": 0,
                "node_id": "n1",
                "node_ip": "192.0.2.2",
                "hostname": "vm",
                "pid": 100 + rank,
                "start_ticks": 5000 + rank,
                "gpu_ids": [rank],
                "actor_id": f"a{rank}",
                "log_file_path": "/srv/ray/logs/w.log",
                "worker_server": "/tmp/ws.sock",
                "env": {"NCCL_RAS_ADDR": "0.0.0.0:28028", "HF_TOKEN": "x"},
            }
            for rank in (1, 0)
        ],
    }
    return {f"run:{run_id}": json.dumps(said | fields).encode()}


class FakeKv:
    """Keys and values, and a count of reads."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.reads: list[str] = []
        self.down = False

    def keys(self, prefix: str) -> list[str]:
        if self.down:
            raise AWAY
        return [key for key in self.values if key.startswith(prefix)]

    def get(self, key: str) -> bytes | None:
        self.reads.append(key)
        return self.values.get(key)


class FakeDashboard:
    """Answers from what the test puts in; `down` refuses everything."""

    def __init__(self) -> None:
        self.runs: list[TrainRun] = []
        self.actors: list[Actor] = []
        self.processes: list[WorkerProcess] = []
        self.logs: dict[str, str] = {}
        self.known_jobs: list[Job] = []
        self.down = False
        self.asked: list[str] = []

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.down:
            raise AWAY

    def train_runs(self) -> list[TrainRun]:
        self._ask("runs")
        return self.runs

    def train_workers(self) -> list[Actor]:
        self._ask("workers")
        return [
            actor for actor in self.actors if (actor.class_name, actor.state) == ("RayTrainWorker", "ALIVE")
        ]

    def actor(self, actor_id: str) -> Actor | None:
        self._ask("actor")
        return next((actor for actor in self.actors if actor.actor_id == actor_id), None)

    def worker_processes(self) -> list[WorkerProcess]:
        self._ask("processes")
        return self.processes

    def log_tail(self, node_id: str, filename: str, *, lines: int) -> str:
        del node_id
        self._ask(filename)
        return "\n".join(self.logs.get(filename, "").splitlines()[-lines:])

    def jobs(self) -> list[Job]:
        self._ask("jobs")
        return self.known_jobs


@pytest.fixture
def dashboard():
    made = FakeDashboard()
    made.actors = [Actor(actor_id=CONTROLLER, class_name="TrainController", state="ALIVE")]
    made.known_jobs = [Job(job_id="02000000", submission_id="job-demo")]
    return made


@pytest.fixture
def plain(dashboard):
    """The dashboard of a real run that has neither in-job part nor state tracking."""
    rows = (DATA / "api_v0_actors_train_workers.json").read_bytes()
    dashboard.actors += parse_rows(rows, Actor, "actors")
    rows = (DATA / "api_v0_workers.json").read_bytes()
    dashboard.processes = parse_rows(rows, WorkerProcess, "workers")
    dashboard.logs = {f"train/{log.name}": log.read_text() for log in DATA.glob("ray-train-*.log")}
    return dashboard


def directory(dashboard: FakeDashboard, kv: FakeKv | None = None) -> RayRunDirectory:
    return RayRunDirectory(kv=kv, dashboard=dashboard)


def kill_controller(dashboard: FakeDashboard) -> None:
    dashboard.actors[0] = msgspec.structs.replace(dashboard.actors[0], state="DEAD")


# ---- (a) the in-job part ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "r1"])
def test_an_announcement_is_enough(dashboard, name):
    found = directory(dashboard, FakeKv(announced())).find(name)
    assert (found.run_name, found.run_id, found.attempt_id) == ("demo", "r1", "uuid-r1")
    assert (found.status, found.announced_by, found.has_callback) == ("running", "rankwatch_job", True)
    assert (found.submission_id, found.storage_path) == ("job-demo", "/srv/run/storage")
    assert [(r.world_rank, r.pid, r.start_ticks) for r in found.ranks] == [(0, 100, 5000), (1, 101, 5001)]
    rank = found.ranks[1]
    assert (rank.node.ip, rank.node.node_id, rank.node.hostname) == ("192.0.2.2", "n1", "vm")
    assert (rank.gpu_ids, rank.worker_server) == (("1",), "/tmp/ws.sock")
    assert "runs" not in dashboard.asked


def test_the_newest_announcement_of_a_name_wins(dashboard):
    kv = FakeKv(
        announced("old", announced_at="2026-12-01T04:00:00+00:00")
        | announced("new", announced_at="2026-12-01T05:00:00+00:00")
        | announced("other", run_name="other", announced_at="2026-12-01T06:00:00+00:00")
        | {"run:broken": b"{"}
    )
    runs = directory(dashboard, kv)
    assert runs.find("demo").run_id == "new"
    assert runs.find("old").run_id == "old"


def test_announcements_of_other_runs_are_read_once(dashboard):
    kv = FakeKv(announced("r1") | announced("r2", run_name="other"))
    runs = directory(dashboard, kv)
    for _ in range(3):
        runs.find("demo")
    assert kv.reads == ["run:r1", "run:r2", "run:r1", "run:r1"]


@pytest.mark.parametrize(
    ("state", "index", "status"),
    [
        ("starting", 0, "starting"),
        ("starting", 1, "restarting"),
        ("running", 1, "running"),
        ("stopping", 0, "restarting"),
        ("finished", 0, "finished"),
        ("failed", 0, "failed"),
        ("dancing", 0, "unknown"),
    ],
)
def test_states_of_an_announcement(dashboard, state, index, status):
    kv = FakeKv(announced(state=state, attempt_index=index))
    assert directory(dashboard, kv).find("demo").status == status


def test_an_announcement_says_when_the_attempt_began(dashboard):
    kv = FakeKv(announced(started_at=1_800_000_000.5))
    assert directory(dashboard, kv).find("demo").started_at == 1_800_000_000.5
    assert directory(dashboard, FakeKv(announced())).find("demo").started_at == 0.0


HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"


@pytest.mark.parametrize(
    ("backend", "timeout_s", "env", "expected"),
    [
        ("nccl", 1800, {}, (1800, "process group")),
        (None, 1800, {}, (1800, "process group")),
        ("nccl", 1800, {HEARTBEAT: "480"}, (480, HEARTBEAT)),
        ("nccl", 300, {HEARTBEAT: "480"}, (300, "process group")),
        ("nccl", 1800, {HEARTBEAT: "480", MONITORING: "0"}, (1800, "process group")),
        ("nccl", 1800, {HEARTBEAT: "480", MONITORING: "False"}, (1800, "process group")),
        ("nccl", 1800, {HEARTBEAT: "480", MONITORING: "1"}, (480, HEARTBEAT)),
        ("nccl", 1800, {HANDLING: "0"}, (None, "")),
        ("nccl", 1800, {HANDLING: "0", HEARTBEAT: "480"}, (480, HEARTBEAT)),
        ("nccl", 1800, {HANDLING: "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}, (1800, "process group")),
        ("nccl", 1800, {HANDLING: "1"}, (1800, "process group")),
        ("gloo", 1800, {HANDLING: "0", HEARTBEAT: "480"}, (1800, "gloo")),
        ("nccl", None, {}, (None, "")),
        ("nccl", None, {HEARTBEAT: "soon"}, (None, "")),
        ("nccl", 0, {HEARTBEAT: "0"}, (None, "")),
    ],
)
def test_the_earliest_watchdog(dashboard, backend, timeout_s, env, expected):
    worker = {"world_rank": 0, "pid": 100, "env": env}
    said = announced(backend=backend, process_group_timeout_s=timeout_s, workers=[worker])
    found = directory(dashboard, FakeKv(said)).find("demo")
    watchdog_s, source = expected
    assert found.watchdog_s == watchdog_s
    assert source in found.watchdog_source
    assert bool(found.watchdog_source) == (watchdog_s is not None)


def test_a_suspension_is_read_with_the_attempt(dashboard):
    kv = FakeKv(announced() | {"suspend:r1": b'{"until": 1800000000.5, "reason": "rebuilding"}'})
    runs = directory(dashboard, kv)
    found = runs.find("demo")
    assert (found.suspended_until, found.suspended_reason) == (1_800_000_000.5, "rebuilding")
    del kv.values["suspend:r1"]
    kv.values["suspend:r10"] = b'{"until": 1800000000.5}'
    assert runs.find("demo").suspended_until == 0.0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"until": "soon"}', b'{"until": null}', b"\xff"])
def test_a_suspension_that_cannot_be_read_is_none(dashboard, content):
    found = directory(dashboard, FakeKv(announced() | {"suspend:r1": content})).find("demo")
    assert (found.suspended_until, found.suspended_reason) == (0.0, "")


def test_a_run_that_was_tracked_may_be_suspended_too(dashboard):
    dashboard.runs = recorded_runs("train_v2_runs_second_attempt.json")
    run = dashboard.runs[0]
    kv = FakeKv({f"suspend:{run.id}": b'{"until": 5, "reason": "why"}'})
    found = directory(dashboard, kv).find("tracked")
    assert (found.suspended_until, found.suspended_reason) == (5.0, "why")
    assert found.started_at == run.attempts[1].start_time_ns / 1e9


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_announcement_of_a_dead_controller_is_over(dashboard, forgotten):
    kill_controller(dashboard)
    if forgotten:
        dashboard.actors = []
    found = directory(dashboard, FakeKv(announced())).find("demo")
    assert (found.status, found.attempt_id) == ("failed", "uuid-r1")


def test_how_a_dead_controller_ended_is_known_to_the_dashboard(dashboard):
    kill_controller(dashboard)
    dashboard.runs = [TrainRun(id="r1", name="demo", status="FINISHED", start_time_ns=1)]
    assert directory(dashboard, FakeKv(announced())).find("demo").status == "finished"


def test_a_dashboard_that_lags_does_not_revive_a_run(dashboard):
    """Its row of the same run still says RUNNING."""
    dashboard.runs = recorded_runs("train_v2_runs_second_attempt.json")
    kv = FakeKv(announced(dashboard.runs[0].id, run_name="tracked", state="failed"))
    assert directory(dashboard, kv).find("tracked").status == "failed"


def test_an_announcement_is_believed_while_the_dashboard_is_down(dashboard):
    dashboard.down = True
    found = directory(dashboard, FakeKv(announced())).find("demo")
    assert (found.status, found.submission_id) == ("running", "")
    over = directory(dashboard, FakeKv(announced(state="finished"))).find("demo")
    assert over.status == "finished"


def test_a_newer_run_of_the_same_name_beats_one_that_is_over(dashboard):
    """The job was submitted again, this time without the in-job part."""
    dashboard.runs = recorded_runs("train_v2_runs_second_attempt.json")
    found = directory(dashboard, FakeKv(announced(run_name="tracked", state="failed"))).find("tracked")
    assert (found.announced_by, found.status) == ("dashboard", "running")
    assert not found.has_callback


def test_of_two_ends_the_later_one_counts(dashboard):
    dashboard.runs = [
        TrainRun(id="r2", name="demo", status="FINISHED", start_time_ns=2_000_000_000_000_000_000)
    ]
    assert directory(dashboard, FakeKv(announced(state="failed"))).find("demo").run_id == "r2"


def test_the_environment_of_the_job_without_its_secrets(dashboard):
    variables = {"RAY_TRAIN_NCCL_RAS_ACTION": "fail", "NCCL_RAS_ADDR": "0.0.0.0:1", "WANDB_API_KEY": "x"}
    dashboard.known_jobs = [Job(job_id="02000000", runtime_env={"env_vars": variables})]
    runs = directory(dashboard, FakeKv(announced()))
    assert runs.job_environment("demo") == {
        "RAY_TRAIN_NCCL_RAS_ACTION": "fail",
        "NCCL_RAS_ADDR": "0.0.0.0:28028",
    }


def test_a_store_that_fails_leaves_the_other_ways(dashboard):
    dashboard.runs = recorded_runs("train_v2_runs_run2_running.json")
    kv = FakeKv({})
    kv.down = True
    assert directory(dashboard, kv).find("run2").announced_by == "dashboard"


def test_a_run_that_was_announced_is_not_found_another_way_while_the_store_fails(dashboard):
    """Another way would give it another attempt id: the watch would start anew over one slow answer."""
    dashboard.runs = recorded_runs("train_v2_runs_run2_running.json")
    kv = FakeKv(announced(dashboard.runs[0].id, run_name="run2"))
    runs = directory(dashboard, kv)
    runs.find("run2")
    kv.down = True
    with pytest.raises(ClusterUnreachable):
        runs.find("run2")


# ---- (b) state tracking -------------------------------------------------------------------------------


def test_state_tracking_finds_the_newest_attempt(dashboard):
    dashboard.runs = recorded_runs("train_v2_runs_second_attempt.json")
    found = directory(dashboard, FakeKv({})).find("tracked")
    assert found.attempt_id == "55cd6c38f19545718db38492d12819d4"
    assert [rank.pid for rank in found.ranks] == [10620, 10660]
    assert "workers" not in dashboard.asked


def test_an_attempt_that_is_recorded_as_finished_is_not_the_end(dashboard):
    """A callback failed it; the run restarts."""
    dashboard.runs = recorded_runs("train_v2_runs_between_attempts.json")
    assert dashboard.runs[0].attempts[0].status == "FINISHED"
    found = directory(dashboard).find("tracked")
    assert (found.status, found.finished, found.ranks) == ("restarting", False, ())


def test_the_newest_run_of_a_name(dashboard):
    older, newer = (
        TrainRun(id=i, name="demo", status="RUNNING", start_time_ns=n) for i, n in (("a", 1), ("b", 2))
    )
    dashboard.runs = [older, newer]
    assert directory(dashboard).find("demo").run_id == "b"
    assert directory(dashboard).find("a").run_id == "a"


def test_what_the_driver_exported_is_read_from_the_actor(dashboard):
    """State tracking shows only what the job was submitted with."""
    dashboard.runs = recorded_runs("train_v2_runs_second_attempt.json")
    assert dashboard.runs[0].env == {}
    dashboard.actors.append(
        Actor(
            actor_id=dashboard.runs[0].attempts[1].workers[0].actor_id,
            serialized_runtime_env='{"env_vars": {"NCCL_RAS_ADDR": "0.0.0.0:1"}}',
        )
    )
    runs = directory(dashboard)
    assert runs.job_environment("tracked") == {"NCCL_RAS_ADDR": "0.0.0.0:1"}
    runs.find("tracked")
    assert dashboard.asked.count("actor") == 1


# ---- (c) actors and logs ------------------------------------------------------------------------------


def test_a_run_that_says_nothing_is_found_by_its_actors_and_logs(plain):
    runs = directory(plain, FakeKv({}))
    found = runs.find("plain")
    assert (found.announced_by, found.status, found.run_id) == ("state_api", "running", "")
    assert found.attempt_id == "612873fb29f561157ee0e318965b02000000"
    assert [(r.world_rank, r.pid, r.node.ip) for r in found.ranks] == [
        (0, 6463, "192.0.2.2"),
        (1, 6437, "192.0.2.2"),
    ]
    assert found.submission_id == "job-demo"
    assert runs.job_environment("plain") == {"NCCL_RAS_ADDR": "127.0.0.1:28028"}


def test_logs_of_a_known_gang_are_not_read_again(plain):
    runs = directory(plain)
    runs.find("plain")
    plain.asked.clear()
    runs.find("plain")
    assert plain.asked == ["runs", "workers"]


def test_the_app_log_serves_where_the_other_one_is_gone(plain):
    plain.logs = {name: text for name, text in plain.logs.items() if "-sys-" not in name}
    assert [rank.world_rank for rank in directory(plain).find("plain").ranks] == [0, 1]


def test_a_log_that_is_late_is_read_at_the_next_time(plain):
    late = {name: plain.logs.pop(name) for name in list(plain.logs) if "28bde61b" in name}
    runs = directory(plain)
    assert [rank.world_rank for rank in runs.find("plain").ranks] == [0]
    plain.logs |= late
    assert [rank.world_rank for rank in runs.find("plain").ranks] == [0, 1]


def test_a_new_attempt_has_another_group(plain):
    runs = directory(plain)
    first = runs.find("plain").attempt_id
    plain.actors = [
        msgspec.structs.replace(actor, placement_group_id="second", pid=actor.pid + 1)
        for actor in plain.actors
    ]
    plain.processes = [msgspec.structs.replace(p, pid=p.pid + 1) for p in plain.processes]
    found = runs.find("plain")
    assert found.attempt_id == "second" != first
    assert [rank.pid for rank in found.ranks] == [6464, 6438]


def test_actors_that_outlive_their_run_do_not_revive_it(plain):
    kv = FakeKv(announced(run_name="plain", state="finished", job_id="02000000"))
    assert directory(plain, kv).find("plain").status == "finished"


def test_a_silent_job_of_the_same_name_is_seen_after_an_announced_one(plain):
    kv = FakeKv(announced(run_name="plain", state="finished", job_id="01000000"))
    assert directory(plain, kv).find("plain").announced_by == "state_api"


def test_two_ways_do_not_make_two_attempts(plain):
    """State tracking comes and goes; the processes are the same."""
    runs = directory(plain)
    first = runs.find("plain")
    workers = [
        {"world_rank": r.world_rank, "pid": r.pid, "node_ip": r.node.ip, "node_id": r.node.node_id}
        for r in first.ranks
    ]
    row = {"id": "x", "name": "plain", "status": "RUNNING", "start_time_ns": 1}
    row["attempts"] = [{"attempt_id": "ray", "status": "RUNNING", "workers": workers}]
    plain.runs = parse(json.dumps([row]), list[TrainRun], "runs")
    second = runs.find("plain")
    assert (second.announced_by, second.attempt_id) == ("dashboard", first.attempt_id)


# ---- nothing there ------------------------------------------------------------------------------------


def test_a_run_that_nobody_knows_names_those_that_are_known(plain):
    plain.runs = recorded_runs("train_v2_runs_run2_running.json")
    with pytest.raises(RunNotFound, match=r"'nope' \(known: demo, plain, run2\).*run_name"):
        directory(plain, FakeKv(announced())).find("nope")


def test_not_more_than_ten_names(dashboard):
    dashboard.runs = [TrainRun(id=str(i), name=f"run{i:02}") for i in range(30)]
    with pytest.raises(RunNotFound) as caught:
        directory(dashboard).find("nope")
    assert "run09)" in caught.value.what
    assert "run10" not in caught.value.what


def test_an_empty_cluster(dashboard):
    with pytest.raises(RunNotFound, match="known: none"):
        directory(dashboard, FakeKv({})).job_environment("nope")


def test_a_dashboard_that_is_down_is_no_absence(dashboard):
    dashboard.down = True
    with pytest.raises(ClusterUnreachable):
        directory(dashboard, FakeKv({})).find("demo")
