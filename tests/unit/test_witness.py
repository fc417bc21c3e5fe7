"""What is made of two samples, from stacks that py-spy printed of a job that hung."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.hang.stacks import Frame
from tasks.hang.witness import Look, in_device_sync, read_look, unseen

STACKS = Path(__file__).parents[1] / "data" / "ray" / "pyspy_run1"
CULPRIT_PID, WAITING_PID = 16107, 16046
TORCH = "/venv/lib/python3.11/site-packages/torch"


def recorded(pid: int) -> list[Any]:
    threads: list[Any] = json.loads((STACKS / f"pyspy_json_{pid}.json").read_text())
    return threads


CULPRIT, WAITING = recorded(CULPRIT_PID), recorded(WAITING_PID)
TRAINING_TID = next(t["os_thread_id"] for t in CULPRIT if t["thread_name"].startswith("TrainingThread"))


def thread(
    *frames: tuple[str, str, int], tid: int | None = 7, name: str = "TrainingThread(f)"
) -> dict[str, Any]:
    """A thread as py-spy prints it; frames are (function, file, line), innermost first."""
    made = [{"name": function, "filename": file, "line": line} for function, file, line in frames]
    return {"thread_name": name, "os_thread_id": tid, "active": True, "owns_gil": False, "frames": made}


def user(function: str, line: int) -> tuple[str, str, int]:
    return (function, "/job/train.py", line)


def recorder(**groups: tuple[int, int]) -> dict[str, Any]:
    """Flight Recorder: group=(enqueued, completed)."""
    return {
        "groups": [
            {"group": name.removeprefix("g"), "enqueued": one, "completed": other}
            for name, (one, other) in groups.items()
        ]
    }


def seen(first: dict[str, Any], second: dict[str, Any] | None = None, **answer: Any) -> Look:
    """Two samples, 10 s apart unless they say so; the second is as the first unless given."""
    one = {"state": "S", "at_s": 100.0, "threads": CULPRIT, **first}
    other = {**one, "at_s": 110.0, **(second or {})}
    return read_look(
        2, {"start_ticks": 5, "samples": [one, other], "ticks_per_s": 100, "failed": [], **answer}
    )


# ---- where it stands


def test_a_culprit_as_py_spy_saw_it():
    look = seen({})
    assert (look.rank, look.state, look.waits, look.same_frames) == (2, "running", False, True)
    assert (look.where, look.collective, look.moved) == ("train_ok.py:20 in train_fn", "", "")
    assert look.frames[0] == "train_ok.py:20 train_fn"
    assert len(look.frames) > 3
    assert look.problem == ""


def test_a_rank_that_waits_as_py_spy_saw_it():
    look = seen({"threads": WAITING})
    assert (look.waits, look.same_frames, look.collective) == (True, True, "all_reduce")
    assert look.where.startswith("train_ok.py:22 in train_fn, inside all_reduce")


def test_waiting_takes_both_samples():
    look = seen({"threads": WAITING}, {"threads": CULPRIT})
    assert look.waits is False
    assert look.collective == ""
    assert look.same_frames is False
    back = seen({}, {"threads": WAITING})
    assert back.waits is False


@pytest.mark.parametrize(
    ("frame", "waits"),
    [
        (("synchronize", f"{TORCH}/cuda/__init__.py", 1209), True),
        (("synchronize", f"{TORCH}/cuda/streams.py", 245), True),
        (("synchronize", f"{TORCH}/accelerator/__init__.py", 246), True),
        (("wait_tensor", f"{TORCH}/distributed/_functional_collectives.py", 136), True),
        (("trigger_wait", f"{TORCH}/distributed/_functional_collectives.py", 1), False),
        (("synchronize", "/job/cuda/streams.py", 3), False),
        (("memory_allocated", f"{TORCH}/cuda/__init__.py", 3), False),
        (("_engine_run_backward", f"{TORCH}/autograd/graph.py", 966), False),
    ],
)
def test_a_device_synchronise_is_a_wait(frame, waits):
    assert in_device_sync(Frame(*frame)) is waits
    look = seen({"threads": [thread(frame, user("step", 3))]})
    assert look.waits is waits
    assert look.collective == ("wait_tensor" if frame[0] == "wait_tensor" else "")


def test_the_collective_is_the_one_that_was_called():
    inner = ("all_gather", f"{TORCH}/distributed/distributed_c10d.py", 10)
    wrapper = ("wrapper", f"{TORCH}/distributed/c10d_logger.py", 83)
    outer = ("all_gather_object", f"{TORCH}/distributed/distributed_c10d.py", 20)
    assert seen({"threads": [thread(inner, wrapper, outer, wrapper, user("step", 3))]}).collective == (
        "all_gather_object"
    )


# ---- what moves


def test_a_stack_that_changed():
    look = seen({"threads": [thread(user("a", 10))]}, {"threads": [thread(user("b", 20))]})
    assert look.moved == "its stack changed from train.py:10 in a to train.py:20 in b"
    assert look.same_frames is False


def test_a_stack_that_changed_below_the_users_line():
    def at(line: int) -> dict[str, Any]:
        return {"threads": [thread(("get", "/usr/lib/python3.11/queue.py", line), user("load", 10))]}

    look = seen(at(1), at(2))
    assert (
        look.moved
        == "its stack changed from /usr/lib/python3.11/queue.py:1 get to /usr/lib/python3.11/queue.py:2 get"
    )
    deep = seen(
        {"threads": [thread(("poll", "x/lib/python3/select.py", 1), user("load", 10), user("main", 1))]},
        {"threads": [thread(("poll", "x/lib/python3/select.py", 1), user("load", 10), user("main", 2))]},
    )
    assert deep.moved == "its stack changed around x/lib/python3/select.py:1 poll"


def test_in_a_collective_only_the_users_part_of_the_stack_counts():
    """Libraries poll while they wait; another collective is another line of the user's."""

    def waits(inner: int, line: int) -> dict[str, Any]:
        collective = ("barrier", f"{TORCH}/distributed/distributed_c10d.py", inner)
        return {"threads": [thread(collective, user("step", line))]}

    polls = seen(waits(1, 10), waits(2, 10))
    assert (polls.waits, polls.same_frames, polls.moved) == (True, False, "")
    goes_on = seen(waits(1, 10), waits(1, 11))
    assert goes_on.moved.startswith("its stack changed from train.py:10 in step")


