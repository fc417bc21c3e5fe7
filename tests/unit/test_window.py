"""When it is a hang: examples, and a state machine that tries to prove the window wrong."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tasks.hang.errors import SettingsError
from tasks.hang.incident import incident_of
from tasks.hang.memory import recall, remember
from tasks.hang.policy import HangPolicy
from tasks.hang.report import parse_report
from tasks.hang.states import Blank, Confirmed, Sighting, Suspected
from tasks.hang.window import Window, advance
from tasks.hang.witness import Look, Witness
from tests.reports import at, communicator, missing, rank, report, world

POLICY = HangPolicy(poll_interval_s=10, suspect_after_s=20, confirm_duration_s=60, repeat_every_s=15)
DATA = Path(__file__).parents[1] / "data" / "ras" / "v2.30.7"
KEY = "0xa/0x1:0x2"


def unseen(question):
    return [Look(rank=number, state="unknown", problem="no access") for number in question.ranks]


def watch(*polls, policy=POLICY, every_s=10.0, window=None, witness=unseen):
    """Feed reports (or None for a failed poll) and return the window and (seconds, event) pairs.

    `witness` turns a question into the looks at its ranks; None is one that never answers.
    """
    window = window or Window(attempt_id="one")
    told = []
    for number, poll in enumerate(polls):
        moment = at(number * every_s)
        seen = Blank(moment, "no answer") if poll is None else Sighting(moment, parse_report(poll))
        window, events = advance(window, seen, policy)
        told += [(number * every_s, event) for event in events]
        for question in window.questions if witness else ():
            answer = Witness(
                observed_at=moment, communicator=question.communicator, looks=tuple(witness(question))
            )
            window, events = advance(window, answer, policy)
            told += [(number * every_s, event) for event in events]
    return window, told


def gone(question):
    return [Look(rank=number, state="gone") for number in question.ranks]


def names(told):
    return [(seconds, event.event) for seconds, event in told]


STUCK = report(world(5, 5, 4, 5))


def group(*counts, pid, name):
    """A communicator of the processes from `pid` on."""
    return communicator([rank(i, count, pid=pid + i) for i, count in enumerate(counts)], name=name)


def test_a_straggler_is_suspected_repeated_and_confirmed_at_the_confirm_time():
    window, told = watch(*[STUCK] * 8)
    assert names(told) == [
        (20, "suspected"),
        (40, "still_suspected"),
        (60, "confirmed"),
    ]
    confirmed = told[-1][1]
    assert (confirmed.lagging, confirmed.leading, confirmed.size) == ((2,), (0, 1, 3), 4)
    assert (confirmed.kind, confirmed.stalled_s, confirmed.communicator) == ("mismatch", 60.0, KEY)
    assert isinstance(window.communicators[KEY], Confirmed)


def test_the_time_counts_from_the_first_report_that_showed_the_counts():
    _, told = watch(report(world(1, 1, 1, 1)), *[STUCK] * 8)
    assert (70, "confirmed") in names(told)


def test_failed_polls_are_neither_progress_nor_freeze_and_do_not_stretch_the_time():
    _, told = watch(STUCK, None, STUCK, None, None, STUCK, STUCK)
    assert (60, "confirmed") in names(told)
    assert "blind" not in [event for _, event in names(told)]


def test_a_confirm_time_that_is_no_whole_number_of_polls_is_rounded_up():
    policy = HangPolicy(poll_interval_s=10, suspect_after_s=20, confirm_duration_s=55)
    assert policy.confirm_polls == 6
    _, told = watch(*[STUCK] * 8, policy=policy)
    assert (60, "confirmed") in names(told)


def test_progress_of_any_rank_ends_the_freeze_and_is_told():
    window, told = watch(*[STUCK] * 4, report(world(5, 5, 5, 5)))
    assert names(told)[-1] == (40, "recovered")
    assert window.stalled == {}


def test_a_freeze_with_other_counts_begins_anew():
    later = report(world(9, 9, 8, 9))
    _, told = watch(*[STUCK] * 4, *[later] * 7)
    assert names(told) == [
        (20, "suspected"),
        (40, "recovered"),
        (60, "suspected"),
        (80, "still_suspected"),
        (100, "confirmed"),
    ]


def test_each_communicator_has_its_own_time():
    first, second = world(5, 4), group(7, 7, 6, name="0xb", pid=2000)
    moving = [report(first, group(i, i, i, name="0xb", pid=2000)) for i in range(3)]
    _, told = watch(*moving, *[report(first, second)] * 8)
    assert [(s, e.communicator) for s, e in told if e.event == "confirmed"] == [
        (60, KEY),
        (90, "0xb/0x1:0x2"),
    ]


def test_a_stuck_group_is_confirmed_while_the_world_and_other_groups_are_healthy():
    stuck, healthy = group(5, 4, pid=1000, name="0xa"), world(9, 9, 9, 9, name="0xf")
    polls = [report(stuck, group(i, i, pid=1002, name="0xb"), healthy) for i in range(8)]
    _, told = watch(*polls)
    assert [(s, e.communicator) for s, e in told if e.event == "confirmed"] == [(60, KEY)]


def test_a_stuck_group_is_confirmed_while_the_world_goes_on_without_one_of_its_ranks():
    polls = [
        report(group(5, 4, pid=1000, name="0xa"), world(9, 9 + i, 9 + i, 9 + i, name="0xf")) for i in range(8)
    ]
    _, told = watch(*polls)
    assert (60, "confirmed") in [(s, e.event) for s, e in told if e.communicator == KEY]


def test_a_rank_that_comes_and_goes_is_neither_progress_nor_a_new_freeze():
    gone = report(communicator([rank(0, 5), rank(2, 5)], [missing(1)]))
    there = report(communicator([rank(0, 5), rank(1, 4), rank(2, 5)]))
    _, told = watch(there, there, gone, there, gone, there, gone, there)
    confirmed = [event for _, event in told if event.event == "confirmed"]
    assert [event.lagging for event in confirmed] == [(1,)]
    assert names(told)[-1] == (60, "confirmed")


def test_a_rank_that_moved_while_it_did_not_answer_is_progress():
    there = report(communicator([rank(0, 5), rank(1, 4), rank(2, 5)]))
    gone = report(communicator([rank(0, 5), rank(2, 5)], [missing(1)]))
    back = report(communicator([rank(0, 5), rank(1, 5), rank(2, 5)]))
    window, told = watch(there, there, there, gone, back)
    assert names(told) == [(20, "suspected"), (40, "recovered")]
    assert window.stalled == {}


def test_a_rank_that_shows_up_for_the_first_time_may_have_moved_unseen_so_time_starts_anew():
    without = report(communicator([rank(0, 5), rank(1, 4)], [missing(2)]))
    there = report(communicator([rank(0, 5), rank(1, 4), rank(2, 5)]))
    _, told = watch(*[without] * 5, *[there] * 8)
    assert names(told) == [
        (20, "suspected"),
        (40, "still_suspected"),
        (50, "recovered"),
        (70, "suspected"),
        (90, "still_suspected"),
        (110, "confirmed"),
    ]


def test_a_communicator_that_vanishes_drops_out():
    window, told = watch(*[STUCK] * 4, report())
    assert names(told)[-1] == (40, "recovered")
    assert told[-1][1].reason == "the communicator is gone"
    assert window.communicators == {}


def test_a_communicator_of_another_size_is_another_one():
    _, told = watch(*[STUCK] * 5, *[report(world(5, 5, 4))] * 5)
    assert "confirmed" not in [event for _, event in names(told)]


def test_a_run_without_reports_is_blind_and_says_when_it_sees_again():
    window, told = watch(STUCK, None, None, None, None, STUCK)
    assert names(told)[0:1] == [(30, "blind")]
    assert told[0][1].stalled_s == 20.0
    assert (50, "recovered") in names(told)
    assert told[1][1].communicator == ""
    assert window.blind is None


def test_a_permanent_reason_makes_blind_at_once_and_is_told_once():
    window, events = advance(Window(attempt_id="one"), Blank(at(0), "switched off", permanent=True), POLICY)
    assert [event.event for event in events] == ["blind"]
    window, events = advance(window, Blank(at(10), "switched off", permanent=True), POLICY)
    assert events == ()
    assert window.blind is not None


def test_the_clock_stepping_back_confirms_nothing_early():
    window = Window(attempt_id="one")
    told = []
    for seconds in (1000, 1010, 0, 10, 20, 1060):
        window, events = advance(window, Sighting(at(seconds), parse_report(STUCK)), POLICY)
        told += [(seconds, event.event) for event in events]
    assert told[0] == (10, "suspected")  # still 20 s after the first sight, by a clock that went on
    assert [event for seconds, event in told if seconds < 1060] == ["suspected"]


def test_the_clock_stepping_back_does_not_hide_for_how_long_nobody_moved():
    window = Window(attempt_id="one")
    told = []
    for seconds in (1000, 1010, 1020, 0, 10, 20, 30, 40):
        window, events = advance(window, Sighting(at(seconds), parse_report(STUCK)), POLICY)
        told += [(seconds, event.event) for event in events]
    assert (40, "confirmed") in told  # 20 s before the step, which itself counts nothing, and 40 s after it


def test_the_recorded_hang_is_confirmed_in_the_groups_that_stand_still():
    polls = [path.read_bytes() for path in sorted((DATA / "series_hang_rank3_n8").glob("poll*.json"))]
    policy = HangPolicy(poll_interval_s=1, suspect_after_s=2, confirm_duration_s=5)
    _, told = watch(*polls, policy=policy, every_s=1.0)
    confirmed = [event for _, event in told if event.event == "confirmed"]
    assert {(event.size, event.lagging) for event in confirmed} == {(4, (1,)), (2, (1,))}


def test_the_recorded_symmetric_stall_and_the_killed_rank_are_not_confirmed():
    for series in ("series_symmetric_hang_n8", "series_kill_rank6_n8"):
        polls = [path.read_bytes() for path in sorted((DATA / series).glob("*.json"))]
        _, told = watch(*polls, witness=gone)
        assert [event.event for _, event in told if event.event == "confirmed"] == []


def test_what_is_remembered_goes_on_where_it_was():
    window, _ = watch(*[STUCK] * 4)
    again = recall(remember(window), "one")
    (kept,) = again.stalled.values()
    (freeze,) = window.stalled.values()
    assert freeze.testimony
    assert kept == replace(freeze, processes={}, testimony=replace(freeze.testimony, reason=""))
    assert isinstance(again.communicators[KEY], Suspected)
    assert recall(remember(window), "two") == Window(attempt_id="two")
    assert recall({"communicators": 3}, "one") == Window(attempt_id="one")
    after, events = advance(again, Sighting(at(60), parse_report(STUCK)), POLICY)
    assert [event.event for event in events] == ["confirmed"]
    assert incident_of("run", after) is not None


def test_communicators_that_stand_still_together_are_one_incident():
    both = report(world(3, 3, name="0x9"), world(5, 4), world(7, 7, 6, name="0xb"))
    window, _ = watch(*[both] * 8)
    incident = incident_of("run", window)
    assert incident is not None
    assert incident.members == (KEY, "0xb/0x1:0x2", "0x9/0x1:0x2")  # the last only waits for the others
    assert incident.folder == f"incident-20261201T030000Z-{incident.incident_id[:8]}"
    later, _ = advance(window, Sighting(at(90), parse_report(both)), POLICY)
    again = incident_of("run", later)
    assert again is not None
    assert again.incident_id == incident.incident_id


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"poll_interval_s": 0}, "poll_interval_s is 0"),
        ({"confirm_duration_s": -1}, "confirm_duration_s is -1"),
        ({"suspect_after_s": float("nan")}, "suspect_after_s is nan"),
        ({"poll_interval_s": 700}, "longer than confirm_duration_s"),
        ({"blind_after_polls": 0}, "blind_after_polls is 0"),
        ({"confirm_symmetric_s": 1, "poll_interval_s": 2}, "longer than confirm_symmetric_s"),
        ({"extend_factor": 0.5}, "extend_factor is 0.5"),
        ({"fast_confirm_s": -1}, "fast_confirm_s is -1"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(fields, text):
    with pytest.raises(SettingsError, match=text):
        HangPolicy(**fields)


@given(data=st.data())
@settings(deadline=None)
def test_the_order_of_ranks_and_communicators_does_not_matter(data):
    groups = [
        communicator(
            [
                rank(i, n)
                for i, n in enumerate(data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=5)))
            ],
            name=hex(16 + number),
        )
        for number in range(data.draw(st.integers(1, 4)))
    ]
    shuffled = [
        {**group, "ranks": data.draw(st.permutations(group["ranks"]))}
        for group in data.draw(st.permutations(groups))
    ]
    _, straight = watch(*[report(*groups)] * 8)
    _, mixed = watch(*[report(*shuffled)] * 8)
    assert [event for _, event in mixed] == [event for _, event in straight]


class WindowMachine(RuleBasedStateMachine):
    """A job of three communicators whose ranks launch, stop, go missing and come back.

    The model keeps the true counts and when each communicator last moved as far as a report can show: a rank
    that launches and then does not answer moved unseen.
    """

    @initialize()
    def start(self):
        self.seconds = 0.0
        self.window = Window(attempt_id="one")
        self.counts = {name: [0] * size for name, size in (("0xa", 2), ("0xb", 3), ("0xc", 4))}
        self.absent: dict[str, set[int]] = {name: set() for name in self.counts}
        self.moved = dict.fromkeys(self.counts, 0.0)
        self.launched = dict.fromkeys(self.counts, 0.0)
        self.shown: dict[str, dict[int, int]] = {name: {} for name in self.counts}
        self.events = []

    @rule(name=st.sampled_from(["0xa", "0xb", "0xc"]), who=st.integers(0, 3), steps=st.integers(1, 3))
    def launch(self, name, who, steps):
        ranks = self.counts[name]
        ranks[who % len(ranks)] += steps
        self.absent[name].discard(who % len(ranks))
        self.launched[name] = self.seconds

    @rule(name=st.sampled_from(["0xb", "0xc"]), who=st.integers(0, 3))
    def hide(self, name, who):
        self.absent[name] = {who % len(self.counts[name])}

    @rule(name=st.sampled_from(["0xb", "0xc"]))
    def show(self, name):
        self.absent[name] = set()

    @rule(gap_s=st.sampled_from([1.0, 10.0, 10.0, 10.0, 25.0]))
    def poll(self, gap_s):
        self.seconds += gap_s
        for name, counts in self.counts.items():
            visible = {i: n for i, n in enumerate(counts) if i not in self.absent[name]}
            if any(self.shown[name].get(i) != n for i, n in visible.items()):
                self.moved[name] = self.launched[name]
            self.shown[name].update(visible)
        groups = [
            communicator(
                [rank(i, n) for i, n in enumerate(counts) if i not in self.absent[name]],
                [missing(i) for i in self.absent[name]],
                name=name,
            )
            for name, counts in self.counts.items()
        ]
        seen = Sighting(at(self.seconds), parse_report(report(*groups)))
        before = set(self.window.confirmed)
        self.window, self.events = advance(self.window, seen, POLICY)
        for event in self.events:
            if not event.communicator:
                continue
            name = event.communicator.split("/", maxsplit=1)[0]
            still_s = self.seconds - self.moved[name]
            if event.event == "confirmed":
                assert event.communicator not in before
                assert still_s >= event.stalled_s >= POLICY.confirm_duration_s
                assert event.kind == "unresponsive" or len(set(self.counts[name])) > 1
            if event.event == "suspected":
                assert still_s >= event.stalled_s

    @rule()
    def fail(self):
        self.seconds += 10
        self.window, self.events = advance(self.window, Blank(at(self.seconds), "no answer"), POLICY)
        assert all(event.event == "blind" for event in self.events)

    @precondition(lambda self: self.window.questions)
    @rule(
        state=st.sampled_from(["running", "stopped", "gone", "unknown"]), moved=st.sampled_from(["", "CPU"])
    )
    def testify(self, state, moved):
        question = self.window.questions[0]
        looks = tuple(Look(rank=i, state=state, moved=moved, same_frames=True) for i in question.ranks)
        answer = Witness(observed_at=at(self.seconds), communicator=question.communicator, looks=looks)
        self.window, self.events = advance(self.window, answer, POLICY)
        if state == "gone":
            assert "confirmed" not in [event.event for event in self.events if event.kind == "unresponsive"]

    @precondition(lambda self: self.window.stalled)
    @rule()
    def forget_nothing(self):
        self.window = recall(remember(self.window), "one")

    @invariant()
    def a_confirmed_communicator_has_not_moved_since(self):
        for key, freeze in getattr(self, "window", Window(attempt_id="")).confirmed.items():
            counts = self.counts[key.split("/", maxsplit=1)[0]]
            shown = {i: dict(freeze.counts[i])["AllReduce"] for i in freeze.counts}
            moved_after_last_poll = any(shown[i] != counts[i] for i in shown)
            apart = len({counts[i] for i in shown}) > 1
            assert moved_after_last_poll or apart or freeze.kind == "unresponsive"


WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWindowMachine = WindowMachine.TestCase


@given(
    lag=st.integers(1, 3),
    healthy=st.integers(0, 20),
    every_s=st.sampled_from([5.0, 10.0, 15.0]),
    gaps=st.lists(st.booleans(), max_size=30),
)
@settings(deadline=None)
def test_an_injected_hang_is_confirmed_within_one_poll_of_the_confirm_time(lag, healthy, every_s, gaps):
    moving = [report(world(i, i, i)) for i in range(healthy)]
    stuck = report(world(healthy + lag, healthy + lag, healthy))
    policy = HangPolicy(poll_interval_s=every_s, suspect_after_s=20, confirm_duration_s=60)
    silent = [None if gap else stuck for gap in gaps]
    _, told = watch(*moving, stuck, *silent, *[stuck] * 30, policy=policy, every_s=every_s)
    (moment,) = [seconds for seconds, event in names(told) if event == "confirmed"]
    first = healthy * every_s
    polls = [first + i * every_s for i, poll in enumerate([stuck, *silent, *[stuck] * 30]) if poll]
    expected = next(p for p in polls if p >= first + 60)
    assert moment == expected
