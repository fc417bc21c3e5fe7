"""The last polls of a run, as received, on disk.

A hang is confirmed minutes after it began, and often by another process than the one that saw it begin: the
history must outlive the shift, a kill -9, the flow run, and a move to another worker.

Layout: `<folder>/<attempt>/g<ordinal>/<ordinal>_<time>_<writer>.poll`, one file for each poll. Files refer to
others of their group for records that did not change, and to nothing else: what is lost or damaged costs at
most the polls of one group (ten), and a group goes when its last poll does. A `.data` file is a poll that is
no longer retained and kept for the records that it holds; a `.part` file is not finished.

There are no locks (they break on shared storage). Two processes may write at once for a moment, after a
take-over: they append to the newest group, and evict only from older ones. One that finds gone what it
refers to, because the other evicted it, writes its poll again, complete, in a group of its own.
"""

import contextlib
import os
import re
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from tasks.adapters.ras_ring_file import DAMAGE, DATA, POLL, Known, draft, is_there, read, sources_of
from tasks.hang.errors import StoreError

_STAMP = "%Y%m%dT%H%M%S.%fZ"
_ATTEMPTS_KEPT = 2
_GROUP_POLLS = 10
_TRIES = 5
_PART = ".part"
_GROUP = re.compile(r"g(\d{8,})")
_FILE = re.compile(r"(?P<ordinal>\d{4,})_(?P<stamp>\d{8}T\d{6}\.\d{6}Z)_[0-9a-f]{8}(\.poll|\.data)")


class Poll(Struct, frozen=True):
    """One retained report."""

    observed_at: datetime
    path: Path

    def raw(self) -> bytes:
        """The report as it was received.

        Raises:
            StoreError: a file that holds it is damaged, or gone; the text names the file.
        """
        try:
            return read(self.path.parent, self.path.stem)
        except DAMAGE as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"spool_path: the RAS report of {self.observed_at:%Y-%m-%dT%H:%M:%SZ} is lost: "
                f"{error.__notes__[0]}: {why}.",
                "Polls that are not kept in this file can still be read.",
            ) from error