def test_the_same_thread_is_compared():
    """Without a thread of Ray's name the deepest stack counts, and that may be another one in each sample."""
    waits, helper = (
        thread(user("step", 1), user("main", 1), name="MainThread"),
        thread(user("log", 9), tid=8, name="t"),
    )
    deeper = thread(user("log", 9), user("log", 8), user("log", 7), tid=8, name="t")
    look = seen({"threads": [waits, deeper]}, {"threads": [waits, helper]})
    assert (look.same_frames, look.where) == (True, "train.py:1 in step")


@pytest.mark.parametrize(
    ("ticks", "moved"),
    [
        (49, ""),
        (50, "its training thread used 0.5 s of CPU in 10 s"),
        (710, "its training thread used 7.1 s of CPU in 10 s"),
    ],
)
def test_cpu_of_the_training_thread(ticks, moved):
    threads = {str(TRAINING_TID): 1000, "1": 0}
    after = {str(TRAINING_TID): 1000 + ticks, "1": 900}
    look = seen(
        {"threads_cpu_ticks": threads, "cpu_ticks": 1000},
        {"threads_cpu_ticks": after, "cpu_ticks": 3000},
    )
    assert look.moved == moved


@pytest.mark.parametrize(("ticks", "moved"), [(199, ""), (200, "its process used 2.0 s of CPU in 10 s")])
def test_cpu_of_the_process_where_the_thread_is_not_known(ticks, moved):
    threads = [thread(user("a", 10), tid=None)]
    assert seen({"threads": threads, "cpu_ticks": 0}, {"cpu_ticks": ticks}).moved == moved
    assert seen({"threads": [], "cpu_ticks": 0}, {"cpu_ticks": ticks}).moved == moved


def test_a_tick_in_a_short_gap_is_nobodys_work():
    after = {"threads_cpu_ticks": {str(TRAINING_TID): 2}, "at_s": 100.1}
    assert seen({"threads_cpu_ticks": {str(TRAINING_TID): 0}}, after).moved == ""


@pytest.mark.parametrize("counter", ["io_bytes", "storage_bytes"])
def test_bytes(counter):
    """What is read of mapped files shows in the storage layer only."""
    other = {"io_bytes": 5, "storage_bytes": 0}
    assert seen({**other, counter: 0}, {counter: 2**20 - 1}).moved == ""
    assert seen({**other, counter: 0}, {counter: 120_000_000}).moved == "it read or wrote 120 MB in 10 s"
    assert seen({counter: None}, {counter: 120_000_000}).moved == ""


def test_a_rank_that_waits_does_not_move_by_its_cpu():
    """gloo and NCCL poll."""
    busy = {
        "cpu_ticks": 1000,
        "io_bytes": 10**9,
        "threads_cpu_ticks": {str(t["os_thread_id"]): 1000 for t in WAITING},
    }
    idle = {"cpu_ticks": 0, "io_bytes": 0, "threads_cpu_ticks": dict.fromkeys(busy["threads_cpu_ticks"], 0)}
    assert seen({"threads": WAITING, **idle}, busy).moved == ""
    lost = seen({"threads": WAITING, **idle}, {**busy, "threads": []})
    assert (lost.moved, lost.waits) == ("", None)
    assert lost.where.startswith("train_ok.py:22")


