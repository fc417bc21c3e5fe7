"""What witnesses make of a freeze: only movement clears a rank, and where counts are no proof, only waiting
convicts.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tasks.hang import states
from tasks.hang.states import Freeze
from tasks.hang.testimony import weigh
from tasks.hang.witness import Look, Witness
from tests.reports import at
from tests.simulated_job import gone, moving, standing, stopped, unseen, waiting

KEY = "0xa/0x1:0x2"
STUCK = replace(waiting(0), state="uninterruptible", waits=None, same_frames=None)  # state D


def counts(*launched):
    return {number: (("AllReduce", count),) for number, count in enumerate(launched)}


def freeze(kind, *launched, **fields):
    lagging = tuple(number for number, count in enumerate(launched) if count < max(launched))
    known = {"lagging": lagging if kind == "mismatch" else (), "leading": (), "missing": (), **fields}
    return Freeze(
        kind=kind,
        since=at(0),
        repeated=True,
        digest="d",
        size=len(launched),
        counts=counts(*launched),
        **known,
    )


MISMATCH = freeze("mismatch", 5, 5, 4, 5)
SYMMETRIC = freeze("symmetric", 5, 5, 5)
SILENT = freeze("unresponsive", 5, 5, silent=(2, 3), lagging=(2, 3), missing=(2, 3))


def said(of, *looks, reason="", idle=False):
    return weigh(of, Witness(observed_at=at(1), communicator=KEY, looks=looks, reason=reason), idle=idle)


@pytest.mark.parametrize("of", [MISMATCH, SYMMETRIC, SILENT])
@pytest.mark.parametrize("idle", [False, True])
def test_no_witness_is_no_finding(of, idle):
    assert said(of, reason="the node does not answer", idle=idle) == states.Testimony(
        "unclear", "no witness: the node does not answer"
    )
    assert said(of, idle=idle).finding == "unclear"


# ---- mismatch ------------------------------------------------------------------------------------------


def test_a_rank_that_moves_is_told_with_what_moved():
    found = said(MISMATCH, *map(waiting, (0, 1, 3)), moving(2, how="12 MB written"))
    assert (found.finding, found.reason) == ("moves", "rank 2 moves: 12 MB written")


def test_only_the_ranks_behind_count():
    found = said(MISMATCH, moving(0), moving(1), standing(2), moving(3))
    assert (found.finding, found.reason) == ("stuck", "rank 2 stands in read_batch in both samples")


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (stopped(2), "rank 2 is stopped (state T)"),
        (replace(STUCK, rank=2), "rank 2 is stuck in the kernel (state D)"),
        (replace(standing(2), where="save", same_frames=False), "rank 2 stands in save"),
        (standing(2, where="save"), "rank 2 stands in save in both samples"),
    ],
)
def test_where_it_stands_is_said_and_clears_nobody(look, text):
    found = said(MISMATCH, look)
    assert (found.finding, found.reason, found.strong) == ("stuck", text, False)


def test_a_rank_that_nobody_saw_is_unclear_whatever_the_others_do():
    found = said(MISMATCH, *map(waiting, (0, 1, 3)), unseen(2))
    assert (found.finding, found.reason) == ("unclear", "rank 2: no access")
    assert said(MISMATCH, Look(rank=2, state="running")).reason == "rank 2: nothing was seen"


def test_many_ranks_are_told_of_in_short():
    of = freeze("mismatch", 5, *[4] * 7)
    assert said(of, *map(moving, range(1, 8))).reason.endswith(" and 4 more")
    assert said(of, *map(standing, range(1, 8))).reason.count("stands") == 3


def test_strong_is_all_but_a_minority_in_one_collective_and_the_minority_elsewhere():
    others = list(map(waiting, (0, 1, 3)))
    assert said(MISMATCH, *others, standing(2)).strong
    weaker = {
        "a rank is not seen": [*others[:2], standing(2)],
        "two collectives": [*others[:2], waiting(3, collective="broadcast"), standing(2)],
        "half of them elsewhere": [*others[:2], standing(3), standing(2)],
        "it stands elsewhere the second time": [*others, replace(standing(2), same_frames=False)],
        "it waits too": [*others, waiting(2)],
        "its stack cannot be read": [*others, replace(standing(2), waits=None)],
    }
    assert [what for what, looks in weaker.items() if said(MISMATCH, *looks).strong] == []
    assert said(MISMATCH, *others, moving(2)).finding == "moves"


# ---- where counts are no proof -------------------------------------------------------------------------

LEAVING = freeze("mismatch", 5, 4, 5, departed=(2,))


@pytest.mark.parametrize(
    ("of", "looks", "idle"),
    [
        (SYMMETRIC, [waiting(0), waiting(1), waiting(2)], False),
        (SYMMETRIC, [waiting(0), stopped(1), waiting(2)], False),
        (SYMMETRIC, [waiting(0), replace(standing(1), pending=True), waiting(2)], False),  # Flight Recorder
        (LEAVING, [waiting(0), standing(1)], False),
        (MISMATCH, [waiting(0), waiting(1), standing(2), waiting(3)], True),
    ],
)
def test_all_have_to_be_seen_waiting(of, looks, idle):
    found = said(of, *looks, idle=idle)
    assert found.finding == "stuck"
    assert "wait in all_reduce in both samples" in found.reason
    for missing in looks:
        one_less = [look for look in looks if look is not missing]
        again = said(of, *one_less, idle=idle)
        assert again.finding == "unclear"
        assert f"ranks {missing.rank} were not seen" in again.reason
        one_moves = [*one_less, moving(missing.rank)]
        assert said(of, *one_moves, idle=idle).finding == "moves"


@pytest.mark.parametrize("look", [standing(1), unseen(1), gone(1)])
def test_equal_counts_need_every_rank_in_a_collective(look):
    found = said(SYMMETRIC, waiting(0), look, waiting(2))
    assert found.finding == "unclear"
    assert "not every rank waits: rank 1" in found.reason


def test_ranks_that_leave_are_not_asked_of():
    assert said(LEAVING, waiting(0), standing(1), moving(2)).finding == "stuck"


def test_nobody_in_a_collective_is_no_hang():
    assert said(LEAVING, standing(0), standing(1)).finding == "unclear"
    assert said(SYMMETRIC, *map(stopped, range(3))).finding == "unclear"


# ---- unresponsive -----------------------------------------------------------------------------------------


def test_all_that_are_silent_have_to_be_gone():
    found = said(SILENT, gone(2), gone(3))
    assert (found.finding, found.reason) == (
        "gone",
        "the process of rank 2-3 is gone: the job's own health check will act",
    )
    found = said(SILENT, gone(2), stopped(3))
    assert (found.finding, found.reason) == ("stuck", "the process of rank 3 is there, stopped (state T)")


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (stopped(2), "stopped (state T)"),
        (replace(STUCK, rank=2), "stuck in the kernel (state D)"),
        (moving(2), "and yet it does not answer"),
    ],
)
def test_a_process_that_is_there_is_a_hang_in_any_state(look, text):
    found = said(SILENT, look, unseen(3))
    assert found.finding == "stuck"
    assert found.reason == f"the process of rank 2 is there, {text}"


def test_a_silent_process_that_nobody_saw_is_unclear():
    found = said(SILENT, unseen(2), gone(0))  # of rank 0 nobody asked
    assert (found.finding, found.reason) == ("unclear", "rank 2: no access")
    assert said(SILENT, gone(2), unseen(3)).finding != "gone"


looks = st.builds(
    Look,
    rank=st.integers(0, 4),
    state=st.sampled_from(["running", "stopped", "uninterruptible", "gone", "unknown"]),
    moved=st.sampled_from(["", "", "cpu"]),
    waits=st.sampled_from([None, True, False]),
    where=st.sampled_from(["", "here"]),
    same_frames=st.sampled_from([None, True, False]),
    collective=st.sampled_from(["", "all_reduce"]),
    pending=st.sampled_from([None, True, False]),
)


@given(
    of=st.sampled_from([MISMATCH, SYMMETRIC, LEAVING]), seen=st.lists(looks, max_size=6), idle=st.booleans()
)
def test_whatever_is_seen_a_rank_that_moves_is_never_called_stuck(of, seen, idle):
    found = said(of, *seen, idle=idle)
    counting = [look for look in seen if look.rank not in of.departed]
    if of is MISMATCH and not idle:
        counting = [look for look in counting if look.rank in of.lagging]
    assert (found.finding == "moves") == any(look.moved for look in counting)
    assert not (found.strong and found.finding != "stuck")
    assert found.finding != "gone"
