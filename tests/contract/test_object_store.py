"""LocalStore on a real file system: whole or not at all, and never outside its root."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tasks.adapters.object_store import LocalStore, open_store
from tasks.hang.errors import StoreError

NOBODY = 65534


@pytest.fixture
def root(tmp_path):
    return tmp_path / "storage"


@pytest.fixture
def store(root):
    return LocalStore(root)


def files_of(root: Path) -> list[str]:
    """Everything that lies there, also what the store would not list."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_what_is_put_is_got(store, root):
    where = store.put("run/hang_detector/incident-1/stack_traces/rank_0.log", b"stack")
    assert where == str(root / "run/hang_detector/incident-1/stack_traces/rank_0.log")
    assert store.get("run/hang_detector/incident-1/stack_traces/rank_0.log") == b"stack"
    assert Path(where).read_bytes() == b"stack"


def test_nothing_is_none(store):
    assert store.get("run/nothing.json") is None
    assert store.names("run/") == []


def test_put_replaces_and_leaves_nothing_behind(store, root):
    store.put("a", b"one")
    store.put("a", b"two")
    assert store.get("a") == b"two"
    assert files_of(root) == ["a"]


def test_put_if_absent_keeps_the_first(store, root):
    assert store.put_if_absent("run/manifest.json", b"one")
    assert not store.put_if_absent("run/manifest.json", b"two")
    assert store.get("run/manifest.json") == b"one"
    assert files_of(root) == ["run/manifest.json"]


def test_one_of_many_writers_wins(store):
    writers = 8
    for turn in range(20):
        ready = Barrier(writers)

        def write(writer, name=f"m{turn}", ready=ready):
            ready.wait(timeout=30)
            return store.put_if_absent(name, str(writer).encode() * 10_000)

        with ThreadPoolExecutor(writers) as pool:
            won = list(pool.map(write, range(writers)))
        assert won.count(True) == 1
        assert store.get(f"m{turn}") == str(won.index(True)).encode() * 10_000


def test_names_are_sorted_and_begin_with_the_prefix(store):
    for name in ("run/incident-1/b", "run/incident-1/a/x", "run/incident-10/c", "other"):
        store.put(name, b"")
    assert store.names("run/incident-1/") == ["run/incident-1/a/x", "run/incident-1/b"]
    assert store.names("run/incident-1") == ["run/incident-1/a/x", "run/incident-1/b", "run/incident-10/c"]
    assert store.names("")[0] == "other"


