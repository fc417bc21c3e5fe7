"""The detector over stored reports: what it tells, in which order, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from deployments.replay import Times, replay
from tasks.hang.errors import SettingsError
from tests.reports import communicator as group
from tests.reports import missing, rank, report, world

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "ras" / "v2.30.7"
HANG = DATA / "series_hang_rank3_n8"
KEYS = [
    "at", "event", "communicator", "kind", "lagging", "leading", "missing", "size", "stalled_s", "reason",
]  # fmt: skip
STUCK, FREE = world(5, 5, 4, 5), world(9, 9, 9, 9)


def write(folder, *polls, name="poll{:02}.json", every_s=10):
    """Files of a history; a poll is bytes, or communicators, or None for a file that is no report."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, poll in enumerate(polls):
        raw = poll if isinstance(poll, bytes) else b"" if poll is None else stamped(i * every_s, *poll)
        (folder / name.format(i)).write_bytes(raw)
    return folder


def stamped(seconds, *communicators):
    minutes, rest = divmod(seconds, 60)
    return report(*communicators, timestamp=f"2026-12-01 03:{minutes:02}:{rest:02}")


@pytest.fixture
def told(capsys):
    """Replay a folder; returns (exit code, events as --json prints them)."""

    def run(folder, *, poll_interval=None, confirm=60.0, **more):
        times = Times(poll_interval_s=poll_interval, confirm_s=confirm, **more)
        code = replay(folder, times, as_json=True)
        lines = capsys.readouterr().out.splitlines()
        events = [json.loads(line) for line in lines]
        for line in lines:
            assert list(json.loads(line)) == KEYS
        return code, events

    return run


