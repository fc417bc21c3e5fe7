"""The kinds of freeze: when each is confirmed, what it needs for that, and how it is worded."""

from pathlib import Path

import pytest

from tasks.hang.errors import SettingsError
from tasks.hang.incident import incident_of
from tasks.hang.policy import HangPolicy, fit
from tasks.hang.states import Aside, Frozen, Idle, Progressing
from tests.reports import RUNNING, communicator, missing, rank, report, world
from tests.simulated_job import Watcher, everyone, gone, moving, standing, stopped, unseen, waiting

DATA = Path(__file__).parents[1] / "data" / "ras"
EVERY_S = 10.0
# A time for each kind, so that none can be taken for another.
POLICY = HangPolicy(
    poll_interval_s=EVERY_S,
    suspect_after_s=20,
    confirm_duration_s=200,
    confirm_unresponsive_s=120,
    confirm_symmetric_s=300,
    confirm_init_s=240,
    repeat_every_s=1000,
)
REPLAY = HangPolicy(
    poll_interval_s=EVERY_S, suspect_after_s=20, confirm_duration_s=200, repeat_every_s=1000, witnesses=False
)
KEY = "0xa/0x1:0x2"
STUCK = report(world(5, 5, 4, 5))


def watch(*polls, policy=POLICY, witness=None, start_s=0.0):
    watcher = Watcher(policy, witness)
    watcher.polls(polls, every_s=EVERY_S, start_s=start_s)
    return watcher


def with_status(number, count, **status):
    return rank(number, count, status={**RUNNING, **status})


def group(*counts, pid, name, secondary="0x1:0x2"):
    ranks = [rank(i, count, pid=pid + i, nvml_dev=i) for i, count in enumerate(counts)]
    return communicator(ranks, name=name, secondary=secondary)


INIT = report(communicator([rank(0, 0), with_status(1, 0, init_state=7), rank(2, 0)]))
SILENT = report(communicator([rank(0, 5), rank(2, 5)], [missing(1)]))
DEAD = report(communicator([rank(0, 5), rank(2, 5)], [missing(1, considered_dead=True)]))
WEDGED = report(world(5, 5, 5))

# ---- each kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "poll", "witness", "confirm_s", "lagging", "said"),
    [
        ("mismatch", STUCK, everyone(waiting, r2=standing(2)), 200, (2,), "rank 2 stands in read_batch"),
        ("unresponsive", SILENT, everyone(stopped), 120, (1,), "rank 1 does not answer RAS"),
        ("symmetric", WEDGED, everyone(waiting), 300, (), "3 ranks wait in all_reduce in both samples"),
        ("init", INIT, None, 240, (1,), "rank 1 is still in its init"),
    ],
)
def test_each_kind_has_its_own_time_and_words(  # noqa: PLR0917  a row
    kind, poll, witness, confirm_s, lagging, said
):
    watcher = watch(*[poll] * 40, witness=witness)
    assert watcher.names() == [(20, "suspected"), (confirm_s, "confirmed")]
    (confirmed,) = watcher.of("confirmed")
    assert (confirmed.kind, confirmed.lagging, confirmed.stalled_s) == (kind, lagging, confirm_s)
    assert said in confirmed.reason
    assert confirmed.due_s == confirm_s


@pytest.mark.parametrize(
    ("poll", "lagging"),
    [
        (INIT, (1,)),
        (report(communicator([with_status(n, 0, init_state=7) for n in range(3)])), (0, 1, 2)),
        (
            report(
                communicator([rank(0, 0), with_status(1, 0, init_state=7)], [missing(2, unresponsive=False)])
            ),
            (1, 2),
        ),
    ],
)
def test_an_init_names_the_ranks_that_are_in_it_or_not_there_yet(poll, lagging):
    (confirmed,) = watch(*[poll] * 30).of("confirmed")
    assert (confirmed.kind, confirmed.lagging) == ("init", lagging)


def test_an_init_that_gets_further_starts_its_time_anew():
    all_in = report(communicator([with_status(n, 0, init_state=7) for n in range(3)]))
    watcher = watch(*[all_in] * 10, *[INIT] * 30)
    assert watcher.names("confirmed") == [(100 + 240, "confirmed")]


