"""RayDashboard against what a real dashboard of Ray 2.60 answered (tests/data/ray)."""

import json
import socket
from pathlib import Path

import httpx
import pytest
import respx

from tasks.adapters.ray_answers import Announcement, parse_announcement, parse_log
from tasks.adapters.ray_dashboard import RayDashboard
from tasks.adapters.ray_ranks import of_run, status_of
from tasks.hang.errors import ClusterAuthError, ClusterError, ClusterUnreachable, SettingsError

DATA = Path(__file__).parents[1] / "data" / "ray"
URL = "http://head:8265"
NO_RUNS = (
    "Train state data is not available. Please make sure Ray Train is running and that the Train state actor "
    'is enabled by setting the RAY_TRAIN_ENABLE_STATE_TRACKING environment variable to "1".'
)
MISSING = "Unauthorized: Missing authentication token"
INVALID = "Forbidden: Invalid authentication token"


def recorded(name: str) -> bytes:
    return (DATA / name).read_bytes()


@pytest.fixture
def ray():
    with respx.mock(base_url=URL) as mock:
        yield mock


@pytest.fixture
def dashboard():
    with RayDashboard(URL, token="secret") as client:
        yield client


def test_versions_and_session_come_from_two_answers(ray, dashboard):
    ray.get("/api/version").respond(content=recorded("api_version.json"))
    ray.get("/api/v0/cluster_metadata").respond(content=recorded("cluster_metadata.json"))
    versions = dashboard.versions()
    assert (versions.ray, versions.python) == ("2.60.0", "3.11.7")
    assert versions.session_name == "session_2026-12-01_04-10-48_569954_12905"
    assert ray.calls[0].request.headers["authorization"] == "Bearer secret"


def test_a_ray_without_metadata_has_an_unknown_python(ray, dashboard):
    ray.get("/api/version").respond(content=recorded("api_version.json"))
    ray.get("/api/v0/cluster_metadata").respond(404, text="404: Not Found")
    assert dashboard.versions().python == ""


@pytest.mark.parametrize(
    ("status", "text", "mode"),
    [
        (200, '{"authentication_mode": "token"}', "token"),
        (200, '{"authentication_mode": "disabled"}', "disabled"),
        (404, "404: Not Found", "disabled"),
    ],
)
def test_authentication_mode(ray, dashboard, status, text, mode):
    ray.get("/api/authentication_mode").respond(status, text=text)
    assert dashboard.authentication_mode() == mode


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("train_v2_runs_initializing.json", ("starting", 0, "")),
        ("train_v2_runs_scheduling.json", ("starting", 1, "f0d407f4")),
        ("train_v2_runs_run2_running.json", ("running", 1, "93e3d1bb")),
        # the first attempt was failed by a callback, and is recorded as FINISHED
        ("train_v2_runs_between_attempts.json", ("restarting", 2, "55cd6c38")),
        ("train_v2_runs_second_attempt.json", ("running", 2, "55cd6c38")),
        ("train_v2_runs_ending.json", ("restarting", 2, "55cd6c38")),
        ("train_v2_runs_run4_inject.json", ("finished", 2, "d9f32625")),
        ("train_v2_runs_run3_errored.json", ("failed", 1, "1a8e4247")),
        ("train_v2_runs_run6_stopped.json", ("failed", 1, "dd756093")),
    ],
)
def test_every_recorded_status(ray, dashboard, file, expected):
    ray.get("/api/train/v2/runs/v1").respond(content=recorded(file))
    run = dashboard.train_runs()[0]
    assert (status_of(run), len(run.attempts), of_run(run).attempt.attempt_id[:8]) == expected


def test_a_tracked_run_becomes_an_attempt(ray, dashboard):
    ray.get("/api/train/v2/runs/v1").respond(content=recorded("train_v2_runs_run2_running.json"))
    found = of_run(dashboard.train_runs()[0])
    attempt = found.attempt
    assert attempt.run_name == "run2"
    assert attempt.run_id == "526d2dd1d65140bfae3b953ae0f28bed"
    assert attempt.submission_id == "job-run2"
    assert attempt.storage_path == "/srv/run/storage"
    assert [(r.world_rank, r.pid, r.node.ip) for r in attempt.ranks] == [
        (0, 19804, "192.0.2.2"),
        (1, 19850, "192.0.2.2"),
    ]
    assert attempt.ranks[1].actor_id == "334298c5755ed48b60ef570b07000000"
    assert attempt.ranks[1].log_file_path.endswith("018b7b1fda9fcfa3a66af27617af7822.log")
    assert found.env["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert "PYTHONPATH" not in found.env
    assert not attempt.has_callback


def test_the_environment_of_a_run_keeps_its_secrets(ray, dashboard):
    answer = json.loads(recorded("train_v2_runs_run2_running.json"))
    run = answer["train_runs"][0]
    run["job_details"]["runtime_env"]["env_vars"] |= {"HF_TOKEN": "x", "NCCL_RAS_ADDR": "0.0.0.0:1"}
    run["run_settings"]["run_config"]["worker_runtime_env"] = {"env_vars": {"NCCL_RAS_ADDR": "0.0.0.0:2"}}
    ray.get("/api/train/v2/runs/v1").respond(json=answer)
    env = dashboard.train_runs()[0].env
    assert "HF_TOKEN" not in env
    assert env["NCCL_RAS_ADDR"] == "0.0.0.0:2"


def test_tracking_that_is_off_means_no_runs(ray, dashboard):
    ray.get("/api/train/v2/runs/v1").respond(500, text=NO_RUNS)
    assert dashboard.train_runs() == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (500, "Traceback (most recent call last): ..."),
        (503, "Failed to get a response from the train stats actor."),
        (429, '{"result": false, "msg": "Max number of in-progress requests=50 reached."}'),
    ],
)
def test_a_dashboard_in_trouble_is_no_absence_of_runs(ray, dashboard, status, text):
    ray.get("/api/train/v2/runs/v1").respond(status, text=text)
    with pytest.raises(ClusterUnreachable, match=str(status)):
        dashboard.train_runs()