@pytest.mark.parametrize(
    "name", ["", ".", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\0b", "/", "//x"]
)
def test_a_name_that_is_none(store, root, name):
    for act, arguments in ((store.put, (b"",)), (store.put_if_absent, (b"",)), (store.get, ())):
        with pytest.raises(StoreError, match="storage_path"):
            act(name, *arguments)
    assert not root.exists()


def test_a_link_that_leads_out_is_refused(store, root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    root.mkdir()
    (root / "run").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    for name in ("run/secret", "run/new", "file"):
        with pytest.raises(StoreError, match="symbolic link"):
            store.put(name, b"x")
        with pytest.raises(StoreError, match="symbolic link"):
            store.get(name)
    assert files_of(outside) == ["secret"]
    assert (outside / "secret").read_text() == "s"


def test_a_root_that_is_itself_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = LocalStore(tmp_path / "link")
    store.put("a/b", b"x")
    assert store.names("") == ["a/b"]
    assert (tmp_path / "real/a/b").read_bytes() == b"x"


def test_a_file_where_a_folder_should_be(store, root):
    root.parent.mkdir(exist_ok=True)
    root.write_text("I am a file")
    with pytest.raises(StoreError, match=r"storage_path .*(Not a directory|File exists).*Set storage_path"):
        store.put("run/x", b"")
    with pytest.raises(StoreError, match=r"Not a directory"):
        store.get("run/x")
    with pytest.raises(StoreError):
        store.probe()


def test_a_folder_where_a_file_should_be(store, root):
    store.put("run/x", b"")
    with pytest.raises(StoreError, match="Is a directory"):
        store.put("run", b"")
    assert not store.put_if_absent("run", b"")
    with pytest.raises(StoreError, match="Is a directory"):
        store.get("run")
    assert files_of(root) == ["run/x"]


def test_a_full_disk_leaves_no_half_file(store, root, monkeypatch):
    store.put("run/x", b"before")

    def full(descriptor: int) -> None:
        del descriptor
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for name in ("run/x", "run/new"):
        with pytest.raises(StoreError, match=r"storage_path .*No space left on device"):
            store.put(name, b"after")
        with pytest.raises(StoreError, match="No space left"):
            store.put_if_absent(name, b"after")
    monkeypatch.undo()
    assert store.get("run/x") == b"before"
    assert files_of(root) == ["run/x"]


def test_a_write_that_the_kernel_stops_in_the_middle(root):
    """A real limit instead of a patched call: the file may not grow beyond 4 kB."""
    program = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from tasks.adapters.object_store import LocalStore
        from tasks.hang.errors import StoreError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = LocalStore(Path(sys.argv[1]))
        store.put("run/x", b"before")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            store.put("run/x", b"a" * 100_000)
        except StoreError as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "File too large" in done.stdout
    assert files_of(root) == ["run/x"]
    assert (root / "run/x").read_bytes() == b"before"


def test_a_writer_that_is_killed_leaves_nothing_that_is_listed(root):
    """kill -9 between write and rename: the place is empty, and what is left over is no evidence."""
    program = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from tasks.adapters.object_store import LocalStore
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        LocalStore(Path(sys.argv[1])).put("run/manifest.json", b"half")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], cwd=Path(__file__).parents[2], timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(root)
    assert store.get("run/manifest.json") is None
    assert store.names("") == []
    assert len(files_of(root)) == 1
    assert store.put_if_absent("run/manifest.json", b"whole")


def test_a_folder_that_belongs_to_somebody_else(tmp_path):
    """The tests may run as root, for whom no folder is closed; so the effective user changes."""
    root = tmp_path / "closed"
    root.mkdir(mode=0o555)
    store = LocalStore(root)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(StoreError, match=r"storage_path .*Permission denied.*Set storage_path"):
            store.put("run/x", b"")
        with pytest.raises(StoreError, match="Permission denied"):
            store.probe()
    finally:
        os.seteuid(before)
    assert files_of(root) == []


def test_a_name_that_is_too_long(store, root):
    with pytest.raises(StoreError, match="File name too long"):
        store.put("x" * 300, b"")
    assert not root.exists() or files_of(root) == []


def test_a_file_system_without_hard_links(store, root, monkeypatch):
    """Buckets that are mounted as folders have none."""

    def no_links(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(self), None, str(target))

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    assert store.put_if_absent("m", b"one")
    assert not store.put_if_absent("m", b"two")
    assert store.get("m") == b"one"
    assert files_of(root) == ["m"]


def test_the_probe_leaves_nothing(store, root):
    store.probe()
    assert root.is_dir()
    assert files_of(root) == []


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://{}", " {} "])
def test_open_store_takes_paths_and_file_urls(tmp_path, form):
    where = open_store(form.format(tmp_path / "s")).put("a", b"x")
    assert where == str(tmp_path / "s" / "a")


def test_a_file_url_is_decoded(tmp_path):
    open_store(f"file://{tmp_path}/with%20blank").put("a", b"x")
    assert (tmp_path / "with blank" / "a").exists()


@pytest.mark.parametrize("path", ["s3://bucket/x", "gs://bucket/x", "hdfs://name/x", "abfs://c@a/x"])
def test_other_kinds_of_storage_are_refused(path):
    with pytest.raises(StoreError, match=r"storage_path .*local or mounted paths only"):
        open_store(path)


@pytest.mark.parametrize("path", ["", "  ", "relative/path", "./x", "file://host/x", "/a\0b"])
def test_a_path_that_means_something_else_elsewhere_is_refused(path):
    with pytest.raises(StoreError, match="storage_path"):
        open_store(path)