@pytest.mark.parametrize(
    ("departing", "words"),
    [
        (with_status(2, 5, finalize_called=True), "rank 2 shuts this communicator down (FINALIZE)"),
        (with_status(2, 5, destroy_flag=True), "rank 2 shuts this communicator down (FINALIZE)"),
        (with_status(2, 5, abort_flag=True), "rank 2 aborted this communicator (ABORT)"),
    ],
)
class TestRanksThatLeave:
    def test_are_said_and_not_confirmed_without_a_witness(self, departing, words):
        poll = report(communicator([rank(0, 5), rank(1, 4), departing]))
        for policy, witness in ((POLICY, None), (POLICY, everyone(unseen)), (REPLAY, None)):
            watcher = watch(*[poll] * 60, policy=policy, witness=witness)
            assert watcher.names() == [(20, "suspected")]
            assert words in watcher.told[0][1].reason

    def test_do_not_hide_the_others_from_a_witness(self, departing, words):
        poll = report(communicator([rank(0, 5), rank(1, 4), departing]))
        watcher = watch(*[poll] * 30, witness=everyone(waiting, r1=standing(1)))
        assert watcher.names() == [(20, "suspected"), (200, "confirmed")]
        confirmed = watcher.told[-1][1]
        assert (confirmed.kind, confirmed.lagging) == ("mismatch", (1,))
        assert 2 not in confirmed.lagging
        assert words in confirmed.reason
        assert all(2 not in question.ranks for _, question in watcher.asked)

    def test_are_no_hang_where_the_others_agree(self, departing, words):
        poll = report(communicator([rank(0, 5), rank(1, 5), departing]))
        watcher = watch(*[poll] * 60, witness=everyone(waiting))
        assert watcher.told == []
        state = watcher.window.communicators[KEY]
        assert isinstance(state, Aside)
        assert (state.what, state.remark) == ("leaving", words)


def test_a_rank_that_has_left_is_said_and_not_confirmed_without_a_witness():
    poll = report(communicator([rank(0, 5), rank(1, 4)], [missing(2, unresponsive=False)]))
    watcher = watch(*[poll] * 60, witness=everyone(unseen))
    assert watcher.names() == [(20, "suspected")]
    assert "rank 2 is no member any more, or not yet" in watcher.told[0][1].reason


def test_an_asynchronous_error_is_said():
    ranks = [rank(0, 5), with_status(1, 4, async_error=6), with_status(2, 5, async_error=7)]
    watcher = watch(*[report(communicator(ranks))] * 4)
    assert "rank 1 is in asynchronous error 6" in watcher.told[0][1].reason
    assert "error 7" not in watcher.told[0][1].reason


def test_sends_and_receives_are_not_observable_from_the_first_report_on():
    watcher = Watcher(POLICY)
    for number in range(60):
        watcher.poll(number * EVERY_S, report(world(0, 0), world(9 + number, 9 + number, name="0xf")))
        state = watcher.window.communicators[KEY]
        assert isinstance(state, Aside)
        assert state.what == "unobservable"
    assert watcher.told == []


def test_what_was_not_observable_is_once_it_launches_something():
    quiet = [report(world(0, 0))] * 5
    watcher = watch(*quiet, report(world(1, 1)), report(world(2, 2)))
    assert isinstance(watcher.window.communicators[KEY], Progressing)
    watcher = watch(*quiet, *[report(world(1, 0))] * 30)
    assert watcher.names("confirmed") == [(50 + 200, "confirmed")]


# ---- unresponsive -----------------------------------------------------------------------------------------


def test_a_process_that_is_gone_is_told_and_never_confirmed():
    watcher = watch(*[SILENT] * 7, *[DEAD] * 60, witness=everyone(gone))
    assert watcher.of("confirmed") == []
    assert [event.event for _, event in watcher.told][:2] == ["suspected", "still_suspected"]
    assert "the process of rank 1 is gone: the job's own health check will act" in watcher.told[1][1].reason


def test_a_process_that_stands_is_a_hang_whatever_ras_considers():
    watcher = watch(*[DEAD] * 20, witness=everyone(stopped))
    assert watcher.names() == [(20, "suspected"), (120, "confirmed")]
    assert watcher.of("confirmed")[0].kind == "unresponsive"