def test_unknown_keys_and_nulls_do_not_matter(ray, dashboard):
    answer = json.loads(recorded("train_v2_runs_run2_running.json"))
    run = answer["train_runs"][0]
    run |= {"new_in_3_0": {"a": [1]}, "job_details": None, "run_settings": None, "controller_actor_id": None}
    run["attempts"][0]["workers"][0] |= {"log_file_path": None, "gpu_ids": None, "node_rank": None, "x": 1}
    run["attempts"][0]["workers"][1] |= {"gpu_ids": [3, 4]}
    ray.get("/api/train/v2/runs/v1").respond(json=answer)
    attempt = of_run(dashboard.train_runs()[0]).attempt
    assert attempt.storage_path == ""
    assert attempt.ranks[0].gpu_ids == ()
    assert attempt.ranks[0].node_rank is None
    assert attempt.ranks[1].gpu_ids == ("3", "4")


def test_train_workers_are_filtered_by_the_dashboard(ray, dashboard):
    route = ray.get("/api/v0/actors").respond(content=recorded("api_v0_actors_train_workers.json"))
    actors = dashboard.train_workers()
    assert [actor.pid for actor in actors] == [6437, 6463]
    assert {actor.placement_group_id for actor in actors} == {"612873fb29f561157ee0e318965b02000000"}
    assert actors[0].env == {"NCCL_RAS_ADDR": "127.0.0.1:28028"}
    asked = route.calls[0].request.url.params
    assert asked.get_list("filter_keys") == ["state", "class_name"]
    assert asked.get_list("filter_values") == ["ALIVE", "RayTrainWorker"]
    assert asked.get_list("filter_predicates") == ["=", "="]


def test_one_actor_or_none(ray, dashboard):
    ray.get("/api/v0/actors").mock(
        side_effect=[
            httpx.Response(200, content=recorded("api_v0_actors_controller.json")),
            httpx.Response(200, json={"result": True, "msg": "", "data": {"result": {"result": []}}}),
        ]
    )
    found = dashboard.actor("17023d5d7db0f93fad99055802000000")
    assert found is not None
    assert (found.class_name, found.state, found.pid) == ("TrainController", "ALIVE", 6324)
    assert dashboard.actor("00") is None


def test_worker_processes_and_nodes(ray, dashboard):
    ray.get("/api/v0/workers").respond(content=recorded("api_v0_workers.json"))
    ray.get("/api/v0/nodes").respond(content=recorded("api_v0_nodes.json"))
    by_pid = {process.pid: process for process in dashboard.worker_processes()}
    assert by_pid[6437].worker_id == "28bde61b0007aac4a2621b73fd13fb53244cc988a13432ac9fc152d6"
    nodes = dashboard.nodes()
    assert [(node.node_ip, node.state, node.is_head_node) for node in nodes] == [("192.0.2.2", "ALIVE", True)]
    assert by_pid[6437].node_id == nodes[0].node_id


def test_the_state_api_reports_its_own_errors(ray, dashboard):
    ray.get("/api/v0/nodes").respond(json={"result": False, "msg": "GCS is away", "data": {"result": None}})
    with pytest.raises(ClusterError, match="GCS is away"):
        dashboard.nodes()


def test_jobs_map_ids_to_submissions(ray, dashboard):
    ray.get("/api/jobs/").respond(content=recorded("jobs_list.json"))
    jobs = {job.job_id: job for job in dashboard.jobs()}
    assert jobs["02000000"].submission_id == "job-run1"
    assert jobs["04000000"].submission_id == ""
    assert jobs["04000000"].type == "DRIVER"


def test_the_tail_of_a_log_says_who_wrote_it(ray, dashboard):
    name = "ray-train-sys-worker-28bde61b0007aac4a2621b73fd13fb53244cc988a13432ac9fc152d6.log"
    route = ray.get("/api/v0/logs/file").respond(content=recorded(name))
    said = parse_log(dashboard.log_tail("node", f"train/{name}", lines=5))
    assert said is not None
    assert (said.run_name, said.world_rank, said.local_rank) == ("plain", 1, 1)
    assert route.calls[0].request.url.params["filename"] == f"train/{name}"
    assert route.calls[0].request.url.params["lines"] == "5"


