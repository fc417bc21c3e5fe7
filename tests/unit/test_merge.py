"""Several answers about one job, as one report."""

from typing import Any

import pytest

from tasks.hang.merge import merge_reports
from tasks.hang.report import RasReport, parse_report
from tests.reports import communicator, missing, rank, report, world


def parsed(*communicators, timeouts: int = 0, seconds: float = 0.001, **fields) -> RasReport:
    ras = {"collection_time_sec": seconds, "timeouts_count": timeouts}
    return parse_report(report(*communicators, ras=ras, **fields))


def test_separate_meshes_lie_side_by_side():
    merged = merge_reports([parsed(world(1, 2, name="0xa")), parsed(world(3, name="0xb"))])
    assert list(merged.records) == ["0xa/0x1:0x2", "0xb/0x1:0x2"]
    assert merged.records["0xb/0x1:0x2"].decode().counts.keys() == {0}


def test_the_same_hash_under_another_second_one_is_another_communicator():
    merged = merge_reports([parsed(world(1)), parsed(world(2, secondary="0x1:0x3"))])
    assert len(merged.records) == 2


def partly(present: int, lost: int = 0) -> dict[str, Any]:
    return communicator(
        [rank(i, present) for i in range(present)], [missing(i) for i in range(present, present + lost)]
    )


@pytest.mark.parametrize(
    ("answers", "best"),
    [
        ([partly(3, 1), partly(1, 3)], 0),
        ([partly(1, 3), partly(3, 1)], 1),
        ([partly(3, 1), partly(4)], 1),
        ([partly(3), partly(4)], 1),  # neither says that anybody is missing
        ([partly(4), partly(3)], 0),
        ([partly(1, 3), partly(3, 1), partly(2, 2)], 1),
        ([world(1, 1), world(2, 2)], 0),
    ],
)
@pytest.mark.parametrize("among_others", [False, True])
def test_of_two_answers_about_one_the_one_that_knows_more(answers, best, among_others):
    beside = [world(9, name=f"0xb{i}") for i in range(len(answers))] if among_others else []
    reports = [parsed(answer, *beside[i : i + 1]) for i, answer in enumerate(answers)]
    merged = merge_reports(reports)
    assert merged.records["0xa/0x1:0x2"] == reports[best].records["0xa/0x1:0x2"]
    assert len(merged.records) == 1 + len(beside)


def test_what_spoils_one_spoils_the_whole():
    blank = communicator([], name="0x0")
    first = parsed(world(1), blank, timeouts=1, seconds=0.5, timestamp="first")
    second = parsed(
        world(2, name="0xb"), blank, blank, timeouts=4, seconds=0.1, timestamp="2", nccl_version="9"
    )
    merged = merge_reports([first, second])
    assert (merged.timeouts_count, merged.collection_time_s, merged.dropped) == (4, 0.5, 3)
    assert (merged.nccl_version, merged.timestamp) == ("2.30.7", "first")


def test_one_that_had_to_be_mended_is_told_of():
    raw = report(communicator([rank(0, 1)], [missing(1)]))
    mended = parse_report(raw.replace(b'"nvml_dev": 1,\n', b'"nvml_dev": 1\n'))
    assert mended.repaired
    assert merge_reports([parsed(world(1, name="0xb")), mended]).repaired


def test_one_answer_is_itself():
    only = parsed(world(1, 2))
    assert merge_reports([only]) is only


def test_no_answer_is_no_report():
    with pytest.raises(ValueError, match="no report"):
        merge_reports([])
