"""The history of polls on disk: bounded, whole, by attempt, and small."""

import multiprocessing
import os
import random
import re
import resource
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.adapters.ras_ring import Poll, RasRing
from tasks.adapters.ras_ring_file import _RECORD, cut
from tasks.hang.errors import StoreError
from tests.reports import at, communicator, rank, report

ROOT = Path(__file__).parents[2]
RECORDED = sorted(path for path in (ROOT / "tests" / "data" / "ras").rglob("*") if path.is_file())
REPORTS = [path for path in RECORDED if path.suffix == ".json"]

# The writers are killed, or killed with the test: a fork starts in no time and has everything imported.
FORK = multiprocessing.get_context("fork")


def write(folder: Path, keep: int, numbers: range) -> None:
    """Append numbered reports, one after the other."""
    ring = RasRing(folder, keep)
    for number in numbers:
        ring.append("one", at(number), numbered(number))


def raws(ring: RasRing, attempt_id: str = "one") -> list[bytes]:
    return [poll.raw() for poll in ring.polls(attempt_id)]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.rglob(f"*{suffix}"))


def noise(seed: int, length: int = 4000) -> str:
    """Text that does not compress, so that sizes tell what is kept."""
    return random.Random(seed).randbytes(length).hex()


def records(*contents: str) -> bytes:
    """A report of communicators with this content; the head and the tail are the same each time."""
    return report(*(communicator([], name=f"0x{i:x}", secondary=text) for i, text in enumerate(contents)))


