"""Where Ray's detector misses hangs or invents them, and what becomes of the same bytes here.

Ray's is the real class, fed in the place of its poller; both run with the defaults that they share (a poll
every 15 s, 600 s to confirm). `python -m tests.bench.gap_table` prints the two side by side.
"""

import logging
import os
from collections.abc import Callable, Sequence
from unittest.mock import MagicMock, patch

import pytest
from msgspec import Struct
from ray.train.v2._internal.callbacks import nccl_ras

from tasks.adapters.node_part import parse_ras_addr
from tasks.hang.errors import RasError, RasMalformed, RasTruncated
from tasks.hang.policy import HangPolicy
from tasks.hang.report import parse_report
from tasks.hang.states import Aside, Confirmed, Event, Idle, State, Suspected
from tests.reports import RUNNING, communicator, missing, rank, report, world
from tests.simulated_job import Looks, Watcher, everyone, moving, standing, stopped, unseen, waiting

POLICY = HangPolicy()
EVERY_S = POLICY.poll_interval_s
POLLS = POLICY.confirm_polls + 10

# ---- Ray's --------------------------------------------------------------------------------------------


class Reports:
    """In the place of Ray's poller: what a report that it cannot read becomes is nothing, as there."""

    def __init__(self, polls: Sequence[bytes]):
        self._polls = list(polls)
        self.unread = 0

    def next_result(self):
        parsed = nccl_ras.parse_ras_schema(self._polls.pop(0).decode())
        self.unread += parsed is None
        return parsed

    def query(self, _format):
        return "text"


class RayVerdict(Struct, frozen=True):
    """What Ray's detector made of a series: seconds until it raised, None where it never did."""

    raised_s: float | None
    unread: int


def ask_ray(polls: Sequence[bytes]) -> RayVerdict:
    """Run Ray's detector over the polls of a job, until it raises."""
    names = {
        "RAY_TRAIN_NCCL_RAS_ACTION": "fail",
        "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S": f"{POLICY.confirm_duration_s:g}",
        "RAY_TRAIN_NCCL_RAS_MIN_POLL_INTERVAL_S": f"{EVERY_S:g}",
    }
    with patch.dict(os.environ, names):
        detector = nccl_ras.NCCLRASCallback()
    reports = Reports(polls)
    detector._worker_group, detector._ras_poller = MagicMock(), reports
    detector.dump_workers_stack_traces = lambda: None
    detector.dump_ras_query_history = lambda _text=None: None
    raised_s = None
    logging.getLogger(nccl_ras.__name__).setLevel(logging.CRITICAL)
    for number in range(len(polls)):
        try:
            detector.after_worker_group_poll_status(None)
        except nccl_ras.NCCLHangError:
            raised_s = number * EVERY_S
            break
        assert not detector._is_ras_degraded
    return RayVerdict(raised_s, reports.unread)


# ---- the situations -----------------------------------------------------------------------------------


class Situation(Struct, frozen=True, kw_only=True):
    """A row.

    Args:
        name: What happens in the job.
        hang: Whether it hangs, in truth.
        polls: What RAS says.
        witness: What a look at its processes would show.
        ray_raises: Whether Ray's detector does.
        ours: Events that are told, in their order, repetitions left out.
        state: Of the communicator in the end.
        kind: Of its freeze.
        lagging: The ranks that are named.
        said: What the last event has to say in its reason.
        key: Of the communicator.
    """

    name: str
    hang: bool
    polls: tuple[bytes, ...]
    witness: Callable[..., Looks] | None = None
    ray_raises: bool
    ours: tuple[str, ...]
    state: type[State] | None
    kind: str | None = None
    lagging: tuple[int, ...] = ()
    said: str = ""
    key: str = "0xa/0x1:0x2"


def group(*ranks, absent=(), name="0xa", **fields):
    return communicator(ranks, absent, name=name, **fields)


def still(*communicators):
    return (report(*communicators),) * POLLS


FOUND = ("suspected", "confirmed")
BEHIND = group(rank(0, 5), rank(1, 4))
WEDGED = still(world(5, 5))
LEAVING = everyone(waiting, r1=standing(1))
NO_STATUS = {"rank": 1, "host": "10.0.0.1", "pid": 1001, "cuda_dev": 1, "nvml_dev": 1}

