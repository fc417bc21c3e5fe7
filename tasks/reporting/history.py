"""What a series of polls shows to a person at a terminal of 80 columns: its events, and launches drawn.

The counts of ranks that hang differ by a handful in hundreds, which no curve shows. So each rank gets a line
of its own: how its total rises, where it stops, its last number, and by how many it is behind. A communicator
of many ranks gets two lines, those behind and the others.

    rank 0  ▁▂▃▄▅▆▇█────────  237  stopped at 0:00:07
    rank 1  ▁▂▃▄▅▆▇─────────  236  stopped at 0:00:06, 1 behind
            0:00:00  0:00:15
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from tasks.hang.counts import Counts, ranges
from tasks.hang.states import Event, EventKind

_EACH = 8  # ranks that get a line of their own; more of them, and nobody finds the one that differs
_BLOCKS = "▁▂▃▄▅▆▇█"
_STILL, _UNSEEN = "─", "·"
_LEGEND = f"{_STILL} launches no more, {_UNSEEN} no count in that report"
_NARROW = 20  # characters of a column of ranks
_NAMED = 5
_NARROWEST = 8  # columns of a curve: below that, better a line that is too long

Totals = Sequence[int | None]  # of one line: launches at each poll, None where no report showed any


class Line(Struct, frozen=True, kw_only=True):
    """One line of a plot: a rank, or some ranks, of which the one with the least or most launches counts."""

    label: str
    ranks: frozenset[int]
    drawn: Literal["least", "most"] = "least"


def lines_of(
    ranks: Collection[int], *, lagging: Collection[int] = (), missing: Collection[int] = ()
) -> tuple[Line, ...]:
    """Which lines a communicator gets.

    The rank that others wait for is the least of those behind, and what they reached is the most of the
    others: a communicator stands still where neither moves.

    Args:
        ranks: Members of the communicator.
        lagging: Ranks that are behind.
        missing: Ranks that did not answer.
    """
    everyone = frozenset(ranks)
    if len(everyone) <= _EACH:
        return tuple(Line(label=f"rank {rank}", ranks=frozenset({rank})) for rank in sorted(everyone))
    behind = everyone.intersection(lagging)
    silent = everyone.intersection(missing) - behind
    if not behind and not silent:
        return (
            Line(label="slowest", ranks=everyone),
            Line(label="fastest", ranks=everyone, drawn="most"),
        )
    lines = (
        Line(label="behind", ranks=behind),
        Line(label="silent", ranks=silent),
        Line(label="ahead" if behind else "others", ranks=everyone - behind - silent, drawn="most"),
    )
    return tuple(line for line in lines if line.ranks)


def totals_of(lines: Sequence[Line], counts: Mapping[int, Counts]) -> tuple[int | None, ...]:
    """What one report adds to each line.

    Args:
        lines: Of the communicator.
        counts: Launches of each rank that answered, by function; empty where there was no report.
    """
    totals = {rank: sum(launched for _, launched in each) for rank, each in counts.items()}
    found: list[int | None] = []
    for line in lines:
        shown = [total for rank, total in totals.items() if rank in line.ranks]
        if not shown:
            found.append(None)
        else:
            found.append(min(shown) if line.drawn == "least" else max(shown))
    return tuple(found)


def plot(
    lines: Sequence[Line], times_s: Sequence[float], polls: Sequence[Sequence[int | None]], *, width: int = 80
) -> list[str]:
    """Draw a communicator.

    Args:
        lines: What it consists of.
        times_s: Seconds since the first poll, of each poll.
        polls: What `totals_of` made of each poll.
        width: Columns to use.

    Returns:
        Lines of text: the scale, the curves, the time, and which ranks a line stands for.
    """
    shown = [total for poll in polls for total in poll if total is not None]
    if not shown:
        return ["no launch counts in these reports"]
    low, high = min(shown), max(shown)
    series = [[poll[i] for poll in polls] for i in range(len(lines))]
    last_poll = max(i for i, poll in enumerate(polls) if any(total is not None for total in poll))
    most = max(last for each in series if (last := _last(each)) is not None)
    numbers = ["-" if (last := _last(each)) is None else str(last) for each in series]
    notes = [_note(each, times_s, last_poll, most) for each in series]
    left, middle = max(len(line.label) for line in lines), max(map(len, numbers))
    room = max(_NARROWEST, width - left - middle - max(map(len, notes)) - 6)
    curves = [_curve(each, low, high, room) for each in series]
    drawn = [
        f"{line.label:{left}}  {curve}  {number:>{middle}}  {note}".rstrip()
        for line, curve, number, note in zip(lines, curves, numbers, notes, strict=True)
    ]
    scale = f"launches from {_BLOCKS[0]} {low} to {_BLOCKS[-1]} {high}; {_LEGEND}"
    axis = _axis(times_s, len(curves[0]))
    meant = [_meant(line, width) for line in lines if not line.label.startswith("rank ")]
    return [scale, *drawn, f"{'':{left}}  {axis}", *meant]


def clock(seconds: float) -> str:
    """`0:06:15`: exact, for the time between two polls is what somebody may be tuning."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def dates(first: datetime, last: datetime) -> str:
    """`2026-12-01 03:00:00 to 03:14:30`."""
    known = f"{first:%Y-%m-%d} " if first.date() == last.date() else ""
    return f"{first:%Y-%m-%d %H:%M:%S} to {f'{last:%Y-%m-%d %H:%M:%S}'.removeprefix(known)}"