class RasRing:
    """Keeps the newest reports of each attempt in a folder.

    Args:
        folder: Folder of the run; one sub-folder for each attempt, the last two of which are kept.
        keep_polls: Reports kept for each attempt.
    """

    def __init__(self, folder: Path, keep_polls: int) -> None:
        self._folder = folder
        self._keep_polls = keep_polls
        # The polls of a group that is no longer the newest are evicted after keep_polls - group_polls more.
        self._group_polls = max(1, min(_GROUP_POLLS, keep_polls // 2))
        self._writer = secrets.token_hex(4)
        self._group = Path()
        self._known = Known({}, set())

    def probe(self) -> None:
        """See that the folder can be written.

        Raises:
            StoreError: it cannot; the text names `spool_path`.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = self._folder / f".probe.{os.getpid()}"
            part.write_bytes(b"probe")
            part.unlink()
        except OSError as error:
            raise StoreError(
                f"spool_path: the RAS history cannot be kept in {self._folder}: {error.strerror}.",
                "Set spool_path to a folder that can be written and has room.",
            ) from error

    def append(self, attempt_id: str, observed_at: datetime, raw: bytes) -> None:
        """Retain a report, whole or not at all.

        Raises:
            StoreError: the folder cannot be written; the text names `spool_path`.
        """
        folder = self._folder / attempt_id
        try:
            self._retain(folder, observed_at, raw)
            self._evict(folder)
        except OSError as error:
            raise StoreError(
                f"The RAS history of attempt {attempt_id} cannot be kept in {folder}: {error.strerror}.",
                "Set spool_path to a folder that can be written and has room.",
            ) from error

    def polls(self, attempt_id: str) -> list[Poll]:
        """The retained reports of an attempt, oldest first (in the order in which they were appended: a
        clock that was set back changes nothing); empty where there are none.
        """
        retained = _polls(_groups(self._folder / attempt_id))[-self._keep_polls :]
        return [Poll(_observed_at(path), path) for path in retained]

    def _retain(self, folder: Path, observed_at: datetime, raw: bytes) -> None:
        for left in reversed(range(_TRIES)):
            try:
                if left == _TRIES - 1:
                    self._open_group(folder)
                else:
                    self._new_group(folder)
                self._write(observed_at, raw)
            except (FileNotFoundError, FileExistsError):  # another process evicts what we just looked at
                if not left:
                    raise
            else:
                return

    def _open_group(self, folder: Path) -> None:
        """Go on with the newest group while it has room, whoever wrote it."""
        group = next(reversed(_groups(folder)), None)
        files = _files(group) if group else []
        if group is None or len(files) >= self._group_polls:
            self._new_group(folder)
            return
        if group != self._group:
            self._group, self._known = group, Known({}, set())
        if files:
            with contextlib.suppress(*DAMAGE):  # nothing refers to what is not known to be whole
                self._known.learn(group, files[-1].stem)

    def _new_group(self, folder: Path) -> None:
        """Begin a group. Its ordinal is above that of all attempts, so that the ordinals also say which
        attempts are the last ones: clocks and modification times may lie.
        """
        attempts = {path: _groups(path) for path in (self._folder / name for name in _names(self._folder))}
        ordinals = {path: _ordinal(groups[-1]) for path, groups in attempts.items() if groups}
        group = folder / f"g{max(ordinals.values(), default=0) + 1:08d}"
        group.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._group, self._known = group, Known({}, set())
        others = sorted((path for path in ordinals if path != folder), key=lambda path: ordinals[path])
        for old in others[: 1 - _ATTEMPTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, observed_at: datetime, raw: bytes) -> None:
        """Write a poll into the group.

        Raises:
            FileNotFoundError: another process evicted the group, or files of it that the poll refers to.
        """
        ordinal = max((_ordinal(path) for path in _files(self._group)), default=0) + 1
        name = f"{ordinal:04d}_{observed_at.astimezone(UTC):{_STAMP}}_{self._writer}"
        new = draft(name, raw, self._known)
        part, path = (self._group / f"{name}{suffix}" for suffix in (_PART, POLL))
        try:
            new.write(part)
            part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        if not all(is_there(self._group, source) for source in new.header.sources):
            path.unlink(missing_ok=True)
            raise FileNotFoundError(path)
        self._known.places.update(new.places)
        self._known.files.add(name)

    def _evict(self, folder: Path) -> None:
        """Remove what no retained poll needs, in all groups but the newest: others may write there."""
        groups = _groups(folder)
        retained = set(_polls(groups)[-self._keep_polls :])
        for group in groups[:-1]:
            files = _files(group)
            staying = retained.intersection(files)
            if not staying:
                _remove(group)
            elif any(path.suffix == POLL for path in files if path not in staying):
                _thin(group, staying)


def _thin(group: Path, staying: set[Path]) -> None:
    """Remove the files of a group that no staying poll needs; the others become data."""
    needed: set[str] = set()
    for path in staying:
        with contextlib.suppress(*DAMAGE):
            needed.update(sources_of(group, path.stem))
    for path in _files(group):
        if path in staying:
            continue
        if path.stem not in needed:
            path.unlink(missing_ok=True)
        elif path.suffix == POLL:
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_suffix(DATA))


def _remove(group: Path) -> None:
    for name in _names(group):
        (group / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: another process just wrote into it, and will see
        group.rmdir()


def _groups(folder: Path) -> list[Path]:
    """The groups of an attempt, oldest first."""
    return [folder / name for name in _names(folder) if _GROUP.fullmatch(name)]


def _files(group: Path) -> list[Path]:
    """The polls and data of a group, oldest first; what is not finished is none of them."""
    return [group / name for name in _names(group) if _FILE.fullmatch(name)]


def _polls(groups: list[Path]) -> list[Path]:
    return [path for group in groups for path in _files(group) if path.suffix == POLL]


def _names(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where there is no such folder, or no longer."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _ordinal(path: Path) -> int:
    return int(path.name.lstrip("g").partition("_")[0])


def _observed_at(path: Path) -> datetime:
    return datetime.strptime(path.stem.split("_")[1], _STAMP).replace(tzinfo=UTC)