def test_without_a_witness_the_dead_are_gone_from_the_first_report_on():
    watcher = watch(*[DEAD] * 60, policy=REPLAY)
    assert watcher.told == []
    state = watcher.window.communicators[KEY]
    assert isinstance(state, Aside)
    assert "rank 1 is gone: RAS considers its process dead" in state.remark


def test_without_a_witness_the_flag_says_nothing_new_about_a_freeze():
    watcher = watch(*[SILENT] * 6, *[DEAD] * 30, policy=REPLAY)
    assert watcher.names() == [(20, "suspected"), (200, "confirmed")]
    (confirmed,) = watcher.of("confirmed")
    assert (confirmed.kind, confirmed.lagging) == ("unresponsive", (1,))
    assert "dead" not in confirmed.reason


def test_a_rank_that_is_behind_and_dead_leaves_a_mismatch_to_a_witness():
    behind = communicator([rank(0, 5), rank(1, 4)], [missing(2, considered_dead=True)])
    watcher = watch(*[report(behind)] * 60, policy=REPLAY)
    assert watcher.names() == [(20, "suspected")]


def test_reports_with_timeouts_alone_never_confirm_who_is_missing():
    slow = report(
        communicator([rank(0, 5), rank(2, 5)], [missing(1)]),
        ras={"collection_time_sec": 5, "timeouts_count": 1},
    )
    watcher = watch(*[slow] * 60, witness=everyone(stopped))
    assert watcher.names() == [(20, "suspected")]
    watcher.poll(600, SILENT)
    assert watcher.names("confirmed") == [(600, "confirmed")]


def test_a_rank_that_answers_again_and_stands_with_the_others_is_no_longer_unresponsive():
    back = report(communicator([rank(0, 5), rank(1, 5), rank(2, 5)]))
    watcher = watch(*[SILENT] * 8, *[back] * 20, witness=everyone(stopped))
    assert watcher.names()[:2] == [(20, "suspected"), (80, "recovered")]
    assert watcher.of("confirmed") == []


# ---- symmetric --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "witness"),
    [(POLICY, None), (POLICY, everyone(unseen)), (POLICY, everyone(moving)), (REPLAY, None)],
)
def test_equal_counts_are_never_more_than_suspected_without_a_witness_that_agrees(policy, witness):
    watcher = watch(*[WEDGED] * 200, policy=policy, witness=witness)
    assert {event.event for _, event in watcher.told} <= {"suspected", "still_suspected"}
    assert "all ranks launched the same and the whole job stands still" in watcher.told[0][1].reason


def test_one_rank_outside_of_the_collective_is_enough_to_disagree():
    watcher = watch(*[WEDGED] * 60, witness=everyone(waiting, r1=standing(1)))
    assert watcher.of("confirmed") == []
    watcher = watch(*[WEDGED] * 40, witness=everyone(waiting, r1=stopped(1)))
    assert watcher.names("confirmed") == [(300, "confirmed")]


def test_a_witness_is_asked_again_until_it_agrees():
    looks = iter([moving, unseen, *[waiting] * 10])
    watcher = watch(
        *[WEDGED] * 120,
        witness=lambda question: (
            [next(looks)(number) for number in question.ranks[:1]] * 1
            + [waiting(number) for number in question.ranks[1:]]
        ),
    )  # the first rank is what changes
    assert len(watcher.asked) == 3
    gaps = [
        later - earlier for (earlier, _), (later, _) in zip(watcher.asked, watcher.asked[1:], strict=False)
    ]
    assert gaps == [300, 300]
    assert len(watcher.of("confirmed")) == 1


def test_equal_counts_mean_nothing_while_anything_of_the_job_moves():
    polls = [report(world(5, 5, 5), group(i, i, pid=2000, name="0xb")) for i in range(60)]
    watcher = watch(*polls, witness=everyone(waiting))
    assert watcher.told == []


