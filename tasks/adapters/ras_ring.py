"""The last polls of a run, as received, on disk.

A hang is confirmed minutes after it began, and often by another process than the one that saw it begin: the
history must outlive the shift, a kill -9 and the flow run.
"""

import gzip
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from tasks.hang.errors import StoreError

_STAMP = "%Y%m%dT%H%M%S.%fZ"
_ATTEMPTS_KEPT = 2


class Poll(Struct, frozen=True):
    """One retained report."""

    observed_at: datetime
    path: Path

    def raw(self) -> bytes:
        """The report as it was received."""
        return gzip.decompress(self.path.read_bytes())


class RasRing:
    """Keeps the newest reports of each attempt in a folder.

    Args:
        folder: Folder of the run; one sub-folder for each attempt, the last two of which are kept.
        keep_polls: Reports kept for each attempt.
    """

    def __init__(self, folder: Path, keep_polls: int) -> None:
        self._folder = folder
        self._keep_polls = keep_polls

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
        name = f"{observed_at.astimezone(UTC):{_STAMP}}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = folder / f".{name}.{os.getpid()}"
            part.write_bytes(gzip.compress(raw, compresslevel=1))
            part.replace(folder / name)
            for old in sorted(folder.glob("*.json.gz"))[: -self._keep_polls]:
                old.unlink(missing_ok=True)
            self._forget_attempts()
        except OSError as error:
            raise StoreError(
                f"The RAS history of attempt {attempt_id} cannot be kept in {folder}: {error.strerror}.",
                "Set spool_path to a folder that can be written and has room.",
            ) from error

    def polls(self, attempt_id: str) -> list[Poll]:
        """The retained reports of an attempt, oldest first; empty where there are none."""
        folder = self._folder / attempt_id
        return [
            Poll(datetime.strptime(path.name.removesuffix(".json.gz"), _STAMP).replace(tzinfo=UTC), path)
            for path in sorted(folder.glob("*.json.gz"))
        ]

    def _forget_attempts(self) -> None:
        attempts = sorted(
            (path for path in self._folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
        )
        for old in attempts[:-_ATTEMPTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
