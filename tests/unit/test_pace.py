"""How often a job may be asked, and when not at all."""

import pytest

from tasks.hang.pace import VERSIONS, Pace, advice, pace, settled, suspended
from tests.fakes import attempt

NOW = 1_800_000_000.0


def asked(poll_interval_s: float = 15.0, **fields) -> Pace:
    given = {"explicit": False, "entries": 0, "nccl_version": "2.30.7", "collection_time_s": 0.0}
    return pace(poll_interval_s, **{**given, **fields})


@pytest.mark.parametrize("entries", [0, 1, 512, 4096, 5000])
def test_a_job_of_up_to_5000_entries_is_asked_at_the_default(entries):
    assert asked(entries=entries, collection_time_s=100.0) == Pace(15.0)


@pytest.mark.parametrize(
    ("entries", "interval_s"), [(6_400, 24.6), (10_000, 60.0), (14_000, 117.6), (50_000, 120.0)]
)
def test_beyond_the_interval_grows_with_the_square(entries, interval_s):
    found = asked(entries=entries)
    assert found.interval_s == pytest.approx(interval_s, abs=0.1)
    assert f"{entries} rank entries" in found.reason


def test_the_share_of_a_core_never_exceeds_that_of_5000_entries():
    share = 5.5e-8 * 5_000**2 / 15
    for entries in range(5_000, 14_000, 500):
        assert 5.5e-8 * entries**2 / asked(entries=entries).interval_s <= share * 1.000001


def test_a_machine_that_is_faster_is_asked_more_often():
    assert asked(entries=10_000, collection_time_s=0.5).interval_s == Pace(15.0).interval_s
    assert 15.0 < asked(entries=10_000, collection_time_s=2.0).interval_s < 60.0


def test_waiting_for_lost_peers_is_no_reason_to_look_away():
    """The first report after a failure takes 5 s, just when it matters."""
    assert asked(entries=512, collection_time_s=5.0).interval_s == 15.0
    assert asked(entries=10_000, collection_time_s=60.0) == asked(entries=10_000)


def test_a_longer_default_is_never_shortened():
    assert asked(300.0, entries=50_000) == Pace(300.0)
    assert asked(300.0, nccl_version="2.28.9").interval_s == 300.0


def test_an_interval_that_somebody_chose_is_kept():
    assert asked(2.0, explicit=True, entries=50_000, collection_time_s=9.0) == Pace(2.0)


@pytest.mark.parametrize("version", ["2.28.7", "2.28.8", "2.28.9", "2.28.9+cuda12.9", "v2.28.7-1"])
def test_versions_that_can_crash_are_asked_less_often(version):
    found = asked(nccl_version=version)
    assert (found.interval_s, version in found.reason) == (60.0, True)
    assert asked(5.0, nccl_version=version).interval_s == 60.0
    assert asked(nccl_version=version, entries=10_000).interval_s == 120.0
    chosen = asked(2.0, explicit=True, nccl_version=version)
    assert (chosen.interval_s, "4 times" in chosen.reason) == (8.0, True)


@pytest.mark.parametrize("version", ["2.28.7", "2.28.9+cuda12.9"])
def test_what_to_do_about_a_version(version):
    text = advice(version)
    assert text.startswith(f"NCCL {version} ")
    assert "2.29.2" in text
    assert "1762" in text


@pytest.mark.parametrize(
    "version", ["2.28.6", "2.28.10", "2.29.2", "2.30.7+standin", "12.28.9", "2.28", "", "unknown", "?"]
)
def test_nothing_is_held_against_other_versions(version):
    assert asked(nccl_version=version) == Pace(15.0)
    assert advice(version) == ""


def test_each_row_of_the_table_is_whole():
    for risk in VERSIONS:
        assert risk.first <= risk.last
        assert risk.factor > 1
        assert risk.why
        assert "#" in risk.source


# ---- when not to ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "is_settled"),
    [(0, False), (29.9, False), (30, True), (3600, True), (-10, False), (-3600, True)],
)
def test_an_attempt_settles(age_s, is_settled):
    assert settled(NOW - age_s, NOW, 30.0) == is_settled


def test_a_start_that_nobody_told_is_long_ago():
    assert settled(0.0, NOW, 30.0)
    assert suspended(attempt(), NOW, 30.0) == ""


def test_an_attempt_without_a_settle_time_is_settled_at_once():
    assert settled(NOW, NOW, 0.0)


@pytest.mark.parametrize("status", ["starting", "restarting", "finished", "failed", "unknown"])
def test_an_attempt_that_does_not_run_is_not_asked(status):
    assert status in suspended(attempt(status=status), NOW, 0.0)


def test_a_young_attempt_is_not_asked():
    assert "30 s ago" in suspended(attempt(started_at=NOW - 5), NOW, 30.0)
    assert suspended(attempt(started_at=NOW - 31), NOW, 30.0) == ""


def test_the_training_may_ask_for_a_pause():
    paused = attempt(suspended_until=NOW + 60, suspended_reason="rebuilding the tensor group")
    text = suspended(paused, NOW, 30.0)
    assert text.endswith("until 2027-01-15T08:01:00+00:00: rebuilding the tensor group")
    assert suspended(paused, NOW + 30, 30.0) == text  # the same text while it lasts
    assert suspended(paused, NOW + 60, 30.0) == ""
    assert "no reason" in suspended(attempt(suspended_until=NOW + 60), NOW, 30.0)


@pytest.mark.parametrize("until", [float("inf"), 1e300, NOW + 3600])
def test_a_pause_that_no_clock_of_ours_explains_blinds_nobody(until):
    assert suspended(attempt(suspended_until=until), NOW, 30.0) == ""


def test_a_pause_may_last_ten_minutes():
    assert suspended(attempt(suspended_until=NOW + 600), NOW, 30.0)