def test_the_time_of_a_symmetric_freeze_counts_from_the_last_movement_of_the_job():
    moving_on = [report(world(5, 5, 5), group(i, i, pid=2000, name="0xb")) for i in range(10)]
    still = report(world(5, 5, 5), group(9, 9, pid=2000, name="0xb"))
    watcher = watch(*moving_on, *[still] * 40, witness=everyone(waiting))
    assert {seconds for seconds, event in watcher.told if event.event == "confirmed"} == {90 + 300}


def test_who_only_waits_for_another_freeze_is_not_told_of():
    polls = [report(world(5, 5, 5, 5, name="0xf"), group(5, 4, pid=1000, name="0xa"))] * 60
    watcher = watch(*polls, witness=everyone(waiting))
    assert {event.communicator for _, event in watcher.told} == {KEY}
    assert isinstance(watcher.window.communicators["0xf/0x1:0x2"], Frozen)


# ---- idle ------------------------------------------------------------------------------------------------

SKEWED = group(1, 0, pid=1000, name="0xa")


def beside(steps):
    return report(SKEWED, world(steps, steps, name="0xf"))


class TestIdle:
    """A communicator lies skewed while all of its members go on in another one."""

    def test_is_told_once_and_asked_about_and_not_confirmed_while_they_move(self):
        watcher = watch(*[beside(i) for i in range(200)], witness=everyone(moving))
        assert watcher.names() == [(20, "idle")]
        assert isinstance(watcher.window.communicators[KEY], Idle)
        assert len(watcher.asked) >= 2
        assert all(question.ranks == (0, 1) for _, question in watcher.asked)

    def test_is_not_hidden_while_every_member_is_seen_to_wait(self):
        # What is seen in ten seconds is no stall of a confirm time: when all have gone on, it is idle again.
        watcher = watch(*[beside(i) for i in range(40)], witness=everyone(waiting, r1=standing(1)))
        names = [name for _, name in watcher.names()]
        assert names[:4] == ["idle", "suspected", "idle", "suspected"]
        assert watcher.of("confirmed") == []

    def test_becomes_a_suspicion_when_the_members_stop(self):
        polls = [beside(min(i, 100)) for i in range(130)]
        watcher = watch(*polls, witness=everyone(unseen))
        assert watcher.names("idle") == [(20, "idle")]
        (moment, event), *_ = [
            (s, e) for s, e in watcher.told if e.event == "suspected" and e.communicator == KEY
        ]
        assert moment > 1000
        assert event.stalled_s <= moment - 1000  # from when they stopped on, not from when it was skewed
        assert watcher.of("confirmed") == []  # nobody saw them stand still

    def test_did_not_cause_the_stall_that_it_is_older_than(self):
        polls = [beside(min(i, 100)) for i in range(140)]
        watcher = watch(*polls, witness=everyone(waiting))
        confirmed = {(event.communicator, event.kind) for event in watcher.of("confirmed")}
        assert confirmed == {(KEY, "mismatch"), ("0xf/0x1:0x2", "symmetric")}
        incident = incident_of("run", watcher.window)
        assert incident is not None
        assert incident.members == ("0xf/0x1:0x2", KEY)

    def test_is_not_confirmed_by_a_pause_of_the_job(self):
        polls = [beside(min(i, 100)) for i in range(118)] + [beside(101 + i) for i in range(30)]
        for witness in (None, everyone(unseen), everyone(moving), everyone(waiting)):
            watcher = watch(*polls, witness=witness)
            assert [s for s, e in watcher.told if e.event == "confirmed" and s >= 1000] == []

    def test_survives_a_restart(self):
        watcher = Watcher(POLICY, everyone(moving))
        for i in range(300):
            watcher.poll(i * EVERY_S, beside(i))
            if i % 40 == 39:
                watcher.restart()
        assert watcher.of("confirmed") == []


def test_a_stuck_group_is_confirmed_while_the_world_and_the_other_groups_are_healthy():
    polls = [
        report(
            group(5, 4, pid=1000, name="0xa"),
            group(7 + i, 7 + i, pid=1002, name="0xb"),
            group(9 + i, 9 + i, 9 + i, 9 + i, pid=1002, name="0xf"),
        )
        for i in range(30)
    ]
    watcher = watch(*polls, witness=everyone(waiting, r1=standing(1)))
    assert watcher.names() == [(20, "suspected"), (200, "confirmed")]
    assert {event.communicator for _, event in watcher.told} == {KEY}