SITUATIONS = (
    Situation(
        name="rank 1 is one launch behind and stands still",
        hang=True, polls=still(BEHIND), witness=everyone(waiting, r1=standing(1)),
        ray_raises=True, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,), said="read_batch",
    ),
    Situation(
        name="all ranks entered the same collective and none comes out; stacks can be read",
        hang=True, polls=WEDGED, witness=everyone(waiting),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="symmetric", said="2 ranks wait in all_reduce",
    ),
    Situation(
        name="all ranks entered the same collective and none comes out; nobody can look",
        hang=True, polls=WEDGED, witness=everyone(unseen),
        ray_raises=False, ours=("suspected",), state=Suspected, kind="symmetric", said="no access",
    ),
    Situation(
        name="a process is stopped: its RAS thread does not answer",
        hang=True, polls=still(group(rank(0, 5), rank(2, 5), absent=[missing(1)])), witness=everyone(stopped),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="unresponsive", lagging=(1,), said="state T",
    ),
    Situation(
        name="rank 1 is behind, rank 2 aborted its communicator",
        hang=True,
        polls=still(group(rank(0, 5), rank(1, 4), rank(2, 5, status={**RUNNING, "abort_flag": True}))),
        witness=LEAVING,
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,), said="rank 2 aborted",
    ),
    Situation(
        name="rank 1 is behind, rank 2 left early (finalize)",
        hang=True,
        polls=still(group(rank(0, 5), rank(1, 4), rank(2, 5, status={**RUNNING, "finalize_called": True}))),
        witness=LEAVING,
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,), said="FINALIZE",
    ),
    Situation(
        name="rank 1 never comes out of ncclCommInit",
        hang=True, polls=still(group(rank(0, 0), rank(1, 0, status={**RUNNING, "init_state": 7}))),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="init", lagging=(1,), said="still in its init",
    ),
    Situation(
        name="a send waits for its receive: no counter of it moves, ever",
        hang=True, polls=still(world(0, 0)),
        ray_raises=False, ours=(), state=Aside,
    ),
    Situation(
        name="rank 0 writes a checkpoint for 12 minutes, the others wait for it",
        hang=False,
        polls=(report(world(4, 5)),) * 49 + (report(world(6, 6)),), witness=everyone(waiting, r0=moving(0)),
        ray_raises=True, ours=("suspected", "recovered"), state=None, said="its ranks moved",
    ),
    Situation(
        name="two communicators share a hash, the healthy one comes last",
        hang=True,
        polls=still(BEHIND, world(9, 9, secondary="0x3:0x4")), witness=everyone(waiting, r1=standing(1)),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,),
    ),
    Situation(
        name="the rank behind does not answer in every second poll",
        hang=True,
        polls=(report(BEHIND), report(group(rank(0, 5), absent=[missing(1)]))) * (POLLS // 2),
        witness=everyone(waiting, r1=standing(1)),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,),
    ),
    Situation(
        name="the rank behind is missing in every second poll, without a status",
        hang=True,
        polls=(report(BEHIND), report(group(rank(0, 5), absent=[NO_STATUS]))) * (POLLS // 2),
        witness=everyone(waiting, r1=standing(1)),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,),
    ),
    Situation(
        name="a communicator lies skewed since the setup while the job goes on",
        hang=False,
        polls=tuple(
            report(group(rank(0, 1), rank(1, 0)), world(10 + i, 10 + i, name="0xf")) for i in range(POLLS)
        ),
        witness=everyone(moving),
        ray_raises=True, ours=("idle",), state=Idle, kind="mismatch", lagging=(1,), said="go on in other",
    ),
    Situation(
        name="rank 1 is behind, and the status of rank 0 lacks keys",
        hang=True,
        polls=still(group(rank(0, 5, status={"init_state": 0}), rank(1, 4))),
        witness=everyone(waiting, r1=standing(1)),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,),
    ),
    Situation(
        name="a collective that only rank 0 ever launched",
        hang=True,
        polls=still(group(rank(0, {"AllReduce": 5, "AllToAll": 3}), rank(1, 5))),
        witness=everyone(waiting, r1=standing(1)),
        ray_raises=False, ours=FOUND, state=Confirmed, kind="mismatch", lagging=(1,),
    ),
)  # fmt: skip


def ask_ours(situation: Situation) -> Watcher:
    """Run rankwatch over the same bytes."""
    watcher = Watcher(POLICY, situation.witness)
    watcher.polls(situation.polls, every_s=EVERY_S)
    return watcher


