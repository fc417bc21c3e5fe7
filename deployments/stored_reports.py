"""Stored RAS reports: which files of a folder are some, in which order, and when each was taken."""

import os
import re
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from tasks.hang.errors import RasError, SettingsError
from tasks.hang.report import RasReport, parse_report

_OURS = frozenset({"manifest.json", "verdict.json", "INDEX.json"})
_BELOW = "nccl_ras"  # where an incident folder keeps its reports, ours and Ray's
_NAMED = 5
_UNDATED = datetime(1970, 1, 1, tzinfo=UTC)
_FUTURE = datetime(3000, 1, 1, tzinfo=UTC)  # beyond, sums of times soon have no date any more


class Filed(Struct, frozen=True):
    """A file of the history: its time where it has one, and why it is no report, empty where it is one."""

    path: Path
    stamp: datetime | None
    problem: str


class Poll(Struct, frozen=True):
    """A file with its time.

    Args:
        said: The time in the report; one without has that of the report before it.
        at: The same by a clock that never goes back: where the one of the job was set back, an ordinary
            interval is taken to have gone by.
        elapsed_s: Since the first one.
    """

    path: Path
    said: datetime
    at: datetime
    elapsed_s: float


def survey(folder: Path) -> list[Filed]:
    """The files to replay, in the order of their names.

    Raises:
        SettingsError: the folder cannot be read, or there is no report in it.
    """
    found = [_filed(path) for path in _json_files(folder)]
    below = os.path.isdir(folder / _BELOW)  # noqa: PTH112  Path.is_dir raises where it may not look
    if all(file.problem for file in found) and below:
        found = [_filed(path) for path in _json_files(folder / _BELOW)] or found
    if not all(file.problem for file in found):
        return found
    what = f"There is no RAS report in {plain(folder)}."
    if found:
        first = found[0]
        what += (
            f" Files ending in .json that are none: {len(found)}; {plain(first.path.name)}: {first.problem}"
        )
    others = sorted(plain(path.parent.name) for path in folder.glob(f"*/{_BELOW}"))
    raise SettingsError(
        what,
        f"Give one of its folders that have {_BELOW}/ in them: {', '.join(others[:_NAMED])}."
        if others
        else "Give a folder of reports, one a file with a name ending in .json, as Ray stores them.",
    )


def _json_files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            # A link that leads nowhere is a gap in the history; a folder or a pipe is no part of it.
            names = [e.name for e in entries if e.is_file(follow_symlinks=False) or e.is_symlink()]
    except OSError as error:
        raise SettingsError(
            f"{plain(folder)} cannot be replayed: {error.strerror}.",
            "Set FOLDER to a folder of RAS reports that you may read.",
        ) from error
    wanted = [name for name in names if name.endswith(".json") and name not in _OURS]
    return [folder / name for name in sorted(wanted, key=_natural)]


def _natural(name: str) -> tuple[list[str | int], str]:
    """poll2 before poll10, and ncclras_X before ncclras_X-2, which came in the same second."""
    parts = re.split(r"([0-9]+)", name.removesuffix(".json"))
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def _filed(path: Path) -> Filed:
    report = read_report(path)
    if isinstance(report, str):
        return Filed(path, None, report)
    return Filed(path, _stamp(report.timestamp), "")


def read_report(path: Path) -> RasReport | str:
    """The report, or why it is none."""
    try:
        return parse_report(path.read_bytes())
    except OSError as error:
        return f"The file cannot be read: {error.strerror}."
    except RasError as error:
        return error.what


def _stamp(text: str) -> datetime | None:
    """NCCL's local time, read as UTC: a report does not say its zone."""
    try:
        stamp = datetime.fromisoformat(text)
        stamp = stamp.astimezone(UTC) if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
    return stamp if _UNDATED <= stamp < _FUTURE else None


def timed(files: Sequence[Filed], poll_interval_s: float | None, folder: Path) -> list[Poll]:
    """Give each file its time; one without a time of its own has that of the report before it.

    Args:
        files: In their order.
        poll_interval_s: Seconds between two files; None goes by the time in each report.
        folder: Is named where that cannot be.

    Raises:
        SettingsError: no report says its time, and nobody said the interval.
    """
    stamps = [file.stamp for file in files if file.stamp is not None]
    if poll_interval_s is not None:
        start = stamps[0] if stamps else _UNDATED
        moments = [start + timedelta(seconds=i * poll_interval_s) for i in range(len(files))]
    elif stamps:
        moments, latest = [], stamps[0]
        for file in files:
            latest = file.stamp or latest
            moments.append(latest)
    else:
        raise SettingsError(
            f"No report in {plain(folder)} has a time in its field `timestamp`.",
            "Set --poll-interval to the seconds between two of them.",
        )
    usual_s = statistics.median([gap_s for gap_s in _gaps_s(moments) if gap_s > 0] or [1.0])
    elapsed_s, polls = 0.0, []
    for file, moment, gap_s in zip(files, moments, [0.0, *_gaps_s(moments)], strict=True):
        elapsed_s += gap_s if gap_s >= 0 else usual_s
        polls.append(Poll(file.path, moment, moments[0] + timedelta(seconds=elapsed_s), elapsed_s))
    return polls


def _gaps_s(moments: Sequence[datetime]) -> list[float]:
    return [(after - before).total_seconds() for before, after in pairwise(moments)]


def plain(text: object) -> str:
    """Text of a file or of its name, without what a terminal would act on."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(text))
