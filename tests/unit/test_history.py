"""What a history looks like at a terminal, as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.hang.states import Event
from tasks.reporting.history import (
    Line,
    Told,
    closing,
    few,
    lines_of,
    numbered,
    plot,
    reasons,
    totals_of,
    worst,
)
from tests.reports import at


def counts(*launched):
    return {rank: (("AllGather", 0), ("AllReduce", n)) for rank, n in enumerate(launched)}


def drawn(lines, *polls, every_s=1.0, width=80):
    times = [i * every_s for i in range(len(polls))]
    return plot(lines, times, [totals_of(lines, poll) for poll in polls], width=width)


def event(name, communicator="0xa/0x1:0x2", **fields):
    return Event(at=at(0), event=name, communicator=communicator, **fields)


def test_a_hang_shows_where_each_rank_stopped_and_who_is_behind():
    polls = [counts(0, 0), counts(7, 7), counts(14, 13), counts(14, 13), counts(14, 13)]
    assert drawn(lines_of([0, 1]), *polls) == [
        "launches from ▁ 0 to █ 14; ─ launches no more, · no count in that report",
        "rank 0  ▁▄█──  14  stopped at 0:00:02",
        "rank 1  ▁▄▇──  13  stopped at 0:00:02, 1 behind",
        "        0:00:00 to 0:00:04",
    ]


def test_a_healthy_communicator_has_no_flat_end_and_nobody_behind():
    text = drawn(lines_of([0, 1]), *[counts(7 * i, 7 * i) for i in range(12)])
    assert text[1:] == [
        "rank 0  ▁▁▂▂▃▄▄▅▆▆▇█  77",
        "rank 1  ▁▁▂▂▃▄▄▅▆▆▇█  77",
        "        0:00:00 to 0:00:11",
    ]


def test_a_pause_that_ended_is_no_stop():
    (line,) = drawn(lines_of([0]), counts(0), counts(5), counts(5), counts(5), counts(7))[1:2]
    assert line == "rank 0  ▁▆▆▆█  7"


def test_a_report_that_could_not_be_read_is_a_gap_and_no_stop():
    text = drawn(lines_of([0]), counts(0), counts(7), {}, counts(14))
    assert text[1] == "rank 0  ▁▄·█  14"


def test_a_rank_that_stops_answering_says_when_it_was_last_seen():
    text = drawn(lines_of([0, 1]), counts(1, 1), counts(2, 2), {0: counts(2)[0]}, {0: counts(2)[0]})
    assert text[1:3] == ["rank 0  ▁█──  2  stopped at 0:00:01", "rank 1  ▁█··  2  last seen at 0:00:01"]


def test_a_rank_that_never_launched_and_one_that_was_never_seen_say_so():
    text = drawn(lines_of([0, 1]), *[{0: counts(0)[0]}] * 3)
    assert text[1:3] == ["rank 0  ▁──  0  never moved", "rank 1  ···  -  never seen"]


def test_many_ranks_become_those_behind_and_those_ahead():
    polls = [dict(enumerate(counts(*[n] * 63).values())) for n in (0, 50, 100, 100)]
    for poll in polls:
        poll[63] = counts(min(40, poll[0][1][1]))[0]
    assert drawn(lines_of(range(64), lagging=[63]), *polls)[1:] == [
        "behind  ▁▃──   40  stopped at 0:00:01, 60 behind",
        "ahead   ▁▄█─  100  stopped at 0:00:02",
        "        0:00:00 to 0:00:03",
        "behind: rank 63",
        "ahead: ranks 0-62 (63 ranks, the most launches of any)",
    ]


def test_many_ranks_of_which_nobody_is_behind_are_the_slowest_and_the_fastest():
    text = drawn(lines_of(range(9)), counts(*range(9)), counts(*range(10, 19)))
    assert text[1:3] == ["slowest  ▁▄  10  8 behind", "fastest  ▄█  18"]


def test_silent_ranks_are_a_line_of_their_own():
    lines = lines_of(range(12), lagging=[3], missing=[3, 4])
    assert [(line.label, len(line.ranks)) for line in lines] == [("behind", 1), ("silent", 1), ("ahead", 10)]
    assert [line.label for line in lines_of(range(12), missing=[4])] == ["silent", "others"]
    assert [line.label for line in lines_of(range(9), lagging=range(9))] == ["behind"]


def test_more_polls_than_columns_share_them_and_the_stop_stays_visible():
    polls = [counts(min(i, 500)) for i in range(1000)]
    scale, line, axis = drawn(lines_of([0]), *polls, every_s=15.0)
    assert len(line) <= 80
    curve = line.removeprefix("rank 0  ").split("  ")[0]
    assert abs(curve.index("─") / len(curve) - 0.5) < 0.05
    assert set(curve[curve.index("─") :]) == {"─"}
    assert line.endswith("500  stopped at 2:05:00")
    assert axis.split() == ["0:00:00", "4:09:45"]
    assert axis.endswith("4:09:45")
    assert len(axis) == len("rank 0  ") + len(curve)
    assert "█ 500" in scale


def test_without_any_count_there_is_nothing_to_draw():
    assert drawn(lines_of([0]), {}, {}) == ["no launch counts in these reports"]


def test_a_long_list_of_ranks_is_cut_to_the_line():
    lagging = range(0, 400, 2)
    text = drawn(lines_of(range(400), lagging=lagging), dict.fromkeys(range(400), counts(1)[0]))
    assert text[-2].startswith("behind: ranks 0, 2, 4, ")
    assert text[-2].endswith("... (200 ranks, the least launches of any)")
    assert max(map(len, text)) <= 80


@given(st.data())
def test_every_plot_fits_its_width_and_draws_one_character_a_poll_or_fewer(data):
    ranks = data.draw(st.sampled_from([1, 2, 8, 9, 12]))
    number = data.draw(st.integers(1, 15)) * data.draw(st.sampled_from([1, 10]))
    width = data.draw(st.integers(72, 120))
    most = data.draw(st.sampled_from([1, 1000, 2**64]))
    chance = data.draw(st.randoms(use_true_random=False))
    polls = [
        {rank: counts(chance.randint(0, most))[0] for rank in range(ranks) if chance.random() < 0.8}
        for _ in range(number)
    ]
    lagging = data.draw(st.sets(st.integers(0, ranks - 1)))
    lines = lines_of(range(ranks), lagging=lagging)
    assert frozenset().union(*(line.ranks for line in lines)) == frozenset(range(ranks))
    text = drawn(lines, *polls, width=width)
    for line, row in zip(lines, text[1:], strict=False):
        assert row.startswith(line.label)
        longest_note = len("last seen at 0:03:20, ") + 20 + len(" behind")
        assert len(row) <= max(width, 7 + 8 + 20 + 6 + longest_note)


def test_a_line_counts_the_ranks_that_it_stands_for():
    least, most = (Line(label="x", ranks=frozenset({0, 1, 5}), drawn=d) for d in ("least", "most"))
    assert totals_of([least, most], counts(3, 2, 0)) == (2, 3)
    assert totals_of([least, most], {}) == (None, None)
    assert totals_of([least], {0: (("AllReduce", 2), ("Broadcast", 5))}) == (7,)


def test_communicators_are_numbered_as_they_are_told_and_the_worst_come_first():
    told = [
        Told(0, event("blind", "")),
        Told(1, event("suspected", "0xa")),
        Told(2, event("suspected", "0xb", size=2)),
        Told(3, event("confirmed", "0xb", size=4)),
        Told(4, event("recovered", "0xb", size=8)),
        Told(5, event("idle", "0xc")),
    ]
    assert numbered(told) == {"0xa": 1, "0xb": 2, "0xc": 3}
    assert [(e.communicator, e.event) for e in worst(told)] == [
        ("0xb", "confirmed"), ("0xa", "suspected"), ("0xc", "idle"),
    ]  # fmt: skip


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3, 1, 2), "1-3"), (range(0, 50, 2), "25 ranks")])
def test_ranks_in_a_narrow_column(numbers, text):
    assert few(numbers) == text


def test_each_reason_is_said_once_with_the_events_that_gave_it():
    told = [
        Told(5, event("suspected", reason="why")),
        Told(5, event("blind", "", reason="no file")),
        Told(65, event("confirmed", reason="why")),
        Told(70, event("recovered")),
        *[Told(70 + n, event("idle", hex(n), reason="elsewhere")) for n in range(8)],
    ]
    assert reasons(told, numbered(told)) == [
        "0:00:05 suspected no. 1, 0:01:05 confirmed no. 1: why",
        "0:00:05 blind: no file",
        (
            "0:01:10 idle no. 2, 0:01:11 idle no. 3, 0:01:12 idle no. 4, 0:01:13 idle no. 5, "
            "0:01:14 idle no. 6 and 3 more: elsewhere"
        ),
    ]


def ending(*told, span_s=1200.0, reports=80, unreadable=0):
    numbers = numbered(told)
    sizes = {"reports": reports, "unreadable": unreadable, "span_s": span_s, "confirm_s": 600.0}
    return closing(told, numbers, **sizes)


def test_the_closing_words_name_what_was_confirmed():
    assert ending(Told(615, event("confirmed")), Told(700, event("confirmed", "0xb"))) == (
        "2 hangs confirmed (no. 1, no. 2), first after 0:10:15, in 80 reports of 0:20:00."
    )
    many = [Told(615, event("confirmed", hex(n))) for n in range(7)]
    assert "no. 5 and 2 more)" in ending(*many)


def test_the_closing_words_tell_nothing_happened_from_nothing_could():
    assert ending() == "Nothing was confirmed in 80 reports of 0:20:00, confirm time 600 s."
    assert ending(span_s=15.0, reports=1) == (
        "Nothing was confirmed in 1 report of 0:00:15: "
        "they span less than the confirm time of 600 s, so nothing could be; set a shorter --confirm."
    )


def test_the_closing_words_tell_what_stays_open_and_what_was_not_seen():
    told = (
        Told(60, event("suspected")),
        Told(60, event("suspected", "0xb")),
        Told(75, event("recovered", "0xb")),
        Told(180, event("still_suspected")),
    )
    assert ending(*told, unreadable=2).endswith(
        "Still suspected at the end: no. 1. 2 files could not be read as a report."
    )
