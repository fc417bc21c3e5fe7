"""Whatever happens to a report on its way: a report or a typed error, and never a wrong record.

Recorded reports are damaged in every way that a network, a crash or another NCCL might damage them. The
oracle is the long way: msgspec, which reads all of a document as JSON.
"""

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.hang import report as reading
from tasks.hang.errors import RasError, RasMalformed
from tasks.hang.report import RasReport, parse_report
from tests.reports import communicator, missing, rank, report, world

DATA = Path(__file__).parents[1] / "data" / "ras"
FILES = sorted(DATA.glob("v*/**/*.json"))
SMALL = [path for path in FILES if path.stat().st_size < 20_000]
MIXED = [path for path in SMALL if path.read_bytes().count(b'\n      "hash"') > 1]

RECORD = re.compile(rb"\n    \{\n.*?\n    \}", re.DOTALL)
ENTRY = re.compile(rb"\n        \{\n.*?\n        \}", re.DOTALL)
NUMBER = re.compile(rb"(?<=: )-?\d+(\.\d+)?")
VALUE = re.compile(rb'(?<=: )("[^"\n]*"|-?\d[\d.]*|true|false)')
NUMBERS = (b"0", b"-1", b"1", b"7", b"08", b"18446744073709551615", b"18446744073709551616", b"1e5", b"1.5")
VALUES = (
    b"null",
    b"true",
    b"false",
    b'""',
    b'"x"',
    b"[]",
    b"{}",
    b"1e999",
    b"9" * 400,
    b'"\\ud800"',
    b'"\xff"',
)

PIECEWISE = ("delete", "double", "again", "swap")

thorough = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(work: Callable[[], object]) -> object:
    """What comes out of it; of an error its type. Anything but a RasError is passed on and fails the test."""
    try:
        return work()
    except RasError as error:
        return type(error)


def the_long_way(raw: bytes) -> RasReport:
    """The report as msgspec reads it, without the layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_split", lambda _: None)
        return parse_report(raw)


def spliced(raw: bytes, at: tuple[int, int], piece: bytes) -> bytes:
    return raw[: at[0]] + piece + raw[at[1] :]


@st.composite
def spans(draw, raw: bytes):
    """A piece of a document: of any length, or one of its lines, entries or records."""
    unit = draw(st.sampled_from(("bytes", "line", "entry", "record")))
    if unit == "bytes":
        start = draw(st.integers(0, len(raw)))
        return start, draw(st.integers(start, min(len(raw), start + draw(st.sampled_from((1, 40, 5000))))))
    if unit == "line":
        lines = [at.start() for at in re.finditer(rb"\n", raw)] + [len(raw)] * 2
        index = draw(st.integers(0, len(lines) - 2))
        return lines[index], lines[index + 1]
    found = [at.span() for at in (RECORD if unit == "record" else ENTRY).finditer(raw)]
    start, end = draw(st.sampled_from(found)) if found else (0, 0)
    # With its comma: what is left is JSON again, and only the counts lie.
    return start, min(len(raw), end + (raw[end : end + 1] == b","))


@st.composite
def damaged(draw, files=SMALL):
    """A report as recorded, and after its damage."""
    before = after = draw(st.sampled_from(files)).read_bytes()
    for _ in range(draw(st.integers(1, 3))):
        after = draw(damage(after))
    return before, after


@st.composite
def damage(draw, raw: bytes):
    kind = draw(st.sampled_from((*PIECEWISE, "cut", "flip", "number", "value", "retell")))
    match kind:
        case "cut":
            after = raw[: draw(st.integers(0, len(raw)))]
        case "flip":
            at = draw(st.integers(0, max(0, len(raw) - 1)))
            after = spliced(raw, (at, at + 1), draw(st.binary(min_size=1, max_size=1)))
        case "number" | "value":
            found = [at.span() for at in (NUMBER if kind == "number" else VALUE).finditer(raw)]
            new = draw(st.sampled_from(NUMBERS if kind == "number" else VALUES))
            after = spliced(raw, draw(st.sampled_from(found)), new) if found else raw
        case "retell":
            after = retold(raw, draw(st.sampled_from((None, 1, 2, 4))), backwards=draw(st.booleans()))
        case _:
            after = moved(kind, raw, draw(spans(raw)), draw(spans(raw)))
    return after


def moved(kind: str, raw: bytes, one: tuple[int, int], other: tuple[int, int]) -> bytes:
    """One piece deleted, doubled, or told again elsewhere; or two pieces in each other's place."""
    piece = raw[slice(*one)]
    if kind == "delete":
        return spliced(raw, one, b"")
    if kind == "double":
        return spliced(raw, (one[1], one[1]), piece)
    if kind == "again" or other[0] < one[1]:
        return spliced(raw, (other[0], other[0]), piece)
    return spliced(spliced(raw, other, piece), one, raw[slice(*other)])


