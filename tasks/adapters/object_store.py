"""Keeps evidence under a storage path: a local or mounted folder in this version.

A reader who finds `manifest.json` believes the bundle; a half-written file under its final name would be
worse than none. So content is written beside its place, flushed, and moved there in one step.
"""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NoReturn
from urllib.parse import unquote

from tasks.hang.errors import StoreError

_FIX = "Set storage_path to a folder that the watcher can write, the same that the training run uses."
_FILE = "file://"
_PARTIAL = ".rankwatch-partial-"
# What file systems say that have no hard links: FUSE mounts of buckets, some network file systems.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """ObjectStore in a folder.

    Args:
        root: Absolute; made when something is first written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, content: bytes) -> str:
        """Write whole or not at all, in place of what is there.

        Args:
            name: Relative, with `/`.
            content: Everything.

        Returns:
            The path.

        Raises:
            StoreError: the name leaves the storage path, or the folder cannot be written.
        """
        place = self._place(name)
        partial = self._write_beside(place, content)
        try:
            partial.replace(place)
            _flush_folder(place.parent)
        except OSError as error:
            _discard(partial)
            self._refuse(place, error)
        return str(place)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Write only if there is nothing; of several writers one wins.

        A file system without hard links cannot tell two writers of the same moment apart: there the last
        one's content stays, whole.

        Returns:
            Whether it wrote.

        Raises:
            StoreError: as `put`.
        """
        place = self._place(name)
        partial = self._write_beside(place, content)
        try:
            return self._link(partial, place)
        except OSError as error:
            self._refuse(place, error)
        finally:
            _discard(partial)

    def get(self, name: str) -> bytes | None:
        """The content, None where there is nothing.

        Raises:
            StoreError: as `put`, or it cannot be read.
        """
        place = self._place(name)
        try:
            return place.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(place, error)

    def names(self, prefix: str) -> list[str]:
        """All names that begin with `prefix`, sorted; end it with `/` for one folder.

        Raises:
            StoreError: as `put`, or a folder cannot be read.
        """
        top = self._place(prefix.rpartition("/")[0]) if "/" in prefix else self._root

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                self._refuse(Path(str(error.filename or top)), error)

        found: list[str] = []
        for folder, _, files in os.walk(top, onerror=refuse):
            inside = Path(folder).relative_to(self._root)
            found += [str(PurePosixPath(inside, file)) for file in files if not file.startswith(_PARTIAL)]
        return sorted(name for name in found if name.startswith(prefix))

    def probe(self) -> None:
        """Write a small object and remove it: better now than with a hang's evidence in hand.

        Raises:
            StoreError: the storage path cannot be written.
        """
        name = f".rankwatch-probe-{os.getpid()}-{secrets.token_hex(4)}"
        place = Path(self.put(name, b"rankwatch was here"))
        try:
            place.unlink()
        except OSError as error:
            self._refuse(place, error)

    def _place(self, name: str) -> Path:
        """Where a name lives. Names hold what came over the network: a rank's host, a run's name."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise StoreError(f"storage_path {self._root}: {name!r} is no name for an object in it.")
        place = self._root.joinpath(*parts)
        try:
            inside = place.resolve().is_relative_to(self._root.resolve())
        except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
            raise StoreError(
                f"storage_path {self._root}: {name!r} cannot be resolved: {error}.", _FIX
            ) from error
        if not inside:
            raise StoreError(f"storage_path {self._root}: {name!r} leads out of it through a symbolic link.")
        return place

    def _write_beside(self, place: Path, content: bytes) -> Path:
        partial = place.with_name(f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            _discard(partial)
            self._refuse(place, error)
        return partial

    @staticmethod
    def _link(partial: Path, place: Path) -> bool:
        try:
            place.hardlink_to(partial)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if place.exists():
                return False
            partial.replace(place)
        _flush_folder(place.parent)
        return True

    def _refuse(self, place: Path, error: OSError) -> NoReturn:
        raise StoreError(f"storage_path {self._root}: {place}: {error.strerror or error}.", _FIX) from error


def open_store(storage_path: str) -> LocalStore:
    """The store behind a storage path as a run names it.

    Raises:
        StoreError: the path is relative, or of a kind that this version does not keep evidence in.
    """
    path = storage_path.strip()
    if path.lower().startswith(_FILE):
        path = unquote(path[len(_FILE) :])
    scheme, colon, _ = path.partition("://")
    if colon:
        raise StoreError(
            f"storage_path {storage_path!r}: this version of rankwatch keeps evidence in local or mounted "
            f"paths only, not in {scheme}://.",
            "Set storage_path to a folder that all Prefect workers see.",
        )
    root = Path(path).expanduser() if path else Path()
    if not root.is_absolute() or "\0" in path:
        raise StoreError(f"storage_path is {storage_path!r}, which is no absolute path.", _FIX)
    return LocalStore(root)


def _flush_folder(folder: Path) -> None:
    """Make a new name survive a power cut; some network file systems have no such thing and need none."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder may be writable and not readable
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _discard(partial: Path) -> None:
    """Remove what is not wanted; a failure here must not hide the error that led to it."""
    with suppress(OSError):
        partial.unlink(missing_ok=True)
