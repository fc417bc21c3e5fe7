"""Where ranks stand, and who is named, from real py-spy output and made-up counts."""

import json
from pathlib import Path

import pytest

from tasks.hang.counts import ranges
from tasks.hang.incident import incident_of
from tasks.hang.remedy import decide
from tasks.hang.report import parse_report
from tasks.hang.run import Attempt, Node, Rank, attempt_id_of, by_node
from tasks.hang.stacks import position, read_threads
from tasks.hang.states import Sighting
from tasks.hang.verdict import judge
from tasks.hang.window import Window, advance
from tasks.reporting.wording import failure_message, verdict_markdown
from tests.reports import at, communicator, rank, report
from tests.unit.test_window import POLICY

STACKS = Path(__file__).parents[1] / "data" / "ray" / "pyspy_run1"
CULPRIT_PID, WAITING_PID = 16107, 16046
NODE = Node("10.0.0.1", "node-a")
ATTEMPT = Attempt(
    run_name="demo",
    run_id="r1",
    attempt_id="one",
    ranks=tuple(Rank(world_rank=10 + i, pid=1000 + i, node=NODE) for i in range(4)),
)


def recorded(pid, kind="json"):
    return position(read_threads(json.loads((STACKS / f"pyspy_{kind}_{pid}.json").read_text())))


WAITS, ELSEWHERE = recorded(WAITING_PID), recorded(CULPRIT_PID)


def verdict_on(counts, positions, attempt=ATTEMPT):
    stuck = parse_report(report(communicator([rank(i, n) for i, n in enumerate(counts)])))
    window = Window(attempt_id="one")
    for seconds in range(0, 80, 10):
        window, _ = advance(window, Sighting(at(seconds), stuck), POLICY)
    incident = incident_of("demo", window)
    assert incident is not None
    members = {key: (freeze, stuck.records[key].decode()) for key, freeze in window.stalled.items()}
    return judge(incident, attempt, members, positions)


@pytest.mark.parametrize("kind", ["json", "json_nonblocking"])
def test_a_rank_that_waits_stands_in_the_collective_at_a_line_of_the_users(kind):
    place = recorded(WAITING_PID, kind)
    assert place is not None
    assert place.in_collective
    assert place.thread.startswith("TrainingThread")
    assert str(place) == (
        "train_ok.py:22 in train_fn, inside all_reduce (torch/distributed/distributed_c10d.py)"
    )


def test_the_culprit_stands_in_its_own_code():
    assert ELSEWHERE is not None
    assert not ELSEWHERE.in_collective
    assert str(ELSEWHERE) == "train_ok.py:20 in train_fn"


def test_no_thread_is_no_position():
    assert position(()) is None
    assert position(read_threads([{"frames": [], "thread_name": "x"}])) is None


def test_the_rank_that_is_behind_and_elsewhere_is_named_with_its_frame():
    verdict = verdict_on((5, 5, 4, 5), {10: WAITS, 11: WAITS, 12: ELSEWHERE, 13: WAITS})
    (suspect,) = verdict.suspects
    assert (suspect.world_rank, suspect.rank, suspect.pid, suspect.host) == (12, 2, 1002, "10.0.0.1")
    assert verdict.headline == "Rank 12 (10.0.0.1, pid 1002) stands in train_ok.py:20 in train_fn."
    assert verdict.reason == (
        "It launched fewer AllReduce than the 3 others of communicator 0xa/0x1:0x2. "
        "3 ranks wait in AllReduce (world ranks 10-11, 13)."
    )
    assert (verdict.confidence, verdict.missing_evidence) == ("high", ())
    assert suspect.why == "launched AllReduce 4 (most ranks: 5)"
    assert [(s.world_rank, s.side) for s in verdict.ranks] == [
        (10, "ahead"),
        (11, "ahead"),
        (12, "behind"),
        (13, "ahead"),
    ]
    assert verdict.ranks[0].where.startswith("train_ok.py:22 in train_fn, inside all_reduce")


