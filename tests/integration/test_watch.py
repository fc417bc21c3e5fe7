"""The watch flow on a real Prefect server; the training run is scripted."""

import json
import time
import uuid
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State

from flows.watch import watch_run
from tasks.blocks import Incident, TrainingRun
from tasks.handover import RUN_ENDED, WATCHED_ELSEWHERE
from tasks.hang.errors import ClusterUnreachable, RasUnreachable, SettingsError
from tasks.hang.run import Attempt
from tasks.ownership import read_window
from tests.fakes import FakeChannel, FakeDirectory, FakeNodes, FakeRas, attempt, eyes
from tests.reports import communicator, rank, report

STACK = [
    {
        "thread_name": "TrainingThread(train)",
        "frames": [
            {"name": "load", "filename": "/srv/job/train.py", "short_filename": "train.py", "line": 9}
        ],
    }
]
WAITING = [
    {
        "thread_name": "TrainingThread(train)",
        "frames": [
            {
                "name": "all_reduce",
                "filename": "/v/site-packages/torch/distributed/distributed_c10d.py",
                "short_filename": "torch/distributed/distributed_c10d.py",
                "line": 3,
            },
            {"name": "step", "filename": "/srv/job/train.py", "short_filename": "train.py", "line": 22},
        ],
    }
]


