"""Whole lives of jobs: no healthy one is called a hang, and every hang is found in time."""

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.hang.policy import HangPolicy
from tests.simulated_job import KINDS, SECONDARY, Disturbance, Fault, Segment, Shape, Shift, SimulatedJob

POLICY = HangPolicy()
EVERY_S, CONFIRM_S = POLICY.poll_interval_s, POLICY.confirm_duration_s
MOST_POLLS = 1000
QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---- jobs ------------------------------------------------------------------------------------------------

skews = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), max_size=8).map(tuple)
shapes = st.builds(
    Shape,
    tp=st.sampled_from([2, 3, 4]),
    dp=st.sampled_from([1, 2, 3]),
    step_s=st.sampled_from([1.0, 7.0, 20.0, 40.0]),
    skew_s=skews,
    pairs=st.booleans(),
    setup=st.booleans(),
    beside=st.booleans(),
)


def training(draw, shape: Shape) -> Segment:
    """Some steps, for as long as it takes to see twice that they go on."""
    least = int(3 * EVERY_S // shape.step_s) + 1
    return Segment("train", shape.step_s * draw(st.integers(least, 8 * least)))


@st.composite
def healthy_jobs(draw):
    shape = draw(shapes)
    # A stall is over when the last group of the step has gone on, and a report has shown it.
    longest_s = CONFIRM_S - EVERY_S - shape.step_s - max((0.0, *shape.skew_s)) - 1
    segments = [training(draw, shape)]
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(["pause", "wait", "stuck", "evaluate", "rebuild"]))
        most_s = {"evaluate": 2000.0, "rebuild": 60.0}.get(kind, longest_s)
        if kind == "wait":
            most_s += (POLICY.extend_factor - 1) * CONFIRM_S  # it is seen to work
        duration_s = draw(st.floats(5.0, most_s).map(int).map(float))
        segments += [
            Segment(kind, duration_s, who=draw(st.integers(0, shape.ranks - 1))),
            training(draw, shape),
        ]
    return SimulatedJob(shape, segments)


@st.composite
def disturbances(draw, *, ranks: int, polls: int = MOST_POLLS, first: int = 0) -> Mapping[int, Disturbance]:
    one = st.one_of(
        st.just(Disturbance(fails=True)),
        st.just(Disturbance(restarts=True)),
        st.builds(Disturbance, hides=st.integers(0, ranks - 1)),
        st.builds(Disturbance, back_s=st.sampled_from([1.0, 20.0, 3600.0])),
    )
    found: Mapping[int, Disturbance] = draw(st.dictionaries(st.integers(first, polls), one, max_size=12))
    return found


def run(
    job: SimulatedJob, until_s: float, disturbed: Mapping[int, Disturbance] | None = None, **kwargs
) -> Shift:
    shift = Shift(job, kwargs.pop("policy", POLICY))
    known = disturbed or {}
    shift.run(until_s, disturbed=lambda number: known.get(number, Disturbance()), **kwargs)
    return shift


@given(data=st.data())
@QUICK
def test_no_healthy_job_is_called_a_hang(data):
    job = data.draw(healthy_jobs())
    disturbed = data.draw(disturbances(ranks=job.shape.ranks))
    shift = run(job, min(job.duration_s, MOST_POLLS * EVERY_S), disturbed)
    assert shift.of("confirmed") == []


# ---- hangs -----------------------------------------------------------------------------------------------

SETTLED_S = 3.0  # the longest skew: from then on nothing of a fault moves


@st.composite
def hanging_jobs(draw, fault: Fault):
    shape = Shape(
        tp=draw(
            st.sampled_from([3, 4] if fault == "wrong" else [2, 3, 4])
        ),  # of two ranks either may be wrong
        dp=draw(st.sampled_from([1, 2, 3])),
        step_s=draw(st.sampled_from([1.0, 7.0, 20.0])),
        skew_s=draw(skews),
        pairs=draw(st.booleans()),
        beside=fault == "subgroup",
    )
    who = draw(st.integers(0, shape.ranks - 1))
    segments = [training(draw, shape)]
    if draw(st.booleans()):  # too short to make the next one wait longer
        kind = draw(st.sampled_from(["pause", "wait", "evaluate", "rebuild"]))
        segments += [
            Segment(kind, draw(st.sampled_from([30.0, 90.0, 350.0])), who=who),
            training(draw, shape),
        ]
    return SimulatedJob(shape, [*segments, Segment("fault", 1e9, who=who, fault=fault)])


def first_after(moments: list[float], seconds: float) -> float:
    return min(moment for moment in moments if moment >= seconds)