def retold(raw: bytes, indent: int | None, *, backwards: bool) -> bytes:
    """The same document in another layout, if it is one."""
    try:
        plain = json.loads(raw)
        return json.dumps(turned(plain) if backwards else plain, indent=indent).encode()
    except ValueError:
        return raw


def turned(value):
    """The same with the keys of each object in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(each) for key, each in reversed(value.items())}
    return [turned(each) for each in value] if isinstance(value, list) else value


def identity(found: RasReport) -> object:
    return (
        found.nccl_version,
        found.timestamp,
        found.timeouts_count,
        found.collection_time_s,
        found.repaired,
        found.dropped,
        [(r.key, r.size, r.ranks_count, r.missing_ranks_count, r.digest) for r in found.records.values()],
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DATA)))
def test_a_recorded_report_is_split_by_its_layout_as_msgspec_would(path):
    raw = path.read_bytes()
    short, long = parse_report(raw), the_long_way(raw)
    assert all(record.exact for record in short.records.values())
    assert not any(record.exact for record in long.records.values())
    if short.repaired:  # mended as a whole or record by record: the bytes differ by a comma
        assert [*short.records] == [*long.records]
        assert long.repaired
    else:
        assert identity(short) == identity(long)
    assert short.entries == long.entries == raw.count(b'"rank": ')
    for record in short.records.values():
        assert record.decode() == long.records[record.key].decode()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DATA)))
def test_a_recorded_communicator_is_plain_exactly_if_all_of_it_runs(path):
    for record in parse_report(path.read_bytes()).records.values():
        found = record.decode()
        runs = all(state.status == "RUNNING" and state.async_error == 0 for state in found.ranks)
        assert record.plain == (runs and len(found.ranks) == record.size)


@thorough
@given(damaged() | damaged(MIXED), st.booleans())
def test_a_damaged_report_is_read_as_msgspec_reads_it_or_refused_with_a_typed_error(pair, known):
    before, raw = pair
    reading._full_head.cache_clear()
    if known:  # the last poll went well, and tells how long each record is
        parse_report(before)
    short, long = outcome(lambda: parse_report(raw)), outcome(lambda: the_long_way(raw))
    if not isinstance(short, RasReport):
        assert short is long
        return
    decoded = {key: outcome(record.decode) for key, record in short.records.items()}
    if isinstance(long, RasReport):
        if not short.repaired:
            assert identity(short) == identity(long)
        assert decoded == {key: outcome(record.decode) for key, record in long.records.items()}
    elif not short.dropped:
        # Damage inside of a record is found when that is looked into.
        assert RasMalformed in decoded.values()
    # NCCL counts the ranks that it prints. Damage that makes it count wrong is not seen without looking.
    if all(
        d is not RasMalformed and len(d.ranks) == short.records[key].ranks_count for key, d in decoded.items()
    ):
        for key, record in short.records.items():
            runs = {(state.status, state.async_error) for state in decoded[key].ranks} == {("RUNNING", 0)}
            assert not record.plain or (
                runs and len(decoded[key].ranks) == record.size and not decoded[key].missing
            )


@thorough
@given(damaged())
def test_reading_a_damaged_report_takes_memory_in_proportion_to_its_size(pair):
    _, raw = pair
    tracemalloc.start()
    try:
        found = outcome(lambda: parse_report(raw))
        if isinstance(found, RasReport):
            for record in found.records.values():
                outcome(record.decode)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * len(raw) + 200_000


def nested(count: int) -> bytes:
    return b'{"communicators": ' + b"[" * count + b"]" * count + b"}"


HOSTILE = {
    "nothing but openings": lambda count: b'{"communicators": [' * count,
    "nested lists": nested,
    "spaces where NCCL 2.28 forgets a comma": lambda count: b'{"nvml_dev": 1' + b" \n" * count + b"}",
    "empty records": lambda count: reading_of(b'\n    {\n      "hash": "0x1"\n    }', count),
    "records without an end": lambda count: reading_of(b'\n    {\n      "hash": "0x1",', count),
    "heads without ranks": lambda count: reading_of(
        b'\n    {\n      "hash": "0x1"\n    }' + b" " * 5000, count // 200
    ),
    "one long head": lambda count: reading_of(b'\n    {\n      "hash": "' + b"0" * count + b'"\n    }', 1),
    "many communicators": lambda count: report(*(world(1, name=hex(i)) for i in range(1, count // 50))),
    "one large communicator": lambda count: report(world(*([1] * (count // 50)))),
    "many missing ranks": lambda count: report(
        communicator([rank(0, 1)], [missing(i) for i in range(1, count // 50)])
    ),
}


def reading_of(record: bytes, count: int) -> bytes:
    head = b'{\n  "communicators_count": %d,\n  "communicators": [' % count
    return head + b",".join([record] * count) + b'\n  ],\n  "ras": {\n  }\n}\n'


@pytest.mark.parametrize("kind", HOSTILE)
def test_time_grows_no_faster_than_the_document(kind):
    def cpu_s(raw: bytes) -> float:
        taken = []
        for _ in range(5):
            started = time.process_time()
            found = outcome(lambda: parse_report(raw))
            if isinstance(found, RasReport):
                for record in found.records.values():
                    outcome(record.decode)
            taken.append(time.process_time() - started)
        return min(taken)

    small, large = HOSTILE[kind](4_000), HOSTILE[kind](64_000)
    growth = len(large) / len(small)
    # Quadratic would be 16 times the growth in size; the constant is for what does not grow at all.
    assert cpu_s(large) < 4 * growth * cpu_s(small) + 0.01


# What a rank may say that looks like NCCL's layout and is not: (what NCCL prints, what stands there instead).
ODD = {
    "a status before the status": (
        b'"pid": 1001,',
        b'"pid": 1001,\n          "status": {"abort_flag": true},',
    ),
    "a number and a pid again": (
        b'"collective_counts": {',
        b'"pid": 7, "rank": 9,\n          "collective_counts": {',
    ),
    "another number before the status": (b'"pid": 1001,', b'"pid": 1001,\n          "rank": 9,'),
    "two numbers": (b'"rank": 101,', b'"rank": 1,7,'),
    "a number that is none": (b'"rank": 101,', b'"rank": 0_1,'),
    "a comma too many": (b'"Reduce": 0,', b'"Reduce": 0,,'),
    "a state after the counts": (
        b'"AllReduce": 5\n          }',
        b'"AllReduce": 5\n          },\n          "status": {}',
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_rank_that_only_looks_like_one_of_nccl_is_read_as_json(kind):
    process = {"pid": 1001, "cuda_dev": 0, "nvml_dev": 0}
    nccl = report(communicator([{**rank(number, 5), **process} for number in (100, 101, 102)]))
    raw = nccl.replace(*ODD[kind])
    assert raw != nccl
    (record,) = parse_report(raw).records.values()
    assert record.exact
    long = outcome(lambda: the_long_way(raw))
    if isinstance(long, RasReport):
        assert record.decode() == long.records[record.key].decode()
    else:
        assert outcome(record.decode) is RasMalformed