class Scene(FakeRas, FakeDirectory, FakeChannel):
    """A run of four ranks: rank 2 stops launching after `healthy` polls. A posted verdict leads to a second
    attempt, which progresses and ends after `after` polls.
    """

    def __init__(self, *, healthy: int = 3, after: int = 6, patience: int = 60) -> None:
        FakeRas.__init__(self, b"")
        FakeDirectory.__init__(self, attempt())
        FakeChannel.__init__(self, "failed_attempt")
        self.healthy, self.after, self.patience = healthy, after, patience
        self.restarted_at = 0
        self.nodes = FakeNodes(self.look)

    def find(self, run_name: str) -> Attempt:
        self.found = self.current()
        return FakeDirectory.find(self, run_name)

    def current(self) -> Attempt:
        if self.posted and not self.restarted_at:
            self.restarted_at = self.asked
        over = self.asked > (self.restarted_at + self.after if self.restarted_at else self.patience)
        name, pids = (
            ("two", (2000, 2001, 2002, 2003)) if self.restarted_at else ("one", (1000, 1001, 1002, 1003))
        )
        return attempt(name, pids, status="finished" if over else "running", has_callback=True)

    def status(self, attempt: Attempt) -> tuple[bytes, ...]:
        self.asked += 1
        steps = self.asked if self.restarted_at else min(self.asked, self.healthy)
        stuck = not self.restarted_at and self.asked >= self.healthy
        counts = [steps - (stuck and i == 2) for i in range(4)]
        base = attempt.ranks[0].pid
        members = [rank(i, n, pid=base + i) for i, n in enumerate(counts)]
        return (report(communicator(members, name=hex(base))),)

    def visible(self, attempt: Attempt) -> None:
        del attempt

    def text(self, attempt: Attempt) -> str:
        del attempt
        return "NCCL version 2.30.7\n"

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "dump_stacks":
            return {"ok": True, "stacks": {str(pid): self.stack(pid) for pid in request["pids"]}}
        return {"ok": True, "processes": {str(p): {"alive": True, "state": "S"} for p in request["pids"]}}

    def stack(self, pid: int) -> dict[str, Any]:
        threads = STACK if pid % 10 == 2 else WAITING
        return {"rung": "native", "text": "Thread ...", "threads": threads, "failed": [], "start_ticks": 7}


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Returns a function that watches a scene to its end and gives back (slug, state, eyes)."""

    def watch(scene: Scene, *, reconnect=lambda: None, **settings: Any):
        run = TrainingRun(
            run_name=f"demo-{uuid.uuid4().hex[:8]}",
            run_id="r1",
            ray_address="127.0.0.1:1",
            ray_dashboard_url="http://127.0.0.1:1",
            storage_path=str(tmp_path),
        )
        run.save(run.slug, overwrite=True)
        seen = eyes(
            tmp_path,
            scene,
            scene,
            nodes=scene.nodes,
            channel=scene,
            reconnect=reconnect,
            settings={"action": "fail", **settings},
        )
        for module in ("tasks.shift", "tasks.capture", "flows.remediate"):
            monkeypatch.setattr(f"{module}.eyes_of", lambda _: seen)
        state = watch_run(run.slug, return_state=True)
        return run.slug, state, seen

    return watch


def incidents(slug: str) -> list[Incident]:
    with get_client(sync_client=True) as client:
        documents = client.read_block_documents_by_type(Incident.get_block_type_slug() or "")
    return [i for i in map(Incident._from_block_document, documents) if i.run_name == slug]


def events(slug: str, until: str) -> list[str]:
    """Names of the events about a run and its incidents, oldest first; they arrive after a while."""
    names: list[str] = []
    with get_client(sync_client=True) as client:
        end = time.monotonic() + 60
        while until not in names and time.monotonic() < end:
            wanted = {"event": {"prefix": ["rankwatch."]}, "order": "ASC"}
            answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50})
            names = [
                event["event"].removeprefix("rankwatch.")
                for event in answer.json()["events"]
                if slug in json.dumps(event)
            ]
            time.sleep(0.2)
    return names


def files(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_hang_is_found_explained_failed_and_closed_when_the_next_attempt_moves(watched, tmp_path):
    scene = Scene()
    slug, state, _ = watched(scene)
    assert (state.type.value, state.name) == ("COMPLETED", RUN_ENDED)
    (incident,) = incidents(slug)
    assert incident.phase == "closed"
    assert incident.attempt_id == "one"
    assert incident.decision.startswith("fail: ")
    assert [act["outcome"] for act in incident.acts] == ["failed_attempt"]
    order = ["opened", "confirmed", "diagnosed", "decided", "acted", "restarted", "progressed", "closed"]
    assert [incident.times[name] for name in order] == sorted(incident.times[name] for name in order)
    (posted,) = scene.posted
    assert posted["attempt_id"] == "one"
    assert posted["ranks"] == {"2": "train.py:9 in load"}
    assert "rank 2" in posted["message"][:200]
    bundle = tmp_path / "storage" / slug / "hang_detector" / incident.folder
    names = files(bundle)
    assert {f"stack_traces/rank_{i}.log" for i in range(4)} <= names
    assert {"nccl_ras/ncclras_report.txt", "verdict.json", "manifest.json"} <= names
    history = [name for name in names if name.startswith("nccl_ras/ncclras_2")]
    assert len(history) >= 5
    manifest = json.loads((bundle / "manifest.json").read_text())
    listed = {entry["outcome"]["file"] for entry in manifest["entries"]}
    assert (
        listed | {f"stack_traces/rank_{i}.json" for i in range(4)} | {"verdict.json", "manifest.json"}
        == names
    )
    verdict = json.loads((bundle / "verdict.json").read_text())
    assert [(s["world_rank"], s["pid"]) for s in verdict["suspects"]] == [(2, 1002)]
    window, _ = read_window(slug)
    assert window.run_ended
    assert window.incident == ""
    with get_client(sync_client=True) as client:
        shown = {artifact.key: str(artifact.data) for artifact in client.read_artifacts()}
    assert {f"watch-{slug}", f"verdict-{slug}"} <= shown.keys()
    assert "train.py:9 in load" in shown[f"verdict-{slug}"]
    told = events(slug, until="incident.closed")
    order = ["suspected", "confirmed", "incident.diagnosed", "incident.decided", "incident.acted", "attempt"]
    assert [name for name in told if name in order] == order
    assert "watching" in told


def test_observe_captures_everything_and_touches_nothing(watched, tmp_path):
    scene = Scene(patience=40)
    slug, _, seen = watched(scene, action="observe")
    (incident,) = incidents(slug)
    assert incident.decision.startswith("observe: ")
    assert (incident.acts, scene.posted, scene.nodes.asked("kill")) == ([], [], [])
    assert incident.verdict["suspects"][0]["world_rank"] == 2
    assert seen.store.get(f"{slug}/hang_detector/{incident.folder}/manifest.json") is not None


def test_without_an_acknowledgement_the_suspect_is_killed_then_all_ranks(watched):
    scene = Scene(patience=40)
    scene.outcome = None
    killed: list[int] = []

    def look(request):
        if request["op"] == "kill":
            killed.extend(target["pid"] for target in request["targets"])
            assert all(t["start_ticks"] == 7 and t["cmdline_prefix"] for t in request["targets"])
            return {
                "ok": True,
                "outcomes": {str(t["pid"]): {"outcome": "killed"} for t in request["targets"]},
            }
        return scene.look(request)

    scene.nodes.answer = look
    scene.current = lambda: attempt(has_callback=True, status="finished" if killed[4:] else "running")
    slug, _, _ = watched(scene)
    (incident,) = incidents(slug)
    assert killed[0] == 1002
    assert incident.acts[0]["outcome"] == "no answer"
    assert incident.acts[1]["rung"] == "kill suspects"


def test_a_capture_that_fails_does_not_keep_a_hung_job_hanging(watched, monkeypatch):
    scene = Scene()
    calls = []

    def broken(slug, incident_id):
        calls.append(incident_id)
        raise OSError("the disk is gone")

    monkeypatch.setattr("flows.diagnose.open_case", broken)
    slug, _, _ = watched(scene)
    (incident,) = incidents(slug)
    assert len(calls) == 3
    assert "the disk is gone" in incident.evidence
    assert incident.phase == "closed"
    assert len(scene.posted) == 1


def test_a_second_shift_leaves_the_run_to_the_first(watched, monkeypatch):
    scene = Scene(healthy=1000, patience=10)
    inner: list[State[Any]] = []

    def status(attempt):
        if scene.asked == 5 and not inner:
            monkeypatch.setattr("tasks.ownership.identity", lambda *_: "far-away-1:2:3")
            inner.append(watch_run(scene.slug, return_state=True))
            monkeypatch.undo()
        return Scene.status(scene, attempt)

    scene.status = status
    monkeypatch.setattr(TrainingRun, "save", _remember(scene, TrainingRun.save))
    _, state, _ = watched(scene)
    assert state.name == RUN_ENDED
    assert [s.name for s in inner] == [WATCHED_ELSEWHERE]


def _remember(scene, save):
    def wrapped(block, name, **fields):
        scene.slug = name
        return save(block, name, **fields)

    return wrapped


def test_one_report_that_does_not_show_the_hang_does_not_leave_it_hanging(watched):
    scene = Scene()
    lies = []

    def status(attempt):
        if scene.nodes.asked("dump_stacks") and not lies:
            lies.append(1)
            return (report(),)
        return Scene.status(scene, attempt)

    scene.status = status
    slug, _, _ = watched(scene)
    (incident,) = incidents(slug)
    assert len(lies) == 1
    assert incident.decision.startswith("fail: ")
    assert len(scene.posted) == 1
    assert incident.phase == "closed"


def test_a_run_without_reports_is_blind_and_nothing_is_confirmed(watched):
    scene = Scene(patience=8)
    real = scene.status

    def status(attempt):
        real(attempt)
        raise RasUnreachable("Nothing listens at 127.0.0.1:28028.", "Set NCCL_RAS_ADDR.")

    scene.status = status
    slug, state, _ = watched(scene)
    assert state.name == RUN_ENDED
    assert incidents(slug) == []
    window, _ = read_window(slug)
    assert "Nothing listens" in window.window["blind"]["reason"]


def test_settings_that_cannot_work_are_refused_in_one_sentence(watched):
    with pytest.raises(SettingsError, match="longer than confirm_duration_s"):
        watched(Scene(), poll_interval_s=10)


def test_a_shift_whose_cluster_is_lost_ends_so_that_a_new_process_connects(watched, monkeypatch):
    monkeypatch.setattr("tasks.shift._LOST_FOR_S", 0.2)
    scene = Scene(patience=10_000)

    def find(run_name):
        if scene.asked > 3:
            raise ClusterUnreachable("Nothing answers at 10.0.0.1:6379.", "Start Ray.")
        return Scene.find(scene, run_name)

    scene.find = find
    tries = []
    slug, state, _ = watched(scene, reconnect=lambda: tries.append(1))
    assert len(tries) > 0
    assert (state.type.value, state.name) == ("COMPLETED", "Completed")
    assert "Nothing answers at 10.0.0.1:6379" in state.message
    window, _ = read_window(slug)
    assert "cannot be found" in window.farewell
    assert not window.run_ended


def test_a_shift_says_that_it_is_there_while_a_capture_takes_long(watched, monkeypatch):
    monkeypatch.setattr("tasks.shift._BEAT_EVERY_S", 0.05)
    scene = Scene()
    beats = []

    def slow(request):
        if request["op"] == "dump_stacks":
            first = read_window(scene.slug)[0].heartbeat_at
            end = time.monotonic() + 60
            while (seen := read_window(scene.slug)[0].heartbeat_at) == first and time.monotonic() < end:
                time.sleep(0.05)
            beats.append((first, seen))
        return scene.look(request)

    scene.nodes.answer = slow
    monkeypatch.setattr(TrainingRun, "save", _remember(scene, TrainingRun.save))
    watched(scene)
    ((first, seen),) = beats
    assert seen > first
