"""The detector, run again over reports that were stored: to tune its times on one's own history.

It is the core of a shift, `advance(window, observation, policy)`; only the eyes differ. Nobody can look at a
process that is long gone, so what needs a witness stays suspected, and a mismatch is confirmed on its counts
alone. NCCL writes local time without a zone: it is read as UTC. Where the clock of the job was set back
meanwhile, an ordinary interval is taken to have gone by; where it was set forward, the jump counts as time,
and --poll-interval is better.
"""

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace as replaced
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deployments.stored_reports import Poll, plain, read_report, survey, timed
from tasks.hang.errors import RasError, SettingsError
from tasks.hang.policy import HangPolicy
from tasks.hang.report import Communicator, RasReport
from tasks.hang.states import Blank, Event, Sighting
from tasks.hang.window import Window, advance
from tasks.reporting.history import (
    Line,
    Told,
    clock,
    closing,
    dates,
    few,
    lines_of,
    numbered,
    plot,
    reasons,
    totals_of,
    worst,
)
from tasks.reporting.wording import summary

_LONGEST_POLL_S = 86_400.0
_PLOTS = 3
_LISTED = 20
_ROWS = 200
_NAMED = 4  # ranks whose processes are named below a title
_TABLE_WIDTH = 78
_WIDTH = 100  # a curve gains nothing beyond


class Times(Struct, frozen=True, kw_only=True):
    """The times to try, in seconds.

    Args:
        poll_interval_s: Between two files; None goes by the time in each report.
        confirm_s: Until a freeze is a hang.
        suspect_after_s: Until it is told of; None is 60, or the confirm time where that is shorter.
        confirm_unresponsive_s: As `confirm_s` where a rank does not answer; None is the same.
        confirm_init_s: As `confirm_s` for a communicator that is being created; None is the same.
    """

    poll_interval_s: float | None = None
    confirm_s: float = 600.0
    suspect_after_s: float | None = None
    confirm_unresponsive_s: float | None = None
    confirm_init_s: float | None = None

    @property
    def confirm_times(self) -> dict[str, float]:
        """Those that are set, by their options."""
        every = {
            "--confirm": self.confirm_s,
            "--confirm-unresponsive": self.confirm_unresponsive_s,
            "--confirm-init": self.confirm_init_s,
        }
        return {option: value for option, value in every.items() if value is not None}


class Outcome(Struct, frozen=True):
    """What a file led to; `report` is None where it was none."""

    poll: Poll
    report: RasReport | None
    events: tuple[Event, ...]
    window: Window


class Course(Struct):
    """The launches of a communicator, as they are read file by file."""

    key: str
    title: str
    lagging: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    who: str = ""
    lines: tuple[Line, ...] = ()
    totals: list[tuple[int | None, ...]] = []


class JsonLine(Struct, frozen=True):
    """An event as --json prints it, in this order. Ranks are ranks of the communicator."""

    at: datetime
    event: str
    communicator: str
    kind: str | None
    lagging: tuple[int, ...]
    leading: tuple[int, ...]
    missing: tuple[int, ...]
    size: int
    stalled_s: float
    reason: str


def replay(folder: Path, times: Times, *, as_json: bool) -> int:
    """Run the detector over the reports of a folder and print what it would have told.

    Args:
        folder: Reports in json, one a file; or the folder of an incident.
        times: How long is too long.
        as_json: One JSON object a line instead of a table.

    Returns:
        The exit code: 0 nothing confirmed, 3 a hang confirmed, 1 the reader of the output went away.

    Raises:
        SettingsError: there is nothing to replay, or an option cannot work.
    """
    _check(times)
    polls = timed(survey(folder), times.poll_interval_s, folder)
    policy = _policy(polls, times)
    try:
        confirmed = _print_json(polls, policy) if as_json else _print_table(polls, policy)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 3 if confirmed else 0


# ---- settings ------------------------------------------------------------------------------


def _check(times: Times) -> None:
    seconds = {**times.confirm_times, "--suspect-after": times.suspect_after_s}
    for option, value in seconds.items():
        if value is not None and not 0 < value < float("inf"):
            raise SettingsError(f"{option} is {value:g}.", "Set it to a number of seconds above 0.")
    if times.poll_interval_s is None:
        return
    if not 0 < times.poll_interval_s <= _LONGEST_POLL_S:
        raise SettingsError(
            f"--poll-interval is {times.poll_interval_s:g}.",
            f"Set it to a number of seconds above 0 and up to {_LONGEST_POLL_S:.0f}, a day.",
        )
    _check_interval(f"--poll-interval ({times.poll_interval_s:g} s) is", times.poll_interval_s, times)