def _last(totals: Totals) -> int | None:
    return next((total for total in reversed(totals) if total is not None), None)


def _moved_last(totals: Totals) -> int:
    """The poll that showed the last launch; the first one that showed anything where none was seen."""
    seen = [(i, total) for i, total in enumerate(totals) if total is not None]
    moves = [i for (_, before), (i, after) in pairwise(seen) if after != before]
    return moves[-1] if moves else seen[0][0] if seen else 0


def _note(totals: Totals, times_s: Sequence[float], last_poll: int, most: int) -> str:
    """When it stopped, and how far it is behind."""
    seen = [i for i, total in enumerate(totals) if total is not None]
    if not seen:
        return "never seen"
    moved = _moved_last(totals)
    parts: list[str] = []
    if seen[-1] < last_poll:
        parts.append(f"last seen at {clock(times_s[seen[-1]])}")
    elif moved == seen[0] and len(seen) > 1:
        parts.append("never moved")
    elif moved < seen[-1]:
        parts.append(f"stopped at {clock(times_s[moved])}")
    behind = most - (totals[seen[-1]] or 0)
    if behind and seen[-1] == last_poll:  # of one that is missing nobody knows what it launched since
        parts.append(f"{behind} behind")
    return ", ".join(parts)


def _curve(totals: Totals, low: int, high: int, room: int) -> str:
    """One character a poll, or the last count of several where there are more polls than room."""
    columns = min(room, len(totals))
    moved = _moved_last(totals)
    drawn = ""
    for column in range(columns):
        first, after = column * len(totals) // columns, (column + 1) * len(totals) // columns
        total = _last(totals[first:after])
        if total is None:
            drawn += _UNSEEN
        elif first > moved:
            drawn += _STILL
        else:
            drawn += _BLOCKS[(total - low) * (len(_BLOCKS) - 1) // max(1, high - low)]
    return drawn


def _axis(times_s: Sequence[float], columns: int) -> str:
    """The first time under the first column, and the last under the last where both fit."""
    first, last = clock(times_s[0]), clock(times_s[-1])
    between = columns - len(first) - len(last)
    return f"{first}{' ' * between}{last}" if between > 0 else f"{first} to {last}"


def _meant(line: Line, width: int) -> str:
    which = ranges(line.ranks)
    named = f"{line.label}: {'rank' if len(line.ranks) == 1 else 'ranks'} {which}"
    how = f" ({len(line.ranks)} ranks, the {line.drawn} launches of any)" if len(line.ranks) > 1 else ""
    space = width - len(how)
    return (named if len(named) <= space else f"{named[: max(1, space - 3)]}...") + how


# ---- events ---------------------------------------------------------------------------------------------


class Told(Struct, frozen=True):
    """An event, and how many seconds after the first poll it came."""

    elapsed_s: float
    event: Event


def numbered(told: Iterable[Told]) -> dict[str, int]:
    """A short number for each communicator that is told of: its name takes more than half a line."""
    keys = dict.fromkeys(each.event.communicator for each in told if each.event.communicator)
    return {key: number for number, key in enumerate(keys, start=1)}


def worst(told: Iterable[Told]) -> list[Event]:
    """The worst event of each communicator, of equally bad ones the last; the worst communicators first."""
    found: dict[str, Event] = {}
    for event in (each.event for each in told if each.event.communicator):
        known = found.get(event.communicator)
        if known is None or _BADNESS.index(event.event) >= _BADNESS.index(known.event):
            found[event.communicator] = event
    return sorted(found.values(), key=lambda event: -_BADNESS.index(event.event))


_BADNESS: tuple[EventKind, ...] = (
    "blind", "recovered", "idle", "suspected", "still_suspected", "confirmed",
)  # fmt: skip


def few(numbers: Collection[int]) -> str:
    """Ranks in a narrow column: `0-6, 8`, and of very many only how many they are."""
    text = ranges(numbers)
    return text if len(text) <= _NARROW else f"{len(numbers)} ranks"


def reasons(told: Iterable[Told], numbers: Mapping[str, int]) -> list[str]:
    """Each reason once, with the events that gave it."""
    given: dict[str, list[str]] = {}
    for each in told:
        event = each.event
        which = f" no. {numbers[event.communicator]}" if event.communicator else ""
        if event.reason:
            given.setdefault(event.reason, []).append(f"{clock(each.elapsed_s)} {event.event}{which}")
    return [f"{_list(events)}: {reason}" for reason, events in given.items()]


def _list(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more


def closing(
    told: Sequence[Told],
    numbers: Mapping[str, int],
    *,
    reports: int,
    unreadable: int,
    span_s: float,
    confirm_s: float,
) -> str:
    """What it comes to, in a few sentences.

    Args:
        told: All events.
        numbers: Of the communicators.
        reports: Files that are one.
        unreadable: Files that are none.
        span_s: Seconds from the first file to the last.
        confirm_s: Seconds until a freeze is a hang.
    """
    confirmed = [each for each in told if each.event.event == "confirmed"]
    over = f"{_many(reports, 'report')} of {clock(span_s)}"
    if confirmed:
        named = _list([f"no. {numbers[each.event.communicator]}" for each in confirmed])
        first = clock(confirmed[0].elapsed_s)
        parts = [f"{_many(len(confirmed), 'hang')} confirmed ({named}), first after {first}, in {over}."]
    elif span_s < confirm_s:
        short = f"they span less than the confirm time of {confirm_s:g} s, so nothing could be"
        parts = [f"Nothing was confirmed in {over}: {short}; set a shorter --confirm."]
    else:
        parts = [f"Nothing was confirmed in {over}, confirm time {confirm_s:g} s."]
    parts += [
        f"No. {numbers[each.event.communicator]} went on after {each.event.stalled_s:g} s: a longer confirm "
        "time would not have called that a hang."
        for each in _went_on(told)
    ]
    last = {each.event.communicator: each.event.event for each in told}
    open_ = [numbers[key] for key, event in last.items() if event in {"suspected", "still_suspected"}]
    if open_:
        parts.append(f"Still suspected at the end: no. {few(open_)}.")
    if unreadable:
        parts.append(f"{_many(unreadable, 'file')} could not be read as a report.")
    return " ".join(parts)


def _went_on(told: Sequence[Told]) -> list[Told]:
    """The recoveries from what had been confirmed."""
    hung: set[str] = set()
    found: list[Told] = []
    for each in told:
        event = each.event
        if event.event == "confirmed":
            hung.add(event.communicator)
        elif event.event == "recovered" and event.communicator in hung:
            hung.discard(event.communicator)
            if "gone" not in event.reason:
                found.append(each)
    return found


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
