"""Whose processes a report shows, told from its bytes."""

import json

import pytest

from tasks.hang.presence import Mark, Roster, lost_count, lost_share, mark_of
from tasks.hang.run import Node, Rank
from tests.ras_jobs import DATA
from tests.reports import communicator, missing, rank, report, world


def roster(*processes: tuple[str, int]) -> Roster:
    return Roster(Rank(world_rank=i, pid=pid, node=Node(ip)) for i, (ip, pid) in enumerate(processes))


def shown(*processes: tuple[str, int]) -> bytes:
    return report(communicator([rank(i, 1, host=host, pid=pid) for i, (host, pid) in enumerate(processes)]))


@pytest.mark.parametrize(
    ("processes", "seen"),
    [
        ([("10.0.0.1", 8)], {0}),
        ([("10.0.0.2", 8), ("10.0.0.1", 9)], {1, 2}),
        ([("10.0.0.1", 8), ("10.0.0.1", 9), ("10.0.0.2", 8)], {0, 1, 2}),
        ([("10.0.0.2", 9)], set()),  # a pid of ours, on another node of ours
        ([("192.168.0.5", 9)], {2}),  # an address that Ray does not know
        ([("192.168.0.5", 8)], {0}),
        ([("192.168.0.5", 8), ("192.168.0.6", 8)], {0, 1}),
        ([("192.168.0.5", 8), ("192.168.0.5", 8)], {0}),  # two devices of one process
        ([("192.168.0.5", 8), ("192.168.0.6", 8), ("192.168.0.7", 8)], {0, 1}),
        ([("unknown", 9)], {2}),
        ([("unknown", -1)], set()),
        ([], set()),
    ],
)
def test_which_ranks_are_seen(processes, seen):
    ours = roster(("10.0.0.1", 8), ("10.0.0.2", 8), ("10.0.0.1", 9))
    assert ours.seen(shown(*processes)) == seen
    named = any(pid >= 0 for _, pid in processes)
    assert ours.is_foreign(shown(*processes)) == (named and not seen)


def test_a_missing_member_is_seen():
    ours = roster(("10.0.0.1", 1000), ("10.0.0.1", 1001))
    raw = report(communicator([rank(0, 1)], [missing(1)]))
    assert ours.seen(raw) == {0, 1}


def test_a_run_without_ranks_calls_nobody_foreign():
    assert not roster().is_foreign(shown(("10.0.0.1", 8)))


def test_real_reports():
    raw = (DATA / "v2.30.7" / "multi_comm_n64_tp8_dp8.json").read_bytes()
    members = {(r["host"], r["pid"]) for c in json.loads(raw)["communicators"] for r in c["ranks"]}
    assert len(members) == 64
    assert roster(*sorted(members)).seen(raw) == set(range(64))
    assert mark_of(raw) == Mark(17, b"0x2d97aaeee875409/0xa8f5a8ffacf33a77:0xc8ab822413974a07")


def test_marks():
    assert mark_of(report()) == Mark(0, b"")
    assert mark_of(report(world(1), world(1, name="0xb"))) == Mark(2, b"0xa/0x1:0x2")
    assert mark_of(b"hello") == Mark(-1, b"")


@pytest.mark.parametrize(
    ("name", "lost", "entries"),
    [
        ("healthy_world_n8", 0, 8),
        ("killed_proc_immediately_n8", 1, 8),
        ("node_unresponsive_later_n16", None, None),
        ("nocomm_two_ranks_left_n8", 0, 8),  # missing, but they answered
    ],
)
def test_how_much_is_lost(name, lost, entries):
    raw = (DATA / "v2.30.7" / f"{name}.json").read_bytes()
    every = json.loads(raw)["communicators"]
    members = [m for c in every for m in (*c["ranks"], *c["missing_ranks"])]
    gone = [m for m in members if m["status"].get("unresponsive")]
    assert (lost_count(raw), lost_share(raw)) == (len(gone), len(gone) / len(members))
    if lost is not None:
        assert len(gone) == lost * (len(members) // entries)


@pytest.mark.parametrize("groups", [1, 200])
@pytest.mark.parametrize("lost", [0, 0.45, 0.55, 1.0])
def test_of_a_large_report_a_sample_is_enough(lost, groups):
    """In one block or in many, as the members of a communicator are sorted."""
    size = 24_000 // groups
    present = round(size * (1 - lost))
    raw = report(
        *(
            communicator(
                [rank(i, 1) for i in range(present)],
                [missing(i) for i in range(present, size)],
                name=f"0x{number:x}",
            )
            for number in range(groups)
        )
    )
    assert len(raw) > 4 << 20
    assert abs(lost_share(raw) - lost) < 0.05
    assert (lost_share(raw) > 0.5) == (lost > 0.5)


def test_nothing_is_no_loss():
    assert lost_share(b"") == 0.0
    assert lost_share(report()) == 0.0