def _check_interval(what: str, every_s: float, times: Times) -> None:
    for option, confirm_s in times.confirm_times.items():
        if every_s > confirm_s:
            raise SettingsError(
                f"{what} longer than {option} ({confirm_s:g} s): no freeze would be seen twice.",
                f"Set {option} to at least {every_s:g}"
                + ("." if times.poll_interval_s else ", or --poll-interval if these times are wrong."),
            )


def _policy(polls: Sequence[Poll], times: Times) -> HangPolicy:
    gaps_s = [after.elapsed_s - before.elapsed_s for before, after in pairwise(polls)]
    gaps_s = [gap_s for gap_s in gaps_s if gap_s > 0]  # a file without a time of its own adds none
    every_s = times.poll_interval_s or max(1.0, statistics.median(gaps_s or [1.0]))
    _check_interval(f"The reports are {every_s:g} s apart,", every_s, times)
    # One file that is no report is told at once: unlike in a shift, no next poll is going to say more.
    return HangPolicy(
        poll_interval_s=every_s,
        suspect_after_s=times.suspect_after_s or min(60.0, *times.confirm_times.values()),
        confirm_duration_s=times.confirm_s,
        confirm_unresponsive_s=times.confirm_unresponsive_s,
        confirm_init_s=times.confirm_init_s,
        blind_after_polls=1,
        witnesses=False,
    )


# ---- the detector ---------------------------------------------------------------------------------------


def _play(polls: Sequence[Poll], policy: HangPolicy) -> Iterator[Outcome]:
    window = Window(attempt_id="replay")
    for poll in polls:
        window, outcome = _step(window, poll, policy)
        yield outcome


def _step(window: Window, poll: Poll, policy: HangPolicy) -> tuple[Window, Outcome]:
    read = read_report(poll.path)
    if isinstance(read, RasReport):
        try:
            after, events = advance(window, Sighting(poll.at, read), policy)
            return after, Outcome(poll, read, _as_said(events, poll), after)
        except RasError as error:  # a record that had to be looked into is not what NCCL documents
            read = error.what
    reason = f"{plain(poll.path.name)}: {read}"
    after, events = advance(window, Blank(poll.at, reason), policy)
    if not events and after.blind is not None:  # the core tells only of the first one in a row
        blind_s = max(0.0, (poll.at - after.blind.since).total_seconds())
        events = (Event(at=poll.at, event="blind", stalled_s=blind_s, reason=reason),)
    return after, Outcome(poll, None, _as_said(events, poll), after)


def _as_said(events: Sequence[Event], poll: Poll) -> tuple[Event, ...]:
    """With the time that the report itself says."""
    return tuple(replaced(event, at=poll.said) for event in events)


# ---- what is printed ------------------------------------------------------------------------------------


def _print_json(polls: Sequence[Poll], policy: HangPolicy) -> bool:
    confirmed = False
    for outcome in _play(polls, policy):
        for event in outcome.events:
            confirmed = confirmed or event.event == "confirmed"
            fields = {name: getattr(event, name) for name in JsonLine.__struct_fields__}
            line = JsonLine(**{**fields, "stalled_s": round(event.stalled_s, 3)})
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    return confirmed


def _print_table(polls: Sequence[Poll], policy: HangPolicy) -> bool:
    told: list[Told] = []
    unreadable, largest, size = 0, "", 0
    state: Window | None = None
    for outcome in _play(polls, policy):
        state = outcome.window
        told += [Told(outcome.poll.elapsed_s, event) for event in outcome.events]
        unreadable += outcome.report is None
        for key, record in outcome.report.records.items() if outcome.report else ():
            if record.size > size:
                largest, size = key, record.size
    console = Console(markup=False, highlight=False, emoji=False)
    numbers, tellers = numbered(told), worst(told)
    if told:
        _print_events(console, told, numbers)
    courses = [_course(event, numbers) for event in tellers[:_PLOTS]]
    if not courses and largest:
        courses = [Course(largest, f"The largest communicator: {plain(largest)}, {size} ranks")]
    _follow(courses, polls)
    for course in courses:
        course.title += course.who
        _print_plot(console, course, [poll.elapsed_s for poll in polls])
    for event in tellers[_PLOTS : _PLOTS + _LISTED]:
        console.print(_title(event, numbers), soft_wrap=True)
    if len(tellers) > _PLOTS + _LISTED:
        console.print(f"and {len(tellers) - _PLOTS - _LISTED} more communicators; --json names each")
    end = closing(
        told,
        numbers,
        reports=len(polls) - unreadable,
        unreadable=unreadable,
        span_s=polls[-1].elapsed_s,
        confirm_s=policy.confirm_duration_s,
    )
    if state is not None and state.communicators and state.blind is None:
        console.print(f"In the last report: {summary(state)}")
    console.print(f"Reports of {dates(polls[0].said, polls[-1].said)}.")
    console.print(end)
    _print_clock(console, polls)
    return any(each.event.event == "confirmed" for each in told)


