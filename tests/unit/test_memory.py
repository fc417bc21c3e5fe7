"""What a shift leaves to the next one: complete, and small at any size of the job."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tasks.hang.counts import FUNCTIONS
from tasks.hang.memory import recall, remember
from tasks.hang.policy import HangPolicy
from tasks.hang.states import (
    Aside,
    Blind,
    Confirmed,
    Freeze,
    Frozen,
    Idle,
    Progressing,
    Suspected,
)
from tasks.hang.states import (
    Testimony as Said,
)
from tasks.hang.window import Window
from tests.reports import at, communicator, missing, rank, report
from tests.simulated_job import Watcher, everyone, moving, standing, waiting

LIMIT_BYTES = 64_000
POLICY = HangPolicy(poll_interval_s=10, suspect_after_s=20, confirm_duration_s=60, repeat_every_s=1000)

# ---- round trip ------------------------------------------------------------------------------------------

moments = st.integers(0, 100_000).map(at)
ranks = st.lists(st.integers(0, 40), max_size=6, unique=True).map(sorted).map(tuple)
launched = st.one_of(
    st.tuples(*[st.integers(0, 10**12)] * len(FUNCTIONS)).map(
        lambda numbers: tuple(zip(FUNCTIONS, numbers, strict=True))
    ),
    st.lists(st.sampled_from(["AllToAll", "AllReduce", "Send-Recv", "X=Y"]), max_size=3, unique=True).flatmap(
        lambda names: st.tuples(*[st.integers(0, 9)] * len(names)).map(
            lambda n: tuple(zip(names, n, strict=True))
        )
    ),
)
freezes = st.builds(
    Freeze,
    kind=st.sampled_from(["mismatch", "unresponsive", "symmetric", "init"]),
    since=moments,
    repeated=st.booleans(),
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
    size=st.integers(1, 64),
    counts=st.dictionaries(st.integers(0, 40), launched, max_size=8),
    lagging=ranks,
    leading=ranks,
    missing=ranks,
    silent=ranks,
    exact=st.booleans(),
    departed=ranks,
    remark=st.sampled_from(["", "rank 1 is still in its init"]),
    processes=st.just({0: ("10.0.0.1", 1000, 0)}),
    idle_until=st.none() | moments,
    extended=st.booleans(),
    asked_at=st.none() | moments,
    asked=ranks,
    testimony=st.none()
    | st.builds(
        Said,
        finding=st.sampled_from(["stuck", "moves", "gone", "unclear"]),
        reason=st.sampled_from(["", "rank 1 works"]),
        strong=st.booleans(),
        waits=st.booleans(),
    ),
)
states = st.one_of(
    st.builds(Progressing, digest=st.just("d"), since=moments, size=st.just(4)),
    st.builds(Aside, what=st.just("unobservable"), digest=st.just("d"), since=moments, size=st.just(4)),
    st.builds(Frozen, freezes),
    st.builds(Suspected, freezes, moments),
    st.builds(Idle, freezes, moments),
    st.builds(Confirmed, freezes, moments),
)
windows = st.builds(
    Window,
    attempt_id=st.just("one"),
    communicators=st.dictionaries(st.sampled_from(["0xa/0x1:0x2", "0xb/0x1:0x2", "0xc/"]), states),
    envelopes=st.dictionaries(st.sampled_from(["0xa/0x1:0x2", "0xd/"]), st.floats(1, 1e6)),
    blind=st.none() | st.builds(Blind, since=moments, reason=st.text(max_size=20), permanent=st.booleans()),
    failed_polls=st.integers(0, 50),
    failing_since=st.none() | moments,
    last_report_at=st.none() | moments,
    visible=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    nccl_version=st.sampled_from(["", "2.30.7"]),
    entries=st.integers(0, 10**6),
    opened_at=st.none() | moments,
)


KEPT = (
    "attempt_id",
    "envelopes",
    "blind",
    "failed_polls",
    "failing_since",
    "last_report_at",
    "visible",
    "nccl_version",
    "entries",
    "opened_at",
)


def lasting(state):
    """Whether the next report does not show it again."""
    if isinstance(state, Frozen):
        return state.freeze.kind != "symmetric"
    return isinstance(state, Suspected | Idle | Confirmed)


def as_kept(state):
    """A state as it comes back: an open question is asked again, an answer counts on without its words."""
    freeze, changes = state.freeze, {"processes": {}}
    if freeze.testimony is None:
        changes |= {"asked_at": None, "asked": ()}
    elif not isinstance(state, Confirmed):
        changes["testimony"] = replace(freeze.testimony, reason="")
    return replace(state, freeze=replace(freeze, **changes))


@given(window=windows)
@settings(deadline=None)
def test_what_matters_comes_back_as_it_was(window):
    document = json.loads(json.dumps(remember(window)))
    expected = {key: as_kept(state) for key, state in window.communicators.items() if lasting(state)}
    again = recall(document, "one")
    assert again.communicators == expected
    assert again.partial
    assert {name: getattr(again, name) for name in KEPT} == {name: getattr(window, name) for name in KEPT}
    assert remember(again) == document


@given(window=windows)
@settings(deadline=None, max_examples=20)
def test_another_attempt_starts_clean(window):
    assert recall(remember(window), "two") == Window(attempt_id="two")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"attempt_id": "one", "communicators": 3},
        {"attempt_id": "one", "communicators": {"0xa/": {"state": "odd"}}},
        {
            "attempt_id": "one",
            "communicators": {
                "0xa/": {
                    "state": "frozen",
                    "since": "2026-12-01T03:00:00Z",
                    "polls": 1,
                    "digest": "d",
                    "size": 2,
                    "lagging": "x",
                }
            },
        },
    ],
)
def test_what_cannot_be_read_is_forgotten(document):
    assert recall(document, "one") == Window(attempt_id="one")


# ---- size ------------------------------------------------------------------------------------------------

PICK = random.Random(3)


def hexes(digits):
    return f"0x{PICK.getrandbits(4 * digits):0{digits}x}"


def key():
    return f"{hexes(16)}/{hexes(16)}:{hexes(16)}"


def counted(*numbers):
    return tuple(zip(FUNCTIONS, numbers, strict=True))


def stuck(size, *, kind="mismatch", apart=3, asked=False):
    """A freeze of a job that ran for days: a few ranks are behind, each in another place."""
    base = PICK.randrange(10**5, 10**7)
    common = counted(17, 0, base, base // 2, 3 * base)
    behind = sorted(PICK.sample(range(size), min(apart, size - 1))) if kind == "mismatch" else []
    counts = dict.fromkeys(range(size), common)
    counts |= {number: counted(17, 0, base, base // 2, 3 * base - 1 - number) for number in behind}
    return Freeze(
        kind=kind,
        since=at(PICK.randrange(10_000)),
        repeated=True,
        digest=hexes(32)[2:],
        size=size,
        counts=counts,
        lagging=tuple(behind),
        leading=tuple(sorted(set(range(size)) - set(behind))),
        missing=(),
        processes={number: ("10.0.0.1", 1000 + number, number % 8) for number in range(size)},
        asked_at=at(10_500) if asked else None,
        asked=tuple(behind) if kind == "mismatch" else tuple(range(size)),
        testimony=Said("moves", "rank 1 works", waits=True) if asked else None,
    )


def job(frozen, of=2000):
    moving_on = {
        key(): Progressing(digest=hexes(32)[2:], since=at(0), size=PICK.randrange(8, 512))
        for _ in range(of - len(frozen))
    }
    envelopes = {key(): 500.0 + number for number in range(50)}
    stalled = {key(): state for state in frozen}
    return Window(
        attempt_id=hexes(32),
        communicators={**moving_on, **stalled},
        envelopes=envelopes,
        last_report_at=at(11_000),
    )


def sizes(number):
    return [PICK.choice([8, 16, 32, 64, 128, 256, 512]) for _ in range(number)]


def size_of(window):
    return len(json.dumps(remember(window), separators=(",", ":")))


def suspected(freeze):
    return Suspected(freeze, at(10_990))


WORST = {
    # what: (window, bytes at most)
    "100 frozen of 2,000": (lambda: job([suspected(stuck(size)) for size in sizes(100)]), LIMIT_BYTES),
    "100 frozen of 2,000, witnesses asked": (
        lambda: job([suspected(stuck(size, asked=True)) for size in sizes(100)]), LIMIT_BYTES,
    ),
    "100 frozen, 16 ranks of each apart": (
        lambda: job([suspected(stuck(size, apart=min(16, size // 2))) for size in sizes(100)]), LIMIT_BYTES,
    ),
    "100 of 512, every rank its own counts": (
        lambda: job([suspected(stuck(512, apart=511)) for _ in range(100)]), LIMIT_BYTES,
    ),
    "all 2,000 frozen": (lambda: job([suspected(stuck(size)) for size in sizes(2000)]), 700_000),
    "all 2,000 symmetric": (
        lambda: job([suspected(stuck(size, kind="symmetric", asked=True)) for size in sizes(2000)]), 700_000,
    ),
    "all 2,000 symmetric for less than the suspect time": (
        lambda: job([Frozen(stuck(size, kind="symmetric")) for size in sizes(2000)]), 10_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WORST)
def test_it_stays_small(what):
    make, most_bytes = WORST[what]
    assert size_of(make()) < most_bytes


def test_however_much_is_left_out_every_freeze_is_there():
    window = job([suspected(stuck(512, apart=511)) for _ in range(100)])
    again = recall(remember(window), window.attempt_id)
    assert again.stalled.keys() == window.stalled.keys()
    kept = [name for name, freeze in again.stalled.items() if freeze.counts]
    left_out = [name for name, freeze in again.stalled.items() if not freeze.counts]
    assert kept
    assert left_out
    assert max(window.stalled[name].since for name in kept) <= min(
        window.stalled[name].since for name in left_out
    )
    for name, freeze in again.stalled.items():
        before = window.stalled[name]
        assert (freeze.digest, freeze.since, freeze.kind) == (before.digest, before.since, before.kind)
        assert freeze.counts in ({}, before.counts)


# ---- going on without the counts -----------------------------------------------------------------------

KEY = "0xa/0x1:0x2"
THERE = report(communicator([rank(0, 5), rank(1, 4), rank(2, 5)]))
HIDDEN = report(communicator([rank(0, 5), rank(1, 4)], [missing(2)]))


def without_counts():
    """A watcher after a restart that had no room for the counts of its only freeze."""
    watcher = Watcher(POLICY, everyone(waiting, r1=standing(1)))
    watcher.polls([THERE] * 4, every_s=10)
    crowd = {f"0x{n:x}/": suspected(replace(stuck(512, apart=511), since=at(-5000))) for n in range(16, 40)}
    document = remember(replace(watcher.window, communicators={**watcher.window.communicators, **crowd}))
    document["communicators"] = {KEY: document["communicators"][KEY]}
    assert document["communicators"][KEY].get("counts", {}) == {}
    watcher.window = recall(document, "one")
    return watcher


def test_the_same_digest_proves_that_nothing_moved():
    watcher = without_counts()
    watcher.polls([THERE] * 6, every_s=10, start_s=40)
    (confirmed,) = watcher.of("confirmed")
    assert (confirmed.stalled_s, confirmed.lagging, confirmed.leading) == (60.0, (1,), (0, 2))
    assert watcher.names("confirmed") == [(60, "confirmed")]


def test_another_digest_proves_nothing_so_the_time_starts_anew():
    watcher = without_counts()
    watcher.polls([HIDDEN, *[THERE] * 12], every_s=10, start_s=40)
    (moment, _), *_ = watcher.names("confirmed")
    assert moment >= 40 + 60


def test_with_its_counts_a_freeze_goes_on_whoever_is_missing():
    watcher = Watcher(POLICY, everyone(waiting, r1=standing(1)))
    watcher.polls([THERE] * 4, every_s=10)
    watcher.restart()
    watcher.polls([HIDDEN, *[THERE] * 5], every_s=10, start_s=40)
    assert watcher.names("confirmed") == [(60, "confirmed")]


def test_an_extension_and_a_question_without_an_answer_survive():
    watcher = Watcher(POLICY, everyone(waiting, r1=moving(1)))
    for number in range(12):
        watcher.poll(number * 10.0, THERE)
        watcher.restart()
    assert watcher.names("confirmed") == [(90, "confirmed")]
    assert len([event for _, event in watcher.told if "this once" in event.reason]) == 1


def main():
    """Print what is measured: `python -m tests.unit.test_memory`."""
    for what, (make, _) in WORST.items():
        print(f"{what:55} {size_of(make()):>9,} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