def test_a_line_that_waits_for_the_device_does_not_move_by_its_cpu():
    """`.item()` polls, and shows as a plain line. That its collective is pending tells."""
    before, after = {"cpu_ticks": 0, "threads_cpu_ticks": {str(TRAINING_TID): 0}}, {}
    after = {"cpu_ticks": 1000, "threads_cpu_ticks": {str(TRAINING_TID): 1000}}
    hangs = {"flight_recorder": recorder(g0=(7, 6))}
    done = {"flight_recorder": recorder(g0=(7, 7))}
    look = seen({**before, **hangs}, after)
    assert (look.moved, look.pending, look.waits, look.same_frames) == ("", True, False, True)
    assert seen({**before, **done}, after).moved == "its training thread used 10.0 s of CPU in 10 s"
    assert (
        seen({**before, **hangs, "io_bytes": 0}, {**after, "io_bytes": 10**7}).moved
        == "it read or wrote 10 MB in 10 s"
    )
    assert seen({**before, **hangs, "threads": []}, after).moved == ""


# ---- Flight Recorder


@pytest.mark.parametrize(
    ("first", "second", "pending"),
    [
        (recorder(g0=(7, 6)), recorder(g0=(7, 6)), True),
        (recorder(g0=(7, 7)), recorder(g0=(7, 7)), False),
        (recorder(g0=(7, 6), g1=(1, 1)), recorder(g0=(7, 6), g1=(1, 1)), True),
        (recorder(g0=(7, 6)), recorder(g0=(7, 7)), False),
        (recorder(g0=(7, 6)), recorder(g0=(8, 7)), False),
        (recorder(g0=(1, -1)), recorder(g0=(1, -1)), True),
        (recorder(g0=(-1, -1)), recorder(g0=(-1, -1)), False),
        (recorder(g0=(7, 7)), recorder(g0=(7, 7), g1=(1, 0)), False),
        (recorder(g0=(7, 6)), recorder(g1=(7, 6)), None),
        (recorder(), recorder(), None),
        (recorder(g0=(7, 6)), None, None),
        (None, None, None),
    ],
)
def test_pending(first, second, pending):
    assert seen({"flight_recorder": first}, {"flight_recorder": second}).pending is pending


def test_a_group_that_gets_on_is_a_move_even_of_a_rank_that_waits():
    enqueued = seen(
        {"threads": WAITING, "flight_recorder": recorder(g1=(7, 6))}, {"flight_recorder": recorder(g1=(9, 8))}
    )
    assert enqueued.moved == "it went from collective 7 to 9 in process group 1"
    completed = seen({"flight_recorder": recorder(g0=(7, 6))}, {"flight_recorder": recorder(g0=(7, 7))})
    assert completed.moved == "it completed collective 7 in process group 0"


# ---- states, and what could not be seen


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        ("S", "R", "running"),
        ("T", "T", "stopped"),
        ("S", "T", "stopped"),
        ("T", "S", "running"),
        ("t", "t", "stopped"),
        ("S", "t", "running"),
        ("D", "D", "uninterruptible"),
        ("S", "D", "running"),
        ("S", "X", "gone"),
        ("S", "Z", "gone"),
    ],
)
def test_states(first, second, state):
    assert seen({"state": first}, {"state": second}).state == state


def test_the_state_is_that_of_the_training_thread():
    """The main thread of a Ray worker sleeps in an event loop, whatever the training does."""
    look = seen({"state": "S", "threads_state": {str(TRAINING_TID): "D"}})
    assert look.state == "uninterruptible"


def test_gone_says_nothing_of_what_it_did_before():
    look = seen({}, {"state": "X", "threads": []}, failed=["process 5 is gone"])
    assert (look.state, look.moved, look.waits, look.problem) == ("gone", "", None, "process 5 is gone")


def test_a_probe():
    raw = {"samples": [{"state": "T", "at_s": 1.0}]}
    assert read_look(4, raw) == Look(rank=4, state="stopped")


def test_a_stack_that_could_not_be_read_twice():
    look = seen({"threads": []}, {"threads": CULPRIT}, failed=["py-spy dump --json: exit 1: no"])
    assert (look.waits, look.same_frames, look.problem) == (None, None, "py-spy dump --json: exit 1: no")
    assert look.where == "train_ok.py:20 in train_fn"


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"samples": 3},
        {"samples": [{"state": "S"}]},
        {"samples": [{"state": "S", "at_s": 1.0, "threads": [{"frames": 3}]}]},
        {"samples": [{"state": "S", "at_s": 1.0, "flight_recorder": {"groups": [{"group": 1}]}}]},
        {"samples": [], "failed": "x"},
        None,
        [],
    ],
)
def test_an_answer_that_cannot_be_read_is_a_rank_that_was_not_seen(raw):
    look = read_look(1, raw)
    assert (look.rank, look.state, look.moved, look.waits) == (1, "unknown", "", None)
    assert look.problem


def test_unseen():
    assert unseen(3, "because") == Look(rank=3, state="unknown", problem="because")
    assert read_look(3, {"failed": ["cut"]}) == unseen(3, "cut")