# ---- extensions and what is learned ---------------------------------------------------------------------


def test_the_time_is_extended_once_and_cut_by_the_limit():
    polls = [STUCK] * 50
    for limit_s, confirm_s in ((None, 300), (250.0, 250), (150.0, 150)):
        policy = HangPolicy(
            poll_interval_s=EVERY_S,
            suspect_after_s=20,
            confirm_duration_s=200,
            repeat_every_s=1000,
            limit_s=limit_s,
        )
        watcher = watch(*polls, policy=policy, witness=everyone(waiting, r2=moving(2)))
        assert watcher.names("confirmed") == [(confirm_s, "confirmed")]
        assert len([event for _, event in watcher.told if "this once" in event.reason]) == 1


def test_where_a_rank_stands_is_no_veto():
    watcher = watch(*[STUCK] * 25, witness=everyone(waiting, r2=standing(2, where="save_checkpoint")))
    assert watcher.names("confirmed") == [(200, "confirmed")]
    assert "save_checkpoint in both samples" in watcher.of("confirmed")[0].reason


def test_a_witness_that_never_answers_holds_nothing_up():
    watcher = watch(*[STUCK] * 25, witness=lambda _question: None)
    assert watcher.names("confirmed") == [(200, "confirmed")]
    assert "no witness answered in time" in watcher.of("confirmed")[0].reason


