"""One look at a run: every answer is retained and read, and no single bad one costs the others."""

import pytest

from tasks.adapters.ras_ring import RasRing
from tasks.hang.errors import ClusterError, RasTooOld, RasTruncated
from tasks.hang.states import Blank, Sighting
from tasks.poll import poll
from tests.fakes import FakeDirectory, FakeRas, attempt, eyes
from tests.reports import report, world

ONE, OTHER = report(world(1, 2)), report(world(3, 4, name="0xb"))


@pytest.fixture
def look(tmp_path):
    """Polls once; returns what was seen, what is to be told, and the reports that the ring holds."""

    def make(answer, *, visible=None, **parts):
        ras = FakeRas(answer)
        ras.seen = visible
        made = eyes(tmp_path, ras, FakeDirectory(attempt()), **parts)
        observation, trouble = poll(made, attempt())
        return observation, trouble, [kept.raw() for kept in made.ring.polls(attempt().attempt_id)]

    return make


def test_a_report(look):
    observation, trouble, kept = look(ONE)
    assert isinstance(observation, Sighting)
    assert list(observation.report.records) == ["0xa/0x1:0x2"]
    assert (observation.visible, trouble, kept) == (None, None, [ONE])


def test_several_meshes_are_one_report_and_all_are_retained(look):
    observation, trouble, kept = look((ONE, OTHER), visible=(4, 6))
    assert isinstance(observation, Sighting)
    assert list(observation.report.records) == ["0xa/0x1:0x2", "0xb/0x1:0x2"]
    assert (observation.visible, trouble, kept) == ((4, 6), None, [ONE, OTHER])


@pytest.mark.parametrize("answers", [(ONE[:-9], OTHER), (OTHER, ONE[:-9])])
def test_an_answer_that_cannot_be_read_does_not_cost_the_others(look, answers):
    observation, trouble, kept = look(answers)
    assert isinstance(observation, Sighting)
    assert list(observation.report.records) == ["0xb/0x1:0x2"]
    assert isinstance(trouble, RasTruncated)
    assert kept == list(answers)


def test_where_none_can_be_read_there_is_no_report(look):
    observation, trouble, kept = look((ONE[:-9], b"HTTP/1.1 400 Bad Request"))
    assert isinstance(observation, Blank)
    assert "in the middle" in observation.reason
    assert "HTTP/1.1" in observation.reason
    assert (observation.permanent, trouble, len(kept)) == (False, None, 2)


@pytest.mark.parametrize(
    ("error", "permanent"),
    [(RasTooOld("old"), True), (RasTruncated("cut"), False), (ClusterError("x"), False)],
)
def test_why_there_is_none(look, error, permanent):
    observation, trouble, kept = look(error)
    assert isinstance(observation, Blank)
    assert (observation.reason, observation.permanent) == (str(error), permanent)
    assert (trouble, kept) == (None, [])


def test_a_history_that_cannot_be_kept_does_not_stop_the_watch(look, tmp_path):
    (tmp_path / "file").write_text("")
    observation, trouble, _ = look((ONE, ONE[:-9]), ring=RasRing(tmp_path / "file", 20))
    assert isinstance(observation, Sighting)
    assert "spool_path" in str(trouble)
    assert "in the middle" in str(trouble)
