"""The sentences that people read at night."""

import pytest

from tasks.hang.policy import HangPolicy
from tasks.hang.states import Blank
from tasks.hang.window import Window, advance
from tasks.reporting.wording import duration, state_markdown, summary, tell
from tests.reports import at, communicator, missing, rank, report, world
from tests.unit.test_window import watch

STUCK = report(world(5, 5, 4, 5), world(3, 3, name="0xb"))


def lines(polls, action):
    _, told = watch(*[STUCK] * polls)
    last = max(seconds for seconds, _ in told)
    return tell([event for seconds, event in told if seconds == last], "demo", lambda _: action)


def test_a_suspicion_names_the_communicator_its_time_and_what_happens_when():
    ((level, text),) = lines(3, "fail")
    assert level == "WARNING"
    for needed in (
        "demo: suspected hang",
        "0xa/0x1:0x2",
        "20 s",
        "ranks 2 behind",
        "confirmed in 40 s",
        "failed",
    ):
        assert needed in text
    ((_, text),) = lines(3, "observe")
    assert "failed" not in text


def test_a_reminder_and_a_confirmation_are_warnings_too():
    assert [(level, text.split(":")[1]) for level, text in lines(5, "fail")] == [
        ("WARNING", " still a suspected hang")
    ]
    ((level, text),) = lines(7, "fail")
    assert (level, "hang confirmed" in text, "going to be failed" in text) == ("WARNING", True, True)
    ((_, text),) = lines(7, "observe")
    assert "nothing is done" in text


def test_a_rank_that_does_not_answer_never_reads_as_progress():
    alone = report(communicator([rank(0, 5), rank(1, 5)], [missing(2)]))
    window, _ = watch(*[alone] * 2)
    assert summary(window) == "1 communicator: 1 standing still. 1 ranks do not answer."
    window, _ = watch(*[alone] * 8)
    assert summary(window) == "1 communicator: 1 hung. 1 ranks do not answer."
    moving, _ = watch(*[report(world(i, i)) for i in range(8)])
    assert summary(moving) == "1 communicator: 1 progressing."


def test_blindness_says_why():
    window, told = Window(attempt_id="one"), ()
    for i in range(3):
        window, told = advance(window, Blank(at(10 * i), "Nothing listens at h:1."), HangPolicy())
    ((level, text),) = tell(told, "demo", lambda _: "observe")
    assert level == "WARNING"
    assert "Nothing listens at h:1." in text
    assert "Nothing listens" in summary(window)


def test_the_state_shows_each_communicator_the_worst_first():
    window, _ = watch(*[STUCK] * 8)
    text = state_markdown("demo", window, "now")
    assert summary(window) == "2 communicators: 1 hung, 1 standing still."
    assert text.index("0xa/0x1:0x2 | hung | mismatch") < text.index(
        "0xb/0x1:0x2 | standing still | symmetric"
    )
    many, _ = watch(report(*[world(1, 1, name=hex(16 + i)) for i in range(300)]))
    assert "And 100 more" in state_markdown("demo", many, "now")
    assert summary(Window(attempt_id="one")) == "No communicator seen yet."


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (600, "10 min"), (7500, "2 h 5 min")]
)
def test_durations_are_written_as_people_say_them(seconds, text):
    assert duration(seconds) == text
