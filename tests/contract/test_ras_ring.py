"""The history of polls on disk: bounded, whole, and by attempt."""

from datetime import timedelta

import pytest

from tasks.adapters.ras_ring import RasRing
from tasks.hang.errors import StoreError
from tests.reports import at


def test_the_newest_polls_are_kept_as_received(tmp_path):
    ring = RasRing(tmp_path / "ring", keep_polls=3)
    for i in range(5):
        ring.append("one", at(i), f"report {i}".encode())
    assert [(poll.observed_at, poll.raw()) for poll in ring.polls("one")] == [
        (at(i), f"report {i}".encode()) for i in (2, 3, 4)
    ]
    assert [poll.raw() for poll in RasRing(tmp_path / "ring", 3).polls("one")][-1] == b"report 4"


def test_two_polls_of_one_second_are_two(tmp_path):
    ring = RasRing(tmp_path, keep_polls=10)
    for milliseconds in (1, 2):
        ring.append("one", at(0) + timedelta(milliseconds=milliseconds), b"x")
    assert len(ring.polls("one")) == 2


def test_attempts_are_apart_and_old_ones_are_forgotten(tmp_path):
    ring = RasRing(tmp_path, keep_polls=10)
    for attempt in ("one", "two", "three"):
        ring.append(attempt, at(0), attempt.encode())
    assert [poll.raw() for poll in ring.polls("three")] == [b"three"]
    assert ring.polls("one") == []
    assert ring.polls("never") == []


def test_a_folder_that_cannot_be_written_is_named_with_the_setting(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="spool_path"):
        RasRing(tmp_path / "file" / "ring", 3).append("one", at(0), b"x")
    with pytest.raises(StoreError, match="spool_path"):
        RasRing(tmp_path / "file" / "ring", 3).probe()
    RasRing(tmp_path / "ring", 3).probe()
    assert list((tmp_path / "ring").iterdir()) == []


def test_what_was_not_finished_is_no_poll(tmp_path):
    ring = RasRing(tmp_path, keep_polls=3)
    ring.append("one", at(0), b"x")
    (tmp_path / "one" / ".20261201T030001.000000Z.json.gz.77").write_bytes(b"half")
    assert len(ring.polls("one")) == 1
