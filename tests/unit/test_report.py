"""Every recorded answer of NCCL's server parses to the right thing, or to the right error."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.hang import decoding
from tasks.hang.counts import minority, sides, skewed
from tasks.hang.errors import RasError, RasMalformed, RasTruncated
from tasks.hang.report import parse_report
from tests.reports import RUNNING, communicator, missing, rank, report, world

DATA = Path(__file__).parents[1] / "data" / "ras"
JSON_FILES = sorted(DATA.glob("v*/**/*.json"))
OTHER_FILES = sorted(p for p in DATA.glob("v*/**/*") if p.is_file() and p.suffix != ".json")


def decoded(raw: bytes):
    return [record.decode() for record in parse_report(raw).records.values()]


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda p: str(p.relative_to(DATA)))
def test_a_recorded_report_is_read_in_full(path):
    raw = path.read_bytes()
    parsed = parse_report(raw)
    document = json.loads(raw) if not parsed.repaired else None
    if document is None:
        assert path.parts[-2] == "v2.28.9"
        return
    expected = [c for c in document["communicators"] if c["size"]]
    assert len(parsed.records) == len(expected)
    assert parsed.timeouts_count == document["ras"]["timeouts_count"]
    for wanted, record in zip(expected, parsed.records.values(), strict=True):
        got = record.decode()
        assert got.key == f"{wanted['hash']}/{wanted['secondary_hash']}"
        assert [(r.rank, r.host, r.pid) for r in got.ranks] == [
            (r["rank"], r["host"], r["pid"]) for r in wanted["ranks"]
        ]
        assert [dict(r.counts) for r in got.ranks] == [r["collective_counts"] for r in wanted["ranks"]]
        assert [(m.rank, m.unresponsive, m.considered_dead) for m in got.missing] == [
            (m["rank"], m["status"]["unresponsive"], m["status"]["considered_dead"])
            for m in wanted["missing_ranks"]
        ]


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda p: str(p.relative_to(DATA)))
def test_anything_else_that_was_recorded_is_refused_as_no_report(path):
    with pytest.raises(RasMalformed, match="not a RAS report"):
        parse_report(path.read_bytes())


def test_recorded_files_are_there():
    assert len(JSON_FILES) > 40
    assert len(OTHER_FILES) > 40


@pytest.mark.parametrize(
    ("name", "lagging", "leading"),
    [
        ("mismatch_one_rank_behind_n8", (5,), (0, 1, 2, 3, 4, 6, 7)),
        ("mismatch_one_rank_ahead_n8", (0, 1, 2, 4, 5, 6, 7), (3,)),
        ("mismatch_wrong_collective_n8", (5,), (0, 1, 2, 3, 4, 6, 7)),
    ],
)
def test_the_sides_of_a_recorded_mismatch(name, lagging, leading):
    (found,) = decoded((DATA / "v2.30.7" / f"{name}.json").read_bytes())
    assert sides(found.counts) == (lagging, leading)


def test_the_missing_comma_of_nccl_2_28_is_mended_and_the_missing_rank_is_read():
    parsed = parse_report((DATA / "v2.28.9" / "killed_proc_one_comm_n8.json").read_bytes())
    assert parsed.repaired
    (record,) = parsed.records.values()
    assert [m.rank for m in record.decode().missing] == [6]


def test_a_cut_report_is_truncated_wherever_it_is_cut():
    raw = report(world(5, 4), world(5, 5, name="0xb"))
    end = raw.rstrip()
    for length in range(1, len(end)):
        with pytest.raises(RasTruncated):
            parse_report(end[:length])
    assert len(parse_report(end).records) == 2


def test_a_cut_report_of_nccl_2_28_is_truncated_too():
    raw = (DATA / "v2.28.9" / "killed_proc_one_comm_n8.json").read_bytes()
    with pytest.raises(RasTruncated):
        parse_report(raw[:-40])


def test_equal_hash_with_other_secondary_hash_is_another_communicator():
    parsed = parse_report(report(world(5, 4, secondary="0x1:0x1"), world(9, 9, secondary="0x1:0x2")))
    assert list(parsed.records) == ["0xa/0x1:0x1", "0xa/0x1:0x2"]


def test_a_record_without_identity_is_dropped_and_counted():
    parsed = parse_report(report({**world(), "hash": "0x0", "size": 0}, world(1, 1)))
    assert (len(parsed.records), parsed.dropped) == (1, 1)


def test_a_function_that_one_rank_does_not_name_is_a_mismatch():
    (found,) = decoded(report(communicator([rank(0, {"AllToAll": 3, "AllReduce": 5}), rank(1, 5)])))
    assert skewed(found.counts) == ("AllToAll",)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, "RUNNING"),
        ({"init_state": 7}, "INIT"),
        ({"init_state": 2}, "INIT"),
        ({"finalize_called": True}, "FINALIZE"),
        ({"destroy_flag": True}, "FINALIZE"),
        ({"destroy_flag": True, "abort_flag": True}, "ABORT"),
        ({"abort_flag": None}, "UNKNOWN"),
        ({"init_state": None}, "UNKNOWN"),
    ],
)
def test_the_status_word_of_a_rank(status, expected):
    (found,) = decoded(report(communicator([rank(0, 1, status={**RUNNING, **status})])))
    assert found.ranks[0].status == expected


@pytest.mark.parametrize("status", [None, {}, {"init_state": 0}])
def test_a_status_that_is_not_there_is_unknown_and_the_rest_is_read(status):
    (found,) = decoded(report(communicator([rank(0, 5, status=status), rank(1, 4)])))
    assert [r.status for r in found.ranks] == ["UNKNOWN", "RUNNING"]
    assert found.all_running


def test_a_rank_without_a_number_is_refused_with_the_communicator_and_the_path():
    raw = report(communicator([{"host": "h", "pid": 1}]))
    with pytest.raises(RasMalformed, match=r"0xa/0x1:0x2: .*ranks\[0\]"):
        decoded(raw)


def test_the_same_record_has_the_same_digest_whatever_stands_around_it():
    one = parse_report(report(world(5, 4), timestamp="2026-12-01 03:00:00"))
    two = parse_report(report(world(5, 4), timestamp="2026-12-01 03:00:15"))
    three = parse_report(report(world(5, 5)))
    key = "0xa/0x1:0x2"
    assert one.records[key].digest == two.records[key].digest != three.records[key].digest


@pytest.mark.parametrize("missing_field", ["status", "collective_counts", "host", "pid", "nvml_dev"])
def test_a_rank_that_says_less_is_read_as_far_as_it_goes(missing_field):
    short = {name: value for name, value in rank(1, 4).items() if name != missing_field}
    (found,) = decoded(report(communicator([rank(0, 5), short, rank(2, 5)])))
    assert [r.rank for r in found.ranks] == [0, 1, 2]
    assert found.ranks[1].status == ("UNKNOWN" if missing_field == "status" else "RUNNING")
    assert dict(found.ranks[1].counts).get("AllReduce") == (
        None if missing_field == "collective_counts" else 4
    )


@pytest.mark.parametrize(
    "other",
    [
        {"init_state": 7},
        {"async_error": 7},
        {"finalize_called": True},
        {"destroy_flag": True},
        {"abort_flag": True},
        {"abort_flag": None},
    ],
)
def test_a_communicator_is_plain_only_while_all_of_its_ranks_run(other):
    odd = communicator([rank(0, 5), rank(1, 4, status={**RUNNING, **other})], name="0xb")
    parsed = parse_report(report(world(5, 4), odd))
    assert [record.plain for record in parsed.records.values()] == [True, False]


def test_a_communicator_without_a_member_is_not_plain():
    fewer = {**world(5, 4, name="0xb"), "size": 3}
    parsed = parse_report(report(communicator([rank(0, 1)], [missing(1)]), fewer))
    assert [record.plain for record in parsed.records.values()] == [False, False]
    assert parsed.entries == 4


def test_of_a_communicator_that_is_there_twice_the_record_with_more_ranks_is_kept():
    for records in ((world(1), world(2, 3), world(4)), (world(2, 3), world(1), world(4))):
        parsed = parse_report(report(*records))
        assert (len(parsed.records), parsed.dropped) == (1, 2)
        (record,) = parsed.records.values()
        assert [dict(r.counts)["AllReduce"] for r in record.decode().ranks] == [2, 3]


def test_ranks_that_say_the_same_are_a_group_and_share_what_they_say():
    aborts = rank(3, 5, status={**RUNNING, "abort_flag": True})
    (found,) = decoded(report(communicator([rank(0, 5), rank(1, 4), rank(2, 5), aborts], [missing(4)])))
    assert [(told.status, numbers) for told, numbers in found.said.groups] == [
        ("RUNNING", (0, 2)),
        ("RUNNING", (1,)),
        ("ABORT", (3,)),
    ]
    assert found.counts[0] is found.counts[2]
    assert found.processes == {number: ("10.0.0.1", 1000 + number, number) for number in range(5)}


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_another_layout_says_the_same_and_is_looked_into(indent):
    raw = report(world(5, 4), communicator([rank(0, 1)], [missing(1)], name="0xb"))
    nccl, other = parse_report(raw), parse_report(json.dumps(json.loads(raw), indent=indent).encode())
    assert [*nccl.records] == [*other.records]
    assert not any(record.plain for record in other.records.values())
    assert [record.decode() for record in nccl.records.values()] == [
        record.decode() for record in other.records.values()
    ]


def test_missing_ranks_are_read():
    (found,) = decoded(report(communicator([rank(0, 1)], [missing(1, considered_dead=True)])))
    assert found.missing[0].considered_dead
    assert found.member(1) == found.missing[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_sides_split_all_ranks_and_the_lagging_ones_are_behind(counts):
    ranks = {i: (("AllReduce", n),) for i, n in enumerate(counts)}
    lagging, leading = sides(ranks)
    if len(set(counts)) == 1:
        assert (lagging, leading, minority(ranks)) == ((), (), ())
        return
    assert sorted((*lagging, *leading)) == list(ranks)
    assert min(counts) in {counts[i] for i in lagging}
    assert max(counts) in {counts[i] for i in leading}
    assert 0 < len(minority(ranks)) < len(counts)


@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_no_bytes_ever_give_anything_but_a_report_or_a_typed_error(raw):
    with contextlib.suppress(RasError):
        assert parse_report(raw).records is not None


def test_groups_of_a_job_that_do_the_same_share_what_they_say_and_processes_are_told_of_once():
    one = communicator([rank(0, 5), rank(1, 4)], name="0xa")
    same = communicator([rank(0, 5), rank(1, 4)], name="0xb")
    other = communicator([rank(0, 5), rank(1, 5)], name="0xc")
    first, second, third = decoded(report(one, same, other))
    assert first.said is second.said
    assert first.counts is second.counts
    assert third.counts == {0: first.counts[0], 1: first.counts[0]}
    assert first.members is second.members is third.members
    (again,) = decoded(report(one))
    assert again.members is first.members
    assert again.counts == first.counts


def test_who_the_ranks_are_is_read_anew_when_it_changes():
    (before,) = decoded(report(communicator([rank(0, 5), rank(1, 4)])))
    (after,) = decoded(report(communicator([rank(0, 5), rank(1, 4, pid=77)])))
    assert before.processes[0] == after.processes[0]
    assert after.processes[1] == (*before.processes[1][:1], 77, *before.processes[1][2:])


def test_what_is_kept_of_processes_has_a_bound(monkeypatch):
    monkeypatch.setattr(decoding, "known", decoding.Known(most_ranks=5))
    for pid in range(40):
        (found,) = decoded(report(communicator([rank(0, 5, pid=pid), rank(1, 4, pid=pid)])))
        assert [process[1] for process in found.processes.values()] == [pid, pid]
        assert len(decoding.known.members) <= 2
        assert len(decoding.known.processes) <= 5