def numbered(number: int) -> bytes:
    """A report that says which one it is, of which some records change at each poll and some now and then."""
    counts = (number, number // 7, 5, number // 3)
    members = (communicator([rank(r, n) for r in range(8)], name=f"0x{n:x}") for n in counts)
    return report(*members, timestamp=f"poll {number}")


def number_of(raw: bytes) -> int:
    found = re.search(rb"poll (\d+)", raw)
    assert found
    return int(found[1])


def fleet(poll: int, seed: int = 3) -> bytes:
    """32 communicators of 64 ranks in which every counter moved; a fifth of the ranks is one ahead."""
    moved = random.Random(seed * 1000 + poll)

    def count(_: re.Match[bytes]) -> bytes:
        return b'"AllReduce": %d' % (70000 + 113 * poll + (moved.random() < 0.2))

    return re.sub(rb'"AllReduce": \d+', count, FLEET).replace(b"03:00:00", b"%08d" % poll)


FLEET = report(
    *(
        communicator(
            [rank(r, 0, host=f"10.0.{c}.{r // 8}", pid=1000 + 37 * r) for r in range(64)],
            name=f"0x{random.Random(c).getrandbits(60):x}",
        )
        for c in range(32)
    )
)


def test_the_newest_polls_are_kept_as_received(tmp_path):
    ring = RasRing(tmp_path / "ring", keep_polls=3)
    for i in range(5):
        ring.append("one", at(i), f"report {i}".encode())
    assert [(poll.observed_at, poll.raw()) for poll in ring.polls("one")] == [
        (at(i), f"report {i}".encode()) for i in (2, 3, 4)
    ]
    assert raws(RasRing(tmp_path / "ring", 3))[-1] == b"report 4"


def test_two_polls_of_one_moment_are_two(tmp_path):
    ring = RasRing(tmp_path, keep_polls=10)
    for milliseconds, raw in ((1, b"a"), (2, b"b"), (2, b"c")):
        ring.append("one", at(0) + timedelta(milliseconds=milliseconds), raw)
    assert raws(ring) == [b"a", b"b", b"c"]


def test_a_clock_that_is_set_back_evicts_no_new_poll(tmp_path):
    ring = RasRing(tmp_path, keep_polls=4)
    for i in range(20):
        ring.append("one", at(-3600 * i), b"%d" % i)
    assert raws(ring) == [b"16", b"17", b"18", b"19"]
    assert ring.polls("one")[-1].observed_at == at(-3600 * 19)


def test_attempts_are_apart_and_old_ones_are_forgotten(tmp_path):
    ring = RasRing(tmp_path, keep_polls=10)
    for attempt in ("one", "two", "three"):
        ring.append(attempt, at(0), attempt.encode())
        os.utime(tmp_path / attempt, (0, 0))
    assert raws(ring, "three") == [b"three"]
    assert raws(ring, "two") == [b"two"]
    assert ring.polls("one") == []
    assert ring.polls("never") == []
    assert not (tmp_path / "one").exists()


def test_a_folder_that_cannot_be_written_is_named_with_the_setting(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="spool_path"):
        RasRing(tmp_path / "file" / "ring", 3).append("one", at(0), b"x")
    with pytest.raises(StoreError, match="spool_path"):
        RasRing(tmp_path / "file" / "ring", 3).probe()
    RasRing(tmp_path / "ring", 3).probe()
    assert list((tmp_path / "ring").iterdir()) == []


@pytest.mark.parametrize("keep", [1, 7, len(RECORDED)])
def test_every_recorded_answer_comes_back_byte_for_byte(tmp_path, keep):
    ring = RasRing(tmp_path, keep)
    for i, path in enumerate(RECORDED):
        ring.append("one", at(i), path.read_bytes())
    assert raws(ring) == [path.read_bytes() for path in RECORDED[-keep:]]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recorded_report_is_cut_at_its_communicators(path):
    raw = path.read_bytes()
    pieces = [raw[start:end] for start, end in cut(raw)]
    assert b"".join(pieces) == raw
    assert len(pieces) == raw.count(b'"secondary_hash"') + 2
    assert b'"timestamp"' in pieces[0]
    assert b"hash" not in pieces[0]
    assert b'"collection_time_sec"' in pieces[-1]
    assert b"hash" not in pieces[-1]


odd = st.one_of(
    st.binary(max_size=700),
    st.sampled_from([_RECORD, b"x" * 300, _RECORD + b"x" * 40, b'\n  "ras": ', b"", b" " * 256]),
)


@given(st.lists(odd, max_size=12).map(b"".join))
def test_the_cut_is_where_a_plain_search_finds_it(raw):
    end = len(raw) if (tail := raw.rfind(b'\n  "ras": ')) == -1 else tail
    starts = [0, end]
    following = raw.find(_RECORD, 0, end)
    while following != -1:
        starts.append(following)
        following = raw.find(_RECORD, following + 256, end)
    bounds = sorted({*starts, len(raw)})
    assert list(cut(raw)) == list(pairwise(bounds))


shared = st.sampled_from([_RECORD + b"%d" % i + b"-" * 300 * i for i in range(1, 5)])
document = st.one_of(
    st.binary(max_size=300),
    st.sampled_from(REPORTS[:6]).map(Path.read_bytes),
    st.tuples(
        st.sampled_from([b"{ head", b"", b"other head"]),
        st.lists(st.one_of(shared, shared, odd), max_size=8).map(b"".join),
        st.sampled_from([b'\n  "ras": 1', b'\n  "ras": 2', b"", b"\n"]),
    ).map(b"".join),
)
truncated = st.tuples(document, st.integers(0, 2000)).map(lambda cut_off: cut_off[0][: cut_off[1]])


@settings(max_examples=60, deadline=None)
@given(
    polls=st.lists(st.tuples(st.one_of(document, document, truncated), st.integers(0, 1)), max_size=45),
    keep=st.integers(1, 24),
    reopened=st.sets(st.integers(0, 44)),
)
def test_exactly_the_last_documents_come_back_whoever_wrote_them(polls, keep, reopened):
    with tempfile.TemporaryDirectory() as folder:
        rings = [RasRing(Path(folder), keep) for _ in range(2)]
        for i, (raw, writer) in enumerate(polls):
            if i in reopened:
                rings[writer] = RasRing(Path(folder), keep)
            rings[writer].append("one", at(i), raw)
            assert len(rings[writer].polls("one")) == min(keep, i + 1)
        assert raws(rings[0]) == [raw for raw, _ in polls[-keep:]]
        assert [poll.observed_at for poll in rings[1].polls("one")] == [at(i) for i in range(len(polls))][
            -keep:
        ]
        kept = len(files(Path(folder), ".poll"))
        assert kept == min(keep, len(polls))
        assert len(files(Path(folder), ".data")) <= 10


def test_a_record_that_did_not_change_is_kept_once_in_ten_polls(tmp_path):
    ring = RasRing(tmp_path, keep_polls=50)
    held = [noise(i) for i in range(20)]
    ring.append("one", at(0), records(*held))
    once = size(tmp_path)
    for i in range(1, 10):
        held[3] = noise(100 + i)
        ring.append("one", at(i), records(*held))
    assert size(tmp_path) < once * 1.7  # nine of twenty records, one for each poll
    assert raws(ring)[0] == records(*(noise(i) for i in range(20)))


def test_a_new_process_goes_on_with_what_is_on_disk(tmp_path):
    held = [noise(i) for i in range(20)]
    RasRing(tmp_path, 50).append("one", at(0), records(*held))
    once = size(tmp_path)
    for i in range(1, 10):
        RasRing(tmp_path, 50).append("one", at(i), records(*held))
    assert size(tmp_path) < once * 1.1
    assert raws(RasRing(tmp_path, 50)) == [records(*held)] * 10


def test_records_outlive_the_poll_that_brought_them_and_no_longer(tmp_path):
    ring = RasRing(tmp_path, keep_polls=20)
    held = [noise(i) for i in range(20)]
    for i in range(20):
        held[0] = noise(100 + i)
        ring.append("one", at(i), records(*held))
    ring.append("one", at(20), records(*held))
    assert len(files(tmp_path, ".data")) == 1  # nine polls refer to it
    for i in range(21, 29):
        ring.append("one", at(i), records(*held))
    assert len(files(tmp_path, ".data")) == 1
    ring.append("one", at(29), records(*held))
    assert files(tmp_path, ".data") == []
    assert len(list((tmp_path / "one").iterdir())) == 2


def test_the_folder_stays_small_for_ever(tmp_path):
    ring = RasRing(tmp_path, keep_polls=20)
    held = [noise(i) for i in range(20)]
    sizes = []
    for i in range(120):
        held[i % 20] = noise(1000 + i)
        ring.append("one", at(i), records(*held))
        sizes.append(size(tmp_path))
    assert max(sizes[30:]) < 1.25 * max(sizes[:30])


@pytest.mark.parametrize(("moving", "at_least"), [(10, 250), (50, 50)])
def test_the_history_of_a_window_is_a_fiftieth_of_its_reports(tmp_path, moving, at_least):
    ring = RasRing(tmp_path, keep_polls=50)
    window = []
    for i in range(60):
        raw = fleet(min(i, 10 + moving)).replace(
            b'"collection_time_sec": 0', b'"collection_time_sec": %d' % i
        )
        window.append(raw)
        ring.append("one", at(i), raw)
    assert raws(ring) == window[-50:]
    assert sum(map(len, window[-50:])) / size(tmp_path) > at_least


def test_an_append_holds_no_second_copy_of_the_report(tmp_path):
    raw = fleet(0) * 4
    ring = RasRing(tmp_path, keep_polls=5)
    ring.append("one", at(0), raw)
    again = RasRing(tmp_path, keep_polls=5)
    for writer, report_of_poll in ((ring, fleet(1) * 4), (again, fleet(2) * 4)):
        tracemalloc.start()
        try:
            writer.append("one", at(1), report_of_poll)
            assert tracemalloc.get_traced_memory()[1] < len(raw) / 3
        finally:
            tracemalloc.stop()


def test_what_was_not_finished_is_no_poll(tmp_path):
    ring = RasRing(tmp_path, keep_polls=4)
    ring.append("one", at(0), numbered(0))
    (poll,) = ring.polls("one")
    whole = poll.path.read_bytes()
    group = poll.path.parent
    leftovers = [group / f"0002_20261201T030001.000000Z_{i:08x}.part" for i in range(3)]
    for part, length in zip(leftovers, (0, 15, len(whole) // 2), strict=True):
        part.write_bytes(whole[:length])
    (tmp_path / "one" / "g00000009").mkdir()  # killed before the first poll of a group
    assert raws(ring) == [numbered(0)]
    for i in range(1, 7):
        RasRing(tmp_path, 4).append("one", at(i), numbered(i))
    assert raws(ring) == [numbered(i) for i in (3, 4, 5, 6)]
    assert files(tmp_path, ".part") == []


def test_a_kill_at_any_moment_costs_no_poll_that_was_there(tmp_path):
    begun = 0
    for _ in range(10):
        process = FORK.Process(target=write, args=(tmp_path, 12, range(begun, 10**6)), daemon=True)
        process.start()
        try:
            while not (polls := RasRing(tmp_path, 12).polls("one")) or polls[-1].observed_at < at(begun + 15):
                assert process.is_alive()
                for poll in polls[-2:]:
                    check_is_whole(poll)
        finally:
            process.kill()
            process.join()
        kept = raws(RasRing(tmp_path, 12))
        numbers = [number_of(raw) for raw in kept]
        assert numbers == list(range(numbers[-1] - 11, numbers[-1] + 1))
        assert kept == [numbered(number) for number in numbers]
        begun = numbers[-1] + 1
    assert len(list((tmp_path / "one").iterdir())) <= 4


def test_two_processes_that_write_at_once_do_not_harm_each_other(tmp_path):
    writers = [
        FORK.Process(target=write, args=(tmp_path, 20, range(begin, begin + 150)), daemon=True)
        for begin in (0, 10_000)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    kept = raws(RasRing(tmp_path, 20))
    assert len(kept) == 20
    assert kept == [numbered(number_of(raw)) for raw in kept]
    assert files(tmp_path, ".part") == []


def test_a_writer_that_slept_while_the_other_evicted_what_it_knows_writes_everything(tmp_path, monkeypatch):
    old, new = RasRing(tmp_path, 4), RasRing(tmp_path, 4)
    held = [noise(i) for i in range(4)]
    old.append("one", at(0), records(*held))
    sleeping = old._group, old._known
    for i in range(8):
        new.append("one", at(1 + i), records(noise(50 + i)))
    # The old one wakes up after it chose its group: what it refers to is gone, and the folder with it.
    monkeypatch.setattr(
        old, "_open_group", lambda _: vars(old).update(_group=sleeping[0], _known=sleeping[1])
    )
    old.append("one", at(9), records(*held))
    assert raws(new)[-1] == records(*held)
    # The same where the folder is there and the files are not.
    (tmp_path / "one" / sleeping[0].name).mkdir()
    old.append("one", at(10), records(*held))
    assert raws(new)[-2:] == [records(*held)] * 2
    assert len(raws(new)) == 4


def test_a_ring_that_was_deleted_or_moved_is_gone_on_with(tmp_path):
    ring = RasRing(tmp_path / "here", 10)
    for i in range(3):
        ring.append("one", at(i), numbered(i))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    moved = RasRing(tmp_path / "there", 10)
    moved.append("one", at(3), numbered(3))
    assert raws(moved) == [numbered(i) for i in range(4)]
    ring.append("one", at(4), numbered(4))
    ring.append("one", at(5), numbered(4))
    assert raws(ring) == [numbered(4)] * 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_named_and_costs_no_other_group(data):
    with tempfile.TemporaryDirectory() as folder:
        ring = RasRing(Path(folder), 20)
        for i in range(15):
            ring.append("one", at(i), numbered(i))
        victim = data.draw(st.sampled_from([poll.path for poll in ring.polls("one")]))
        whole = victim.read_bytes()
        at_byte = data.draw(st.integers(0, len(whole) - 1))
        other = data.draw(st.one_of(st.just(b""), st.binary(min_size=1, max_size=4)))
        changed = whole[:at_byte] + other + (whole[at_byte + len(other) :] if other else b"")
        victim.write_bytes(changed)
        check(ring.polls("one"), victim)
        RasRing(Path(folder), 20).append("one", at(15), numbered(15))  # goes on, whatever it finds
        ring.append("one", at(16), numbered(16))
        check(ring.polls("one"), victim)
        assert raws(RasRing(Path(folder), 20), "never") == []


def check_is_whole(poll: Poll) -> None:
    """A poll that is listed can be read, unless it was evicted since."""
    try:
        raw = poll.raw()
    except StoreError:
        assert not poll.path.exists()
    else:
        assert raw == numbered(number_of(raw))


def check(polls: list[Poll], victim: Path) -> None:
    """Each poll is what was received, or the error names the damaged file of its group."""
    for i, poll in enumerate(polls):
        try:
            assert poll.raw() == numbered(i)
        except StoreError as error:
            assert str(victim) in str(error)  # noqa: PT017  both ends are right, each with its own check
            assert poll.path.parent == victim.parent


def test_a_poll_that_is_gone_when_it_is_read_is_named(tmp_path):
    ring = RasRing(tmp_path, 2)
    ring.append("one", at(0), b"x")
    (poll,) = ring.polls("one")
    for i in range(1, 4):
        ring.append("one", at(i), b"x")
    with pytest.raises(StoreError, match=f"spool_path: .*2026-12-01T03:00:00Z.*{poll.path.stem}"):
        poll.raw()


def test_a_new_process_that_cannot_read_the_newest_poll_begins_again(tmp_path):
    RasRing(tmp_path, 20).append("one", at(0), numbered(0))
    (damaged,) = RasRing(tmp_path, 20).polls("one")
    damaged.path.write_bytes(b"RWRING1\n\xff\xff\xff\xff")
    RasRing(tmp_path, 20).append("one", at(1), numbered(0))
    assert RasRing(tmp_path, 20).polls("one")[1].raw() == numbered(0)
    with pytest.raises(StoreError, match=str(damaged.path)):
        damaged.raw()


@contextmanager
def no_room(size_bytes: int) -> Iterator[None]:
    """Writing fails in the middle of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room_bytes", [0, 1, 100, 5000, 60_000])
def test_a_full_disk_leaves_nothing_that_counts(tmp_path, room_bytes):
    ring = RasRing(tmp_path, 20)
    ring.append("one", at(0), records("a"))
    before = [path for path in tmp_path.rglob("*") if path.is_file()]
    large = records(*(noise(i) for i in range(20)))
    with no_room(room_bytes), pytest.raises(StoreError, match="spool_path"):
        ring.append("one", at(1), large)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == before
    ring.append("one", at(2), large)
    assert raws(ring) == [records("a"), large]