@pytest.mark.parametrize("fault", KINDS)
@given(data=st.data())
@settings(QUICK, max_examples=30)
def test_a_hang_is_found_in_time(fault, data):
    job = data.draw(hanging_jobs(fault))
    began_s = job.duration_s
    # A watcher that starts again has to see a freeze twice, and a symmetric one for the suspect time, before
    # it is remembered; until then, and in the first reports of a hang, nothing else goes wrong.
    calm = int((began_s + SETTLED_S + POLICY.suspect_after_s) // EVERY_S) + 3
    before = data.draw(disturbances(ranks=job.shape.ranks, polls=max(0, int(began_s // EVERY_S) - 3)))
    after = data.draw(disturbances(ranks=job.shape.ranks, first=calm, polls=calm + 30))
    disturbed = {**before, **after}
    shift = run(job, began_s + CONFIRM_S + 400, disturbed)

    key, kind, lagging = job.accused()
    found = [(seconds, event) for seconds, event in shift.of("confirmed") if event.communicator == key]
    assert [(event.kind, event.lagging) for _, event in found] == [(kind, lagging)]
    moment = found[0][0]
    # A clock that steps back takes the time since the last report with it: nobody knows what was the step.
    stepped_s = EVERY_S * sum(one.back_s > 0 or one.fails for one in after.values())
    stepped_s = stepped_s if any(one.back_s for one in after.values()) else 0.0
    first_s = first_after(shift.reported, began_s + (SETTLED_S if fault != "init" else 0.0))
    assert moment >= began_s + CONFIRM_S
    assert moment <= first_after(shift.reported, first_s + CONFIRM_S + stepped_s)
    assert all(seconds >= began_s + CONFIRM_S for seconds, _ in shift.of("confirmed"))


@pytest.mark.parametrize("fault", KINDS)
@given(data=st.data())
@settings(QUICK, max_examples=6)
def test_a_watcher_that_starts_again_confirms_the_same(fault, data):
    job = data.draw(hanging_jobs(fault))
    polls = int((job.duration_s + CONFIRM_S) // EVERY_S) + 4
    calm = range(int(job.duration_s // EVERY_S) - 1, int((job.duration_s + 100) // EVERY_S) + 2)
    again = data.draw(st.sets(st.integers(1, polls), max_size=20)).difference(calm)
    until_s = job.duration_s + CONFIRM_S + 60

    def confirmed(restarts):
        shift = run(job, until_s, {number: Disturbance(restarts=True) for number in restarts})
        # Witnesses of one moment answer in any order.
        return sorted(
            (seconds, event.communicator, event.kind, event.lagging, event.stalled_s)
            for seconds, event in shift.of("confirmed")
        )

    assert confirmed(again) == confirmed(())


@given(data=st.data())
@settings(QUICK, max_examples=10)
def test_a_hang_that_ends_is_told_and_the_next_one_is_found_later(data):
    shape = data.draw(
        st.builds(Shape, tp=st.sampled_from([2, 4]), dp=st.sampled_from([1, 2]), step_s=st.just(7.0))
    )
    who = data.draw(st.integers(0, shape.ranks - 1))
    stuck_s = data.draw(st.sampled_from([700.0, 900.0]))
    job = SimulatedJob(
        shape,
        [
            training(data.draw, shape),
            Segment("stuck", stuck_s, who=who),
            training(data.draw, shape),
            Segment("fault", 1e9, who=who, fault="skip"),
        ],
    )
    shift = run(job, job.duration_s + 2 * CONFIRM_S + 60)
    (group,) = [name for name, ranks in job.groups(0) if name.startswith("0xa") and who in ranks]
    key = f"{group}/{SECONDARY}"
    told = [(event.event, event) for _, event in shift.heard if event.communicator == key]
    names = [name for name, _ in told if name != "still_suspected"]
    assert names == ["suspected", "confirmed", "recovered", "suspected", "confirmed"]
    first, second = [event for name, event in told if name == "confirmed"]
    assert first.due_s == CONFIRM_S
    assert second.due_s > 1.5 * (stuck_s - EVERY_S) or second.due_s == 2 * CONFIRM_S
    assert second.due_s <= second.stalled_s <= second.due_s + EVERY_S


# ---- what was wrong once -----------------------------------------------------------------------------------


def played(shape: Shape, *segments: Segment, disturbed=None) -> Shift:
    job = SimulatedJob(shape, segments)
    until_s = job.duration_s + (CONFIRM_S + 60 if job.fault else 0)
    return run(job, until_s, disturbed)


TRAIN = Segment("train", 300)


def test_a_group_that_only_waits_for_a_rank_that_works_is_not_confirmed():
    # The neighbours of rank 0 wait for it, so they are behind in their data-parallel groups, and do not move.
    shift = played(Shape(tp=2, dp=2), TRAIN, Segment("wait", 800, who=0), TRAIN)
    assert shift.of("confirmed") == []


def test_a_short_stall_of_the_job_does_not_confirm_what_lies_idle():
    # A question about an idle communicator, every 600 s, that falls into a stall of 60 s.
    shift = played(Shape(tp=2, dp=1, setup=True), Segment("train", 520), Segment("stuck", 60), TRAIN)
    assert shift.of("confirmed") == []


def test_two_pauses_with_one_step_between_them_are_not_one():
    shift = played(
        Shape(tp=2, dp=1, setup=True),
        TRAIN,
        Segment("pause", 500),
        Segment("train", 10),
        Segment("pause", 500),
        TRAIN,
    )
    assert shift.of("confirmed") == []


def test_a_member_of_a_communicator_for_sends_that_is_late_once_is_no_movement_of_the_job():
    shift = played(
        Shape(tp=2, dp=1, pairs=True),
        Segment("train", 60),
        Segment("fault", 1e9, fault="wedge"),
        disturbed={12: Disturbance(hides=0)},
    )
    assert {seconds for seconds, _ in shift.of("confirmed")} == {660.0}


def test_a_report_with_timeouts_that_names_the_rank_in_its_init_does_not_begin_its_time_anew():
    shift = played(
        Shape(tp=2, dp=1),
        Segment("train", 60),
        Segment("fault", 1e9, fault="init"),
        disturbed={12: Disturbance(hides=0)},
    )
    assert {seconds for seconds, _ in shift.of("confirmed")} == {660.0}


def test_a_skewed_communicator_of_the_setup_does_not_take_the_place_of_a_symmetric_hang():
    shift = played(Shape(tp=2, dp=2, setup=True), TRAIN, Segment("fault", 1e9, fault="wedge"))
    assert "symmetric" in {event.kind for _, event in shift.of("confirmed")}