def test_without_stacks_the_verdict_is_weaker_and_says_what_is_missing():
    verdict = verdict_on((5, 5, 4, 5), {})
    assert [s.world_rank for s in verdict.suspects] == [12]
    assert verdict.confidence == "medium"
    assert verdict.missing_evidence == ("no stack of world ranks 10-13",)
    assert "could not be read" in verdict.headline


def test_where_a_minority_is_ahead_the_stacks_decide():
    verdict = verdict_on((4, 4, 4, 5), {10: WAITS, 11: ELSEWHERE, 12: WAITS, 13: WAITS})
    assert [s.world_rank for s in verdict.suspects] == [11]
    assert verdict.confidence == "medium"


def test_where_a_minority_is_ahead_and_no_stack_decides_both_stories_are_told():
    verdict = verdict_on((4, 4, 4, 5), dict.fromkeys((10, 11, 12, 13), WAITS))
    assert [s.world_rank for s in verdict.suspects] == [13]
    assert verdict.confidence == "low"
    assert "either they launched one too many, or the others are stuck elsewhere" in verdict.reason


def test_a_process_that_the_run_does_not_know_is_named_by_host_and_pid():
    stranger = Attempt(run_name="demo", run_id="r1", attempt_id="one", ranks=ATTEMPT.ranks[:2])
    verdict = verdict_on((5, 5, 4, 5), {}, stranger)
    assert verdict.suspects[0].world_rank is None
    assert verdict.suspects[0].name == "unknown rank (comm 2) (10.0.0.1, pid 1002)"


def test_the_error_says_everything_in_its_first_500_characters():
    verdict = verdict_on((5, 5, 4, 5), {10: WAITS, 11: WAITS, 12: ELSEWHERE, 13: WAITS})
    evidence = "/very/long/" + "storage/" * 40 + "incident-20261201T030000Z-deadbeef"
    text = failure_message(verdict, evidence)[:500]
    for needed in ("mismatch", "rank 12", "pid 1002", "train_ok.py:20", "incident-20261201T030000Z-deadbeef"):
        assert needed in text
    assert "0xa/0x1:0x2" in failure_message(verdict, evidence)
    assert verdict.headline in verdict_markdown(verdict, evidence)


@pytest.mark.parametrize(
    ("action", "attempt", "frozen", "kind"),
    [
        ("observe", ATTEMPT, True, "observe"),
        ("fail", ATTEMPT, True, "fail"),
        ("fail", ATTEMPT, False, "leave"),
        ("fail", None, True, "leave"),
        ("fail", Attempt(run_name="demo", run_id="r1", attempt_id="two", ranks=()), True, "leave"),
        (
            "fail",
            Attempt(run_name="d", run_id="r", attempt_id="one", ranks=(), status="failed"),
            True,
            "leave",
        ),
    ],
)
def test_only_a_live_hang_of_the_same_attempt_is_acted_on(action, attempt, frozen, kind):
    verdict = verdict_on((5, 5, 4, 5), {})
    decision = decide(verdict, action, attempt, still_frozen=frozen)
    assert decision.kind == kind
    assert decision.reason


def test_ranges_are_written_as_people_do():
    assert ranges([8, 0, 1, 2, 3]) == "0-3, 8"
    assert ranges([]) == ""


def test_a_pid_on_another_host_is_the_rank_only_where_it_is_unique():
    two = Node("10.0.0.2")
    ranks = (*ATTEMPT.ranks, Rank(world_rank=20, pid=1000, node=two))
    attempt = Attempt(run_name="demo", run_id="r", attempt_id="one", ranks=ranks)
    assert attempt.rank_of("10.0.0.2", 1000) == ranks[-1]
    assert attempt.rank_of("192.168.9.9", 1001) == ranks[1]
    assert attempt.rank_of("192.168.9.9", 1000) is None
    assert by_node(ranks)[two] == (ranks[-1],)
    assert attempt_id_of([("a", 1, 2), ("b", 3, 4)]) == attempt_id_of([("b", 3, 4), ("a", 1, 2)])