def _print_clock(console: Console, polls: Sequence[Poll]) -> None:
    """Say where the time of the reports is not to be trusted."""
    set_back = [plain(after.path.name) for before, after in pairwise(polls) if after.said < before.said]
    if set_back:
        times = "once, at" if len(set_back) == 1 else f"{len(set_back)} times, first at"
        console.print(
            f"The time in the reports goes back {times} {set_back[0]}: an ordinary interval is taken to have "
            "gone by there. If the times are wrong, set --poll-interval."
        )


def _print_events(console: Console, told: Sequence[Told], numbers: Mapping[str, int]) -> None:
    """The table, and below it the reasons: a column of prose would leave no room for the others."""
    rows = told if len(told) <= _ROWS else [each for each in told if each.event.event != "still_suspected"]
    rows = rows[:_ROWS]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("after", "time", "event", "no.", "kind", "lagging", "missing", "stalled"):
        table.add_column(name, no_wrap=True, justify="right" if name == "stalled" else "left")
    for each in rows:
        event = each.event
        number = str(numbers[event.communicator]) if event.communicator else ""
        stalled = f"{event.stalled_s:g} s" if event.stalled_s else ""
        lagging, missing = few(event.lagging), few(event.missing)
        table.add_row(
            *(clock(each.elapsed_s), f"{event.at:%H:%M:%S}", event.event, number, event.kind or ""),
            *(lagging, missing, stalled),
        )
    # A narrow terminal breaks a line; a narrow table would break the words of each.
    Console(width=max(console.width, _TABLE_WIDTH), markup=False, highlight=False, emoji=False).print(table)
    for text in reasons(rows, numbers):
        console.print(plain(text))
    if len(rows) < len(told):
        console.print(f"{len(told) - len(rows)} more events are not shown; --json prints each.")
    console.print()


def _course(event: Event, numbers: Mapping[str, int]) -> Course:
    return Course(event.communicator, _title(event, numbers), event.lagging, event.missing)


def _title(event: Event, numbers: Mapping[str, int]) -> str:
    return f"no. {numbers[event.communicator]}: {plain(event.communicator)}, {event.size} ranks"


def _follow(courses: Sequence[Course], polls: Sequence[Poll]) -> None:
    """Read the launches of these communicators; only their counts are kept."""
    for i, poll in enumerate(polls):
        report = read_report(poll.path)
        for course in courses:
            shown = None if isinstance(report, str) else _communicator(report, course.key)
            if shown is not None and not course.lines:
                course.who = _who(shown, (*course.lagging, *course.missing))
                members = [rank.rank for each in (shown.ranks, shown.missing) for rank in each]
                course.lines = lines_of(members, lagging=course.lagging, missing=course.missing)
                course.totals = [(None,) * len(course.lines)] * i
            if course.lines:
                course.totals.append(totals_of(course.lines, shown.counts if shown is not None else {}))


def _who(communicator: Communicator, ranks: Sequence[int]) -> str:
    """Which processes the ranks of a communicator are: the same number is another rank in each."""
    members = [communicator.member(rank) for rank in dict.fromkeys(ranks)][:_NAMED]
    return "".join(
        f"\nrank {member.rank} is pid {member.pid} on {plain(member.host)}, "
        f"device {max(member.nvml_dev, member.cuda_dev)}"
        for member in members
        if member is not None
    )


def _communicator(report: RasReport, key: str) -> Communicator | None:
    try:
        return report.records[key].decode() if key in report.records else None
    except RasError:
        return None


def _print_plot(console: Console, course: Course, times_s: Sequence[float]) -> None:
    if not course.lines:
        return
    console.print(course.title, soft_wrap=True)
    for line in plot(course.lines, times_s, course.totals, width=min(console.width, _WIDTH)):
        console.print(line, soft_wrap=True)
    console.print()