def stall(watcher, start_s, for_s, steps):
    """Rank 0 stays behind for so long, then all go on; returns when the next poll is due."""
    polls = int(for_s // EVERY_S)
    still, on = (
        [report(world(steps, steps + 1))] * polls,
        [report(world(steps + n, steps + n)) for n in (2, 3)],
    )
    watcher.polls([*still, *on], every_s=EVERY_S, start_s=start_s)
    return start_s + (polls + 2) * EVERY_S


LEARNING = HangPolicy(poll_interval_s=EVERY_S)


def test_a_stall_that_recovered_makes_the_next_one_of_its_communicator_wait_longer():
    watcher = Watcher(LEARNING, everyone(unseen))
    start_s = stall(watcher, 0, 500, 10)
    assert watcher.window.envelopes == {KEY: 500.0}
    watcher.restart()
    watcher.polls([report(world(20, 21))] * 80, every_s=EVERY_S, start_s=start_s)
    (confirmed,) = watcher.of("confirmed")
    assert (confirmed.due_s, confirmed.stalled_s) == (750.0, 750.0)


def test_what_is_learned_is_capped_and_can_be_limited():
    for cap_s, due_s in ((None, 1200.0), (650.0, 650.0)):
        policy = HangPolicy(envelope_cap_s=cap_s, extend_factor=1)
        assert policy.due_s("mismatch", envelope_s=5000) == due_s
    assert HangPolicy(limit_s=700.0).due_s("mismatch", envelope_s=500, extended=True) == 700.0
    assert HangPolicy().due_s("mismatch", envelope_s=500) == 750.0
    assert HangPolicy().due_s("mismatch", envelope_s=300) == 600.0


def test_another_communicator_has_learned_nothing():
    watcher = Watcher(LEARNING, everyone(unseen))
    start_s = stall(watcher, 0, 500, 10)
    watcher.polls([report(group(7, 6, pid=3000, name="0xb"))] * 70, every_s=EVERY_S, start_s=start_s)
    (confirmed,) = watcher.of("confirmed")
    assert confirmed.due_s == 600.0


def test_lying_idle_teaches_nothing():
    polls = [beside(i) for i in range(60)] + [report(world(1, 1), world(61, 61, name="0xf"))] * 2
    watcher = watch(*polls, witness=everyone(moving))
    assert (600, "recovered") in watcher.names()
    assert watcher.window.envelopes == {}


def test_a_confirmed_hang_that_recovers_teaches_too():
    watcher = Watcher(LEARNING, everyone(unseen))
    start_s = stall(watcher, 0, 700, 10)
    assert len(watcher.of("confirmed")) == 1
    watcher.polls([report(world(20, 21))] * 120, every_s=EVERY_S, start_s=start_s)
    assert [event.due_s for event in watcher.of("confirmed")] == [600.0, 1050.0]


FAST = HangPolicy(
    poll_interval_s=EVERY_S,
    suspect_after_s=20,
    confirm_duration_s=200,
    repeat_every_s=1000,
    fast_confirm_s=90,
)


def test_witnesses_that_agree_strongly_confirm_early():
    watcher = watch(*[STUCK] * 25, policy=FAST, witness=everyone(waiting, r2=standing(2)))
    assert watcher.names() == [(20, "suspected"), (90, "confirmed")]
    slow = watch(*[STUCK] * 25, witness=everyone(waiting, r2=standing(2)))
    assert slow.names("confirmed") == [(200, "confirmed")]


@pytest.mark.parametrize(
    "witness",
    [
        everyone(unseen),
        everyone(waiting, r2=unseen(2)),
        everyone(waiting, r3=standing(3), r2=standing(2)),  # half of them is no minority
        everyone(waiting, r0=waiting(0, collective="broadcast"), r2=standing(2)),
        everyone(waiting),
    ],
    ids=["unseen", "culprit unseen", "no minority", "two collectives", "nobody elsewhere"],
)
def test_weaker_agreement_does_not(witness):
    watcher = watch(*[STUCK] * 25, policy=FAST, witness=witness)
    assert watcher.names("confirmed") == [(200, "confirmed")]


# ---- fitting a policy to the watchdog of the run ----------------------------------------------------------


def fitted(policy, watchdog_s, explicit=()):
    return fit(
        policy,
        watchdog_s=watchdog_s,
        watchdog="process-group timeout",
        capture_s=60,
        explicit=frozenset(explicit),
    )


def test_the_default_shrinks_with_a_warning():
    found = fitted(HangPolicy(), 480)
    assert found.policy.limit_s == 480 - 60 - 30
    assert found.policy.confirm_s("mismatch") == 390
    assert found.policy.due_s("mismatch", envelope_s=1000, extended=True) == 390
    assert "process-group timeout ends the processes after 480 s" in found.warning
    assert "confirmed after that instead of 600 s" in found.warning


def test_what_fits_is_left_alone_but_for_its_extensions():
    found = fitted(HangPolicy(), 800)
    assert found.warning == ""
    assert found.policy.confirm_s("mismatch") == 600
    assert found.policy.due_s("mismatch", extended=True) == 710
    assert fitted(HangPolicy(), None).policy == HangPolicy()


@pytest.mark.parametrize("field", ["confirm_duration_s", "confirm_symmetric_s", "confirm_init_s"])
def test_what_somebody_set_and_cannot_fit_is_refused_by_name(field):
    with pytest.raises(SettingsError, match=f"{field} is 500 s"):
        fitted(HangPolicy(**{field: 500}), 480, explicit=[field])
    # set by nobody, it is cut
    assert fitted(HangPolicy(**{field: 500}), 480).policy.limit_s == 390


def test_a_watchdog_that_leaves_no_time_is_refused():
    with pytest.raises(SettingsError, match="0 s are left"):
        fitted(HangPolicy(), 90)
    with pytest.raises(SettingsError, match="10 s are left"):
        fitted(HangPolicy(), 100)


def test_a_fitted_policy_confirms_and_captures_before_the_watchdog():
    for watchdog_s in (200.0, 480.0, 700.0, 1000.0):
        policy = fitted(HangPolicy(), watchdog_s).policy
        watcher = Watcher(policy, everyone(waiting, r2=moving(2)))
        # The rank launched right after a poll, which is the worst.
        watcher.polls([STUCK] * 80, every_s=policy.poll_interval_s, start_s=policy.poll_interval_s)
        ((confirmed_s, _),) = watcher.names("confirmed")
        assert confirmed_s + 60 <= watchdog_s


# ---- what NVIDIA's own server wrote -----------------------------------------------------------------------

LONG = HangPolicy(poll_interval_s=EVERY_S, suspect_after_s=20, confirm_duration_s=100, repeat_every_s=1000)


STAYS = ("suspected",)
FOUND = ("suspected", "confirmed")
EVERY_RANK = tuple(range(8))

# One recorded report, again and again: (events, {(kind, size, lagging) of them}, {(what, size) set aside})
RECORDED = {
    "v2.30.7/healthy_world_n2": (STAYS, {("symmetric", 2, ())}, set()),
    "v2.30.7/healthy_world_n8": (STAYS, {("symmetric", 8, ())}, set()),
    "v2.28.9/healthy_world_n8": (STAYS, {("symmetric", 8, ())}, set()),
    "v2.30.7/healthy_world_n64": (STAYS, {("symmetric", 64, ())}, set()),
    "v2.30.7/healthy_world_n512": (STAYS, {("symmetric", 512, ())}, set()),
    "v2.30.7/healthy_cuda_visible_devices_n4": (STAYS, {("symmetric", 4, ())}, set()),
    "v2.30.7/healthy_multigpu_per_proc_n8": (STAYS, {("symmetric", 8, ())}, set()),
    "v2.30.7/init_unvalid_comm_sorts_last_n4": (STAYS, {("symmetric", 4, ())}, set()),
    "v2.30.7/multi_comm_n16_tp4_dp4_pp": (
        STAYS, {("symmetric", 16, ()), ("symmetric", 4, ())}, {("unobservable", 2)},
    ),
    "v2.30.7/multi_comm_n64_tp8_dp8": (STAYS, {("symmetric", 64, ()), ("symmetric", 8, ())}, set()),
    "v2.30.7/multi_comm_n512_tp8_dp": (
        STAYS, {("symmetric", 512, ())}, {("unobservable", 8), ("unobservable", 64)},
    ),
    "v2.30.7/multi_comm_n16_one_tp_group_straggler": (
        FOUND, {("mismatch", 4, (2,))}, {("unobservable", 2)},
    ),
    "v2.30.7/mismatch_one_rank_behind_n8": (FOUND, {("mismatch", 8, (5,))}, set()),
    "v2.28.9/mismatch_one_rank_behind_n8": (FOUND, {("mismatch", 8, (5,))}, set()),
    "v2.30.7/mismatch_wrong_collective_n8": (FOUND, {("mismatch", 8, (5,))}, set()),
    "v2.30.7/mismatch_one_rank_ahead_n8": (FOUND, {("mismatch", 8, (0, 1, 2, 4, 5, 6, 7))}, set()),
    "v2.30.7/init_all_in_progress_n8": (FOUND, {("init", 8, EVERY_RANK)}, set()),
    "v2.30.7/init_two_ranks_in_progress_n8": (FOUND, {("init", 8, (6, 7))}, set()),
    "v2.30.7/init_error_two_ranks_n8": (FOUND, {("init", 8, (6, 7))}, set()),
    "v2.30.7/async_error_n8": (STAYS, {("symmetric", 8, ())}, set()),
    "v2.30.7/async_inprogress_n8": (STAYS, {("symmetric", 8, ())}, set()),
    "v2.30.7/abort_one_rank_n8": ((), set(), {("leaving", 8)}),
    "v2.30.7/abort_all_n8": ((), set(), {("leaving", 8)}),
    "v2.30.7/nocomm_two_ranks_left_n8": ((), set(), {("leaving", 8)}),
    "v2.30.7/no_communicators_n8": ((), set(), set()),
    "v2.30.7/bootstrap_not_finished_n4": ((), set(), set()),
    "v2.30.7/killed_proc_immediately_n8": (FOUND, {("unresponsive", 8, (6,))}, set()),
    "v2.28.9/killed_proc_one_comm_n8": (FOUND, {("unresponsive", 8, (6,))}, set()),
    "v2.30.7/killed_proc_considered_dead_n8": (FOUND, {("unresponsive", 8, (6,))}, set()),
    "v2.30.7/stopped_proc_considered_dead_n8": (FOUND, {("unresponsive", 8, (6,))}, set()),
    "v2.30.7/stopped_proc_first_query_n8": (STAYS, {("unresponsive", 8, (6,))}, set()),  # it had timeouts
    "v2.30.7/node_unresponsive_later_n16": (
        FOUND, {("unresponsive", 16, (8, 9, 10, 11)), ("unresponsive", 4, (2,))}, set(),
    ),
}  # fmt: skip


def recorded(name):
    return (DATA / f"{name}.json").read_bytes()


def test_every_recorded_report_is_looked_at():
    found = {f"{path.parent.name}/{path.stem}" for path in DATA.glob("v*/*.json")}
    assert found == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_report_that_goes_on_like_that(name):
    events, kinds, asides = RECORDED[name]
    # Of a process that RAS does not hear only a witness can tell that it stands; of the rest nobody looks.
    watcher = watch(
        *[recorded(name)] * 14,
        policy=LONG,
        witness=lambda question: everyone(unseen if question.stacks else stopped)(question),
    )
    assert {(event.kind, event.size, event.lagging) for _, event in watcher.told} == kinds
    for key in {event.communicator for _, event in watcher.told}:
        heard = [(seconds, event.event) for seconds, event in watcher.told if event.communicator == key]
        assert heard == list(zip((20, 100), events, strict=False))
    aside = [state for state in watcher.window.communicators.values() if isinstance(state, Aside)]
    assert {(state.what, state.size) for state in aside} == asides


@pytest.mark.parametrize("name", [name for name in RECORDED if "killed" in name])
def test_a_recorded_process_that_is_gone_is_never_confirmed(name):
    watcher = watch(*[recorded(name)] * 30, policy=LONG, witness=everyone(gone))
    assert watcher.of("confirmed") == []
    assert "the process of rank 6 is gone" in watcher.told[-1][1].reason


@pytest.mark.parametrize("name", [name for name in RECORDED if "considered_dead" in name])
def test_a_recorded_process_that_is_considered_dead_is_gone_where_nobody_can_look(name):
    watcher = watch(*[recorded(name)] * 30, policy=REPLAY)
    assert watcher.told == []


def test_one_report_of_a_healthy_job_says_that_it_moves():
    for name in RECORDED:
        if "healthy" in name or ("multi_comm" in name and "straggler" not in name):
            states = watch(recorded(name)).window.communicators.values()
            assert {type(state) for state in states} <= {Progressing, Aside}


def series(name):
    return [path.read_bytes() for path in sorted((DATA / "v2.30.7" / name).glob("*.json"))]


SECOND = HangPolicy(
    poll_interval_s=1, suspect_after_s=2, confirm_duration_s=4, witness_gap_s=1, repeat_every_s=100
)


def by_second(name, witness, policy=SECOND):
    watcher = Watcher(policy, witness)
    watcher.polls(series(name), every_s=policy.poll_interval_s)
    return watcher


def test_the_recorded_hang_of_rank_3_is_confirmed_where_it_is_missed():
    watcher = by_second("series_hang_rank3_n8", everyone(unseen))
    assert {(event.kind, event.size, event.lagging) for event in watcher.of("confirmed")} == {
        ("mismatch", 2, (1,)),
        ("mismatch", 4, (1,)),
    }
    assert all(4 <= event.stalled_s < 5 for event in watcher.of("confirmed"))


def test_the_recorded_symmetric_hang_is_confirmed_by_a_witness_only():
    assert by_second("series_symmetric_hang_n8", None).of("confirmed") == []
    assert by_second("series_symmetric_hang_n8", everyone(moving)).of("confirmed") == []
    assert by_second("series_symmetric_hang_n8", None, HangPolicy(
        poll_interval_s=1, suspect_after_s=2, confirm_duration_s=4, witnesses=False
    )).of("confirmed") == []  # fmt: skip
    confirmed = by_second("series_symmetric_hang_n8", everyone(waiting)).of("confirmed")
    assert {event.kind for event in confirmed} == {"symmetric"}


def test_the_recorded_kill_of_rank_6_is_told_and_confirmed_only_where_the_process_stands():
    policy = HangPolicy(poll_interval_s=5, suspect_after_s=10, confirm_duration_s=40, repeat_every_s=100)
    killed = by_second("series_kill_rank6_n8", everyone(gone), policy)
    assert killed.of("confirmed") == []
    assert "is gone" in killed.told[-1][1].reason
    stands = by_second("series_kill_rank6_n8", everyone(stopped), policy)
    assert {(event.kind, event.lagging) for event in stands.of("confirmed")} == {("unresponsive", (6,))}