def test_a_log_with_lines_of_user_code_and_a_cut_off_end():
    log = recorded("ray-train-app-worker-ed31205ffe3665dc038d35306cf50ce0b4cfe3af1b330022de50a381.log")
    lines = [*log.decode().splitlines(), "loss 0.1", '{"step": 3}', log.decode().splitlines()[0][:100]]
    said = parse_log("\n".join(lines))
    assert said is not None
    assert (said.run_name, said.world_rank) == ("plain", 0)
    assert parse_log("loss 0.1\n\xff\n{}") is None


def test_a_missing_log_is_empty(ray, dashboard):
    ray.get("/api/v0/logs/file").respond(500, text="A file is not found at: /srv/ray/logs/train/nope.log")
    assert dashboard.log_tail("node", "train/nope.log", lines=5) == ""


def test_a_log_that_cannot_be_read_is_no_missing_log(ray, dashboard):
    ray.get("/api/v0/logs/file").respond(500, text="Agent is not available")
    with pytest.raises(ClusterUnreachable, match="Agent is not available"):
        dashboard.log_tail("node", "train/a.log", lines=5)


def test_a_wrong_token_is_named(ray, dashboard):
    ray.get("/api/version").respond(403, text=INVALID)
    with pytest.raises(ClusterAuthError, match=r"refuses the token.*Set ray_token") as caught:
        dashboard.versions()
    assert "secret" not in str(caught.value)


def test_a_missing_token_is_named(ray):
    ray.get("/api/jobs/").respond(401, text=MISSING)
    with RayDashboard(URL) as open_client, pytest.raises(ClusterAuthError, match=r"wants a token.*ray_token"):
        open_client.jobs()
    assert "authorization" not in ray.calls[0].request.headers


def test_a_token_that_can_be_none_is_not_printed():
    with pytest.raises(ClusterAuthError, match="ray_token") as caught:
        RayDashboard(URL, token="abc\ndef")
    assert "def" not in str(caught.value)
    RayDashboard(URL, token="abc\n").close()  # as secret stores hand it over


def test_silence_names_the_field(ray, dashboard):
    ray.get("/api/version").mock(side_effect=httpx.ReadTimeout("silent"))
    with pytest.raises(ClusterUnreachable, match=r"http://head:8265 \(ray_dashboard_url\).*in time"):
        dashboard.versions()


def test_a_dashboard_that_hangs_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            RayDashboard(address, timeout_s=0.2) as client,
            pytest.raises(ClusterUnreachable, match="does not answer /api/jobs/ in time"),
        ):
            client.jobs()


def test_nothing_there_names_the_field(ray, dashboard):
    ray.get("/api/version").mock(side_effect=httpx.ConnectError("Connection refused"))
    with pytest.raises(ClusterUnreachable, match=r"Nothing answers.*ray_dashboard_url.*Connection refused"):
        dashboard.versions()


def test_the_page_of_a_proxy_is_not_ray(ray, dashboard):
    ray.get("/api/version").respond(text="<html>Please log in</html>")
    with pytest.raises(ClusterError, match=r"not Ray's.*ray_dashboard_url"):
        dashboard.versions()


@pytest.mark.parametrize("url", ["", "   ", "ftp://head", "http://", "http://head:port"])
def test_an_address_that_is_none(url):
    with pytest.raises(SettingsError, match="ray_dashboard_url"):
        RayDashboard(url)


def test_a_bare_host_and_port_is_http():
    with RayDashboard("head:8265/") as client:
        assert client.url == "http://head:8265"


def announcement(**fields: object) -> Announcement | None:
    return parse_announcement(json.dumps({"protocol": 1, "run_id": "r", "run_name": "n", **fields}).encode())


def test_an_announcement_of_another_protocol_is_passed_over():
    assert announcement() is not None
    assert announcement(protocol=2) is None
    assert announcement(run_name=["?"]) is None
    assert parse_announcement(b"\xff") is None


@pytest.mark.parametrize("moment", ["2026-12-01T04:10:48+00:00", "2026-12-01T04:10:48", 1796098248])
def test_the_moment_of_an_announcement_is_utc(moment):
    said = announcement(announced_at=moment)
    assert said is not None
    assert said.since_s == 1796098248


def test_the_environment_of_an_announcement_is_that_of_the_lowest_rank():
    workers = [
        {"world_rank": 1, "pid": 2, "env": {"NCCL_RAS_ADDR": "b"}},
        {"world_rank": 0, "pid": 1, "env": {"NCCL_RAS_ADDR": "a", "AWS_SECRET_ACCESS_KEY": "s"}},
    ]
    said = announcement(workers=workers)
    assert said is not None
    assert said.env == {"NCCL_RAS_ADDR": "a"}