@pytest.fixture
def shown(capsys, monkeypatch):
    """Replay a folder; returns (exit code, what a person sees at 80 columns)."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(folder, *, poll_interval=None, confirm=60.0, **more):
        times = Times(poll_interval_s=poll_interval, confirm_s=confirm, **more)
        code = replay(folder, times, as_json=False)
        return code, capsys.readouterr().out

    return run


def names(events):
    return [event["event"] for event in events]


def moments(events):
    return [(event["at"].removeprefix("2026-12-01T03:"), event["event"]) for event in events]


# ---- what is told ---------------------------------------------------------------------------------------


def test_the_recorded_hang_is_confirmed_in_the_groups_that_stand_still(told):
    code, events = told(HANG, poll_interval=1, confirm=5)
    confirmed = [event for event in events if event["event"] == "confirmed"]
    assert code == 3
    assert {(event["size"], *event["lagging"], event["kind"]) for event in confirmed} == {
        (4, 1, "mismatch"), (2, 1, "mismatch"),
    }  # fmt: skip
    assert {event["at"] for event in confirmed} == {"2026-12-01T04:14:41Z"}
    assert {event["stalled_s"] for event in confirmed} == {5.0}
    assert all("/" in event["communicator"] for event in confirmed)


def test_the_times_of_the_reports_are_the_times_of_the_replay(told):
    assert told(HANG, confirm=5) == told(HANG, poll_interval=1, confirm=5)


def test_a_longer_confirm_time_confirms_nothing(told):
    code, events = told(HANG, poll_interval=1, confirm=9)
    assert (code, names(events).count("confirmed")) == (0, 0)
    code, _ = told(HANG, poll_interval=1, confirm=8)
    assert code == 3


def test_the_recorded_symmetric_stall_stays_suspected_for_nobody_can_look(told):
    code, events = told(DATA / "series_symmetric_hang_n8", poll_interval=10, confirm=20)
    assert code == 0
    assert {event["kind"] for event in events} == {"symmetric"}
    assert set(names(events)) <= {"suspected", "still_suspected"}
    assert events


def test_the_recorded_kill_is_never_called_a_mismatch(told):
    code, events = told(DATA / "series_kill_rank6_n8", confirm=1200)
    assert code == 0
    assert "confirmed" not in names(events)
    assert {(event["kind"], *event["missing"]) for event in events} == {("unresponsive", 6)}


def test_a_rank_that_goes_on_ends_it(told, tmp_path):
    write(tmp_path, *[[STUCK]] * 8, [FREE], [world(10, 10, 10, 10)])
    code, events = told(tmp_path)
    assert code == 3
    assert moments(events) == [
        ("01:00Z", "suspected"), ("01:00Z", "confirmed"), ("01:20Z", "recovered"),
    ]  # fmt: skip


def test_missing_ranks_are_told_by_their_number_in_the_communicator(told, tmp_path):
    stuck = group([rank(0, 5), rank(1, 5)], [missing(2)])
    write(tmp_path, [world(5, 5, 5)], *[[stuck]] * 8)
    _, events = told(tmp_path)
    (first,) = [event for event in events if event["event"] == "suspected"]
    assert (first["kind"], first["missing"], first["size"]) == ("unresponsive", [2], 3)


# ---- files that are no report ---------------------------------------------------------------------------


def test_a_broken_file_is_one_blind_event_and_the_rest_goes_on(told, tmp_path):
    whole = stamped(30, STUCK)
    write(tmp_path, *[[STUCK]] * 3, whole[: len(whole) // 2], *[[STUCK]] * 4)
    code, events = told(tmp_path)
    assert code == 3
    assert moments(events) == [
        ("00:20Z", "blind"), ("00:40Z", "recovered"), ("01:00Z", "suspected"), ("01:00Z", "confirmed"),
    ]  # fmt: skip
    assert events[0]["reason"].startswith("poll03.json: ")
    assert (events[0]["communicator"], events[0]["kind"]) == ("", None)
    assert events[1]["communicator"] == ""


def test_each_broken_file_is_a_blind_event_of_its_own(told, tmp_path):
    write(tmp_path, None, [STUCK], b"[]", b"\xff\xfe", b'{"communicators": 3}', [STUCK])
    code, events = told(tmp_path)
    assert code == 0
    blind = [event for event in events if event["event"] == "blind"]
    assert [event["reason"].split(":")[0] for event in blind] == [
        "poll00.json", "poll02.json", "poll03.json", "poll04.json",
    ]  # fmt: skip
    assert [event["at"][-6:] for event in blind] == ["00:10Z", "00:10Z", "00:10Z", "00:10Z"]
    assert names(events).count("recovered") == 2


def test_with_an_interval_a_broken_file_takes_a_place_in_time(told, tmp_path):
    write(tmp_path, None, [STUCK], None, [STUCK])
    _, events = told(tmp_path, poll_interval=15)
    assert moments(events) == [
        ("00:10Z", "blind"), ("00:25Z", "recovered"), ("00:40Z", "blind"), ("00:55Z", "recovered"),
    ]  # fmt: skip
    assert [event["stalled_s"] for event in events] == [0.0, 15.0, 0.0, 15.0]


def test_a_record_that_is_broken_inside_makes_its_file_a_blind_one(told, tmp_path):
    broken = group([{"rank": "first"}, rank(1, 4)])
    write(tmp_path, [STUCK], [broken], [broken], [STUCK])
    code, events = told(tmp_path)
    assert code == 0
    blind = [event["reason"].split(":")[0] for event in events if event["event"] == "blind"]
    assert "poll02.json" in blind
    assert names(events)[-1] == "recovered"


def test_a_file_that_may_not_be_read_and_a_dead_link_are_gaps_and_a_folder_is_none(told, tmp_path):
    write(tmp_path, *[[STUCK]] * 3)
    (tmp_path / "poll03.json").symlink_to(tmp_path / "nowhere.json")
    (tmp_path / "poll04.json").mkdir()
    os.mkfifo(tmp_path / "poll05.json")
    _, events = told(tmp_path)
    (blind,) = events
    assert blind["reason"].startswith("poll03.json: The file cannot be read: No such file")


def test_deep_nesting_is_no_report_and_no_crash(told, tmp_path):
    deep = b'{"communicators": ' + b"[" * 100_000
    write(tmp_path, [STUCK], deep, b"{" * 100_000, b'{"a":' * 100_000, [STUCK])
    _, events = told(tmp_path)
    assert names(events).count("blind") == 3


def test_names_are_told_without_what_a_terminal_would_act_on(told, shown, tmp_path):
    write(tmp_path, [STUCK], [STUCK])
    os.close(os.open(os.fsencode(tmp_path) + b"/poll\xff\x1b[31m.json", os.O_CREAT))
    _, events = told(tmp_path)
    assert events[0]["reason"].startswith("poll\ufffd\ufffd[31m.json: ")
    assert "\x1b" not in shown(tmp_path)[1]


# ---- order and time -------------------------------------------------------------------------------------


def test_files_come_in_the_order_that_people_see_in_their_names(told, tmp_path):
    # By plain text -2 would come before the file without a number, and 10 before 9.
    order = [
        "ncclras_20261201T030000Z.json", "ncclras_20261201T030000Z-2.json",
        "ncclras_20261201T030000Z-10.json", "ncclras_20261201T030001Z.json", "ncclras_20261201T030100Z.json",
    ]  # fmt: skip
    for name in order:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "z.json").write_bytes(stamped(0, STUCK))
    _, events = told(tmp_path)
    assert [e["reason"].split(":")[0] for e in events if e["event"] == "blind"] == order


def test_numbers_without_zeros_in_front_are_counted(told, tmp_path):
    write(tmp_path, *[[world(i, i, i - 1)] for i in range(1, 12)], *[[STUCK]] * 7, name="poll{}.json")
    _, events = told(tmp_path)
    assert moments(events) == [("02:50Z", "suspected"), ("02:50Z", "confirmed")]


def test_a_folder_that_ray_wrote_is_replayed(told, tmp_path):
    for path in HANG.glob("poll*.json"):
        stamp = json.loads(path.read_bytes())["timestamp"]
        (tmp_path / f"ncclras_{re.sub('[^0-9A-Za-z._-]', '-', stamp)}.json").write_bytes(path.read_bytes())
    (tmp_path / "ncclras_report.txt").write_text("NCCL version 2.30.7\n")
    assert told(tmp_path, confirm=5) == told(HANG, confirm=5)


@pytest.mark.parametrize("top", ["manifest.json", "verdict.json"])
def test_the_folder_of_an_incident_is_replayed(told, tmp_path, top):
    shutil.copytree(HANG, tmp_path / "nccl_ras")
    (tmp_path / top).write_text("{}")
    (tmp_path / "stack_traces").mkdir()
    assert told(tmp_path, confirm=5) == told(HANG, confirm=5)


def test_reports_in_the_folder_itself_go_before_those_below(told, tmp_path):
    write(tmp_path, *[[FREE]] * 2)
    shutil.copytree(HANG, tmp_path / "nccl_ras")
    assert told(tmp_path) == (0, [])


def test_reports_of_the_same_second_are_at_the_same_time(told, tmp_path):
    write(tmp_path, *[[STUCK]] * 9, every_s=0)
    assert told(tmp_path) == (0, [])
    code, events = told(tmp_path, poll_interval=10)
    assert (code, names(events)) == (3, ["suspected", "confirmed"])


def test_a_clock_that_steps_back_confirms_nothing_early(told, shown, tmp_path):
    stamps = [1000, 1010, 0, 10, 20]
    write(tmp_path, *[stamped(seconds, STUCK) for seconds in stamps])
    assert told(tmp_path) == (0, [])
    _, text = shown(tmp_path)
    assert "in 5 reports of 0:00:40" in text
    assert "goes back once, at poll02.json" in " ".join(text.split())


def test_a_clock_that_is_set_back_an_hour_hides_no_hang(told, tmp_path):
    hour = 3600
    moments = [*range(hour - 200, hour, 10), *range(0, 200, 10)]
    write(tmp_path, *[stamped(seconds, STUCK) for seconds in moments])
    code, events = told(tmp_path, confirm=300)
    assert (code, events[-1]["event"], events[-1]["stalled_s"]) == (3, "confirmed", 300)
    assert events[-1]["at"] == "2026-12-01T03:01:40Z"  # as the report says it


def test_times_of_other_kinds_can_be_tried(told, shown, tmp_path):
    stopped = group([rank(0, 5), rank(1, 5)], [missing(2)])
    write(tmp_path, *[[stopped]] * 9)
    assert told(tmp_path, confirm=200)[0] == 0
    code, events = told(tmp_path, confirm=200, confirm_unresponsive_s=50, suspect_after_s=30)
    assert code == 3
    assert [(event["event"], event["stalled_s"]) for event in events] == [
        ("suspected", 30),
        ("confirmed", 50),
    ]
    with pytest.raises(SettingsError, match=r"longer than --confirm-init \(5 s\).*Set --confirm-init"):
        told(tmp_path, confirm_init_s=5)
    with pytest.raises(SettingsError, match="--suspect-after is nan"):
        told(tmp_path, suspect_after_s=float("nan"))


def test_a_rank_that_is_missing_at_the_end_is_not_said_to_be_behind(shown, tmp_path):
    gone = group([rank(0, 900), rank(1, 900)], [missing(2)])
    write(tmp_path, [world(5, 5, 5)], [world(9, 9, 9)], *[[gone]] * 9)
    _, text = shown(tmp_path, confirm=60)
    assert "9  last seen at 0:00:10\n" in text
    assert "behind" not in text


def test_a_narrow_terminal_breaks_no_word_of_the_table(shown, monkeypatch):
    _, wide = shown(HANG, poll_interval=1, confirm=5)
    monkeypatch.setenv("COLUMNS", "50")
    _, narrow = shown(HANG, poll_interval=1, confirm=5)
    rows = [line for line in wide.splitlines() if re.match(r" ?0:00:\d\d +\d\d:", line)]
    assert len(rows) > 3
    assert set(rows) <= set(narrow.splitlines())


def test_reports_without_a_time_need_an_interval(told, tmp_path):
    write(tmp_path, *[report(STUCK, timestamp=text) for text in ("", "yesterday", "9999-12-31 23:59:59")])
    with pytest.raises(SettingsError, match=r"has a time.*Set --poll-interval"):
        told(tmp_path)
    code, events = told(tmp_path, poll_interval=30)
    assert code == 3
    assert events[-1]["at"] == "1970-01-01T00:01:00Z"


def test_a_report_without_a_time_has_that_of_the_one_before(told, tmp_path):
    write(tmp_path, [STUCK], report(STUCK, timestamp=""), *[[STUCK]] * 6)
    assert moments(told(tmp_path)[1])[-1] == ("01:00Z", "confirmed")


# ---- what a person sees ---------------------------------------------------------------------------------


def test_the_table_the_plot_and_the_closing_words(shown):
    code, text = shown(HANG, poll_interval=1, confirm=5)
    assert code == 3
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(re.match(r" ?0:00:12 +04:14:41 +confirmed +1 +mismatch +1 +5 s", line) for line in lines)
    assert "no. 1: 0x5c097672011d4161/0x225a4c2bf8927cf:0xbc52c6fabd577ab3, 4 ranks" in lines
    assert "rank 0  ▁▂▃▄▅▆▇█────────  237  stopped at 0:00:07" in lines
    assert "rank 1  ▁▂▃▄▅▆▇─────────  236  stopped at 0:00:06, 1 behind" in lines
    assert lines[-1] == "2 hangs confirmed (no. 1, no. 2), first after 0:00:12, in 16 reports of 0:00:15."


def test_without_events_the_largest_communicator_is_drawn(shown, tmp_path):
    polls = [[world(i, i), world(i, i, i, i, name="0xb"), world(i, i, i, name="0xc")] for i in range(9)]
    code, text = shown(write(tmp_path, *polls))
    assert code == 0
    assert text.startswith("The largest communicator: 0xb/0x1:0x2, 4 ranks\n")
    assert text.count("rank ") == 4
    assert text.endswith("Nothing was confirmed in 9 reports of 0:01:20, confirm time 60 s.\n")


def test_a_history_of_many_communicators_draws_three_and_names_the_others(shown, tmp_path):
    stuck = [world(5, 4, name=hex(16 + i)) for i in range(30)]
    code, text = shown(write(tmp_path, *[stuck] * 8))
    assert code == 3
    assert text.count("launches from") == 3
    assert "no. 23: 0x26/0x1:0x2, 2 ranks" in text
    assert "and 7 more communicators" in text
    assert "30 hangs confirmed (no. 1, no. 2, no. 3, no. 4, no. 5 and 25 more)" in text


def test_a_long_list_of_events_is_cut_and_says_so(shown, told, tmp_path):
    stuck = [world(5, 4, name=hex(16 + i)) for i in range(150)]
    write(tmp_path, *[stuck] * 8)
    assert len(told(tmp_path)[1]) == 300
    assert "100 more events are not shown; --json prints each" in shown(tmp_path)[1]


def test_what_could_not_be_read_is_counted(shown, tmp_path):
    write(tmp_path, [FREE], None, [FREE], None)
    code, text = shown(tmp_path)
    assert code == 0
    assert "in 2 reports of 0:00:20" in text
    lines = text.splitlines()
    assert any(
        line.startswith("0:00:00 blind: poll01.json: The answer is not a RAS report") for line in lines
    )
    assert max(map(len, lines)) <= 80
    assert " ".join(text.split()).endswith("2 files could not be read as a report.")


def test_a_folder_of_reports_without_any_communicator_is_no_error(shown, tmp_path):
    code, text = shown(write(tmp_path, *[[]] * 8))
    assert code == 0
    assert text == (
        "Reports of 2026-12-01 03:00:00 to 03:01:10.\n"
        "Nothing was confirmed in 8 reports of 0:01:10, confirm time 60 s.\n"
    )


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"confirm": 0.0}, "--confirm is 0"),
        ({"confirm": -5.0}, "--confirm is -5"),
        ({"confirm": float("nan")}, "--confirm is nan"),
        ({"confirm": float("inf")}, "--confirm is inf"),
        ({"poll_interval": 0.0}, "--poll-interval is 0"),
        ({"poll_interval": float("nan")}, "--poll-interval is nan"),
        ({"poll_interval": 1e9, "confirm": 1e10}, "--poll-interval is 1e"),
        ({"poll_interval": 700.0}, r"--poll-interval \(700 s\) is longer than --confirm \(60 s\)"),
        ({"confirm": 0.5}, r"reports are 1 s apart.*Set --confirm to at least 1"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(told, options, named):
    with pytest.raises(SettingsError, match=named):
        told(HANG, **options)


def test_a_folder_without_reports_is_refused_and_says_what_was_found(told, tmp_path):
    with pytest.raises(SettingsError, match="There is no RAS report in"):
        told(tmp_path)
    write(tmp_path, None, b"{}")
    with pytest.raises(SettingsError, match=r"are none: 2; poll00\.json: The answer is not a RAS report"):
        told(tmp_path)
    with pytest.raises(SettingsError, match="No such file or directory"):
        told(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="Not a directory"):
        told(tmp_path / "poll00.json")


def test_a_folder_of_incidents_names_them(told, tmp_path):
    write(tmp_path / "incident-20261201T030000Z-abcd1234" / "nccl_ras", [STUCK])
    with pytest.raises(
        SettingsError, match=r"Give one of its folders .* incident-20261201T030000Z-abcd1234\."
    ):
        told(tmp_path)


# ---- the command ----------------------------------------------------------------------------------------


def command(*arguments, home, **options):
    """Start the real command with a home of its own and no Prefect server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    start = "from deployments.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", start, "replay", *map(str, arguments)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_the_command_prints_json_and_starts_no_server(tmp_path):
    with command(HANG, "--poll-interval", 1, "--confirm", 5, "--json", home=tmp_path / "home") as ran:
        out, err = ran.communicate(timeout=120)
    assert (ran.returncode, err) == (3, "")
    assert [list(json.loads(line)) for line in out.splitlines()] == [KEYS] * len(out.splitlines())
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_the_command_ends_quietly_when_nobody_reads(tmp_path, more):
    with command(HANG, "--confirm", 5, *more, home=tmp_path / "home") as ran:
        ran.stdout.close()
        assert ran.wait(timeout=120) == 1
        assert ran.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nowhere",), "nowhere cannot be replayed: No such file or directory. Set FOLDER"),
        ((str(HANG), "--confirm", "soon"), "soon"),
    ],
)
def test_the_command_refuses_in_a_sentence(tmp_path, arguments, named):
    with command(*arguments, home=tmp_path / "home") as ran:
        out, err = ran.communicate(timeout=120)
    assert (ran.returncode, out) == (2, "")
    assert named in err
    assert "Traceback" not in err


def test_what_is_no_report_is_refused_without_taking_many_times_its_size(told, tmp_path):
    write(tmp_path, [STUCK])
    (tmp_path / "zeros.json").write_bytes(b'{"communicators": [' + b"0," * 2_000_000 + b"0]}")
    (tmp_path / "many.json").write_bytes(b'{"communicators": [' + b'{"hash": "0x1"},' * 400_000 + b"{}]}")
    tracemalloc.start()
    try:
        _, events = told(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [event["event"] for event in events if event["event"] != "recovered"] == ["blind", "blind"]
    assert peak < 4 * (tmp_path / "many.json").stat().st_size