def told(watcher: Watcher, key: str) -> list[tuple[float, Event]]:
    return [(seconds, event) for seconds, event in watcher.told if event.communicator == key]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_the_same_bytes_through_both(situation):
    ray = ask_ray(situation.polls)
    assert ray.raised_s == (POLICY.confirm_duration_s if situation.ray_raises else None)

    ours = ask_ours(situation)
    heard = told(ours, situation.key)
    names = [event.event for _, event in heard if event.event != "still_suspected"]
    assert tuple(names) == situation.ours
    assert {event.communicator for _, event in ours.told} <= {situation.key}
    if "confirmed" in situation.ours:
        (confirmed,) = [(seconds, event) for seconds, event in heard if event.event == "confirmed"]
        assert situation.hang
        assert confirmed[0] == POLICY.confirm_duration_s
        assert (confirmed[1].kind, confirmed[1].lagging) == (situation.kind, situation.lagging)
    if heard:
        assert situation.said in heard[-1][1].reason
        assert heard[0][1].kind == situation.kind or situation.kind is None
    if situation.state is not None:
        assert type(ours.window.communicators[situation.key]) is situation.state


def test_what_ray_cannot_read_it_never_sees():
    (situation,) = [one for one in SITUATIONS if "lacks keys" in one.name]
    assert ask_ray(situation.polls).unread == POLLS


def test_ray_calls_a_communicator_healthy_of_which_nothing_can_be_seen():
    (situation,) = [one for one in SITUATIONS if "send waits" in one.name]
    assert nccl_ras.parse_ras_schema(situation.polls[0].decode()).healthy
    state = ask_ours(situation).window.communicators[situation.key]
    assert state.what == "unobservable"


def test_a_rank_that_works_extends_the_time_once_and_the_event_says_why():
    (situation,) = [one for one in SITUATIONS if "checkpoint" in one.name]
    heard = told(ask_ours(situation), situation.key)
    (extension,) = [event for _, event in heard if "confirmed after" in event.reason]
    assert extension.event == "still_suspected"
    assert (
        "rank 0 moves: 0.9 s of CPU time in 10 s; confirmed after 900 s instead, this once"
        in extension.reason
    )
    assert extension.due_s == 900.0
    assert heard[-1] == (49 * EVERY_S, heard[-1][1])
    assert heard[-1][1].stalled_s == 49 * EVERY_S


def test_a_rank_that_seems_to_work_for_ever_is_a_hang_after_the_extended_time():
    watcher = Watcher(POLICY, everyone(waiting, r0=moving(0)))
    watcher.polls([report(world(4, 5))] * 80, every_s=EVERY_S)
    assert watcher.names("confirmed") == [(900.0, "confirmed")]


# ---- documents and addresses ----------------------------------------------------------------------------

A_NULL = (
    b'{"timestamp":"t","communicators":[{"hash":"0x1","ranks":[{"rank":0,"status":{"init_state":0,'
    b'"finalize_called":false,"destroy_flag":false,"abort_flag":false},"collective_counts":{"AllReduce":null}}]}]}'
)

DOCUMENTS: tuple[tuple[bytes, bool, type[RasError] | int], ...] = (
    # document, whether Ray reads it, our error or how many communicators we see
    (b"", False, RasMalformed),
    (b"{", False, RasTruncated),
    (b'{"timestamp":"t","communicators":[]}', True, 0),
    (b'{"communicators":[]}', False, 0),
    (b"NCCL RAS: connection refused", False, RasMalformed),
    (A_NULL, False, 0),  # a communicator without a size is none
    (A_NULL.replace(b'"ranks"', b'"size":1,"ranks_count":1,"ranks"', 1), False, 1),
)


@pytest.mark.parametrize(("document", "ray_reads", "ours"), DOCUMENTS, ids=lambda value: str(value)[:60])
def test_documents(document, ray_reads, ours):
    assert (nccl_ras.parse_ras_schema(document.decode()) is not None) is ray_reads
    if isinstance(ours, int):
        records = parse_report(document).records
        assert len(records) == ours
        for record in records.values():
            assert record.decode().counts == {0: (("AllReduce", 0),)}
    else:
        with pytest.raises(ours):
            parse_report(document)


ADDRESSES: tuple[tuple[str, bool, tuple[str, int] | None], ...] = (
    # NCCL_RAS_ADDR, whether Ray reads it, host and port or (None) an error that names it
    ("myhost", False, ("myhost", 28028)),
    ("", False, ("localhost", 28028)),
    ("[::1]", False, ("::1", 28028)),
    ("localhost:", False, None),
    ("10.0.0.1:28028", True, ("10.0.0.1", 28028)),
)


@pytest.mark.parametrize(("text", "ray_reads", "ours"), ADDRESSES, ids=repr)
def test_addresses(text, ray_reads, ours):
    if ray_reads:
        assert nccl_ras.parse_ras_addr(text) == ours
    else:
        with pytest.raises(ValueError, match="invalid literal for int"):
            nccl_ras.parse_ras_addr(text)
    if ours is not None:
        assert parse_ras_addr(text) == ours
    else:
        with pytest.raises(ValueError, match="is no port"):
            parse_ras_addr(text)
