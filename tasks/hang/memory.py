"""What of a window must survive the process, as a document that stays small at any number of ranks.

Left out is what the next report shows again: communicators that move or are set aside, and equal counts that
stand still for less than the suspect time. Counts are written by groups of ranks that share them, ranks as
ranges. Where that is still too much, the counts of the youngest freezes are left out: the digest alone proves
that nothing moved, and only a record that changed without anybody moving starts its time anew.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from tasks.hang.counts import FUNCTIONS, Counts, ranges
from tasks.hang.policy import FreezeKind
from tasks.hang.states import Blind, Confirmed, Freeze, Frozen, Idle, State, Suspected, Testimony
from tasks.hang.window import Window

_BYTES = 56_000  # what freezes and envelopes may take together; a block is read and written whole
_ENVELOPE_BYTES = 60
_ENVELOPES_KEPT = 200

_States = Literal["frozen", "suspected", "idle", "confirmed"]


class _Kept(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A freeze. Ranks are texts like `0-6,8`; `counts` maps launches to the ranks that have them."""

    state: _States
    at: datetime | None = None
    kind: FreezeKind = "mismatch"
    since: datetime
    repeated: bool = True
    digest: str
    size: int
    counts: dict[str, str] = {}
    lagging: str = ""
    leading: str = ""
    missing: str = ""
    silent: str = ""
    departed: str = ""
    exact: bool = True
    extended: bool = False
    idle_until: datetime | None = None
    remark: str = ""
    asked_at: datetime | None = None
    asked: str = ""
    testimony: Testimony | None = None


class _Document(Struct, frozen=True, kw_only=True, omit_defaults=True):
    attempt_id: str
    communicators: dict[str, _Kept] = field(default_factory=dict)
    envelopes: dict[str, float] = field(default_factory=dict)
    blind: Blind | None = None
    failed_polls: int = 0
    failing_since: datetime | None = None
    last_report_at: datetime | None = None
    visible: tuple[int, int] | None = None
    nccl_version: str = ""
    entries: int = 0
    opened_at: datetime | None = None


def remember(window: Window) -> dict[str, Any]:
    """The window as a document of plain values."""
    kept = {key: _kept(state) for key, state in window.communicators.items() if _matters(state)}
    longest = sorted(window.envelopes.items(), key=lambda item: -item[1])[:_ENVELOPES_KEPT]
    document = _Document(
        attempt_id=window.attempt_id,
        communicators=_within_bounds(kept, _BYTES - _ENVELOPE_BYTES * len(longest)),
        envelopes=dict(longest),
        blind=window.blind,
        failed_polls=window.failed_polls,
        failing_since=window.failing_since,
        last_report_at=window.last_report_at,
        visible=window.visible,
        nccl_version=window.nccl_version,
        entries=window.entries,
        opened_at=window.opened_at,
    )
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return plain


def recall(document: Mapping[str, Any], attempt_id: str) -> Window:
    """The remembered window; a new one where it belongs to another attempt or cannot be read."""
    try:
        known = msgspec.convert(document, _Document, strict=False)
        states = {key: _recalled(kept) for key, kept in known.communicators.items()}
    except (msgspec.ValidationError, ValueError):
        return Window(attempt_id=attempt_id)
    if known.attempt_id != attempt_id:
        return Window(attempt_id=attempt_id)
    return Window(
        attempt_id=attempt_id,
        communicators=states,
        envelopes=known.envelopes,
        blind=known.blind,
        failed_polls=known.failed_polls,
        failing_since=known.failing_since,
        last_report_at=known.last_report_at,
        visible=known.visible,
        nccl_version=known.nccl_version,
        entries=known.entries,
        opened_at=known.opened_at,
        partial=True,
        still=len(states),
    )


def _matters(state: State) -> bool:
    if isinstance(state, Frozen):
        return state.freeze.kind != "symmetric"
    return isinstance(state, Suspected | Idle | Confirmed)


def _kept(state: State) -> _Kept:
    match state:
        case Suspected(freeze, told_at):
            return _kept_freeze("suspected", told_at, freeze)
        case Idle(freeze, told_at):
            return _kept_freeze("idle", told_at, freeze)
        case Confirmed(freeze, confirmed_at):
            return _kept_freeze("confirmed", confirmed_at, freeze)
        case Frozen(freeze):
            return _kept_freeze("frozen", None, freeze)
        case _:
            raise TypeError(f"{type(state).__name__} is not kept")


def _kept_freeze(state: _States, at: datetime | None, freeze: Freeze) -> _Kept:
    groups: dict[Counts, list[int]] = {}
    for rank, counts in freeze.counts.items():
        groups.setdefault(counts, []).append(rank)
    return _Kept(
        state=state,
        at=at,
        kind=freeze.kind,
        since=freeze.since,
        repeated=freeze.repeated,
        digest=freeze.digest,
        size=freeze.size,
        counts={_counts_text(counts): _ranks_text(ranks) for counts, ranks in groups.items()},
        lagging=_ranks_text(freeze.lagging),
        leading=_ranks_text(freeze.leading),
        missing=_ranks_text(freeze.missing),
        silent=_ranks_text(freeze.silent),
        departed=_ranks_text(freeze.departed),
        exact=freeze.exact,
        extended=freeze.extended,
        idle_until=freeze.idle_until,
        remark=freeze.remark,
        # A question that is open is asked again by whoever goes on, who then waits for the answer.
        asked_at=freeze.asked_at if freeze.testimony else None,
        asked=_ranks_text(freeze.asked) if freeze.testimony else "",
        testimony=_testimony(state, freeze.testimony),
    )


def _testimony(state: _States, said: Testimony | None) -> Testimony | None:
    """What a witness found still decides; the words are kept for a hang only."""
    return said if said is None or state == "confirmed" else replace(said, reason="")


def _within_bounds(kept: Mapping[str, _Kept], most_bytes: int) -> dict[str, _Kept]:
    """Keep counts from the oldest freeze on, as far as there is room."""
    bare = {key: replace(one, counts={}, leading="", lagging="") for key, one in kept.items()}
    left = most_bytes - sum(len(key) + _size(one) for key, one in bare.items())
    for key in sorted(kept, key=lambda key: (kept[key].state != "confirmed", kept[key].since)):
        left -= _size(kept[key]) - _size(bare[key])
        if left < 0:
            break
        bare[key] = kept[key]
    return bare


def _size(one: _Kept) -> int:
    return len(msgspec.json.encode(one))


def _recalled(kept: _Kept) -> State:
    freeze = Freeze(
        kind=kept.kind,
        since=kept.since,
        repeated=kept.repeated,
        digest=kept.digest,
        size=kept.size,
        counts={rank: _counts(text) for text, who in kept.counts.items() for rank in _ranks(who)},
        lagging=_ranks(kept.lagging),
        leading=_ranks(kept.leading),
        missing=_ranks(kept.missing),
        silent=_ranks(kept.silent),
        departed=_ranks(kept.departed),
        exact=kept.exact,
        extended=kept.extended,
        idle_until=kept.idle_until,
        remark=kept.remark,
        asked_at=kept.asked_at,
        asked=_ranks(kept.asked),
        testimony=kept.testimony,
    )
    at = kept.at or kept.since
    match kept.state:
        case "frozen":
            return Frozen(freeze)
        case "suspected":
            return Suspected(freeze, at)
        case "idle":
            return Idle(freeze, at)
        case "confirmed":
            return Confirmed(freeze, at)


def _ranks_text(ranks: Iterable[int]) -> str:
    return ranges(ranks).replace(" ", "")


def _ranks(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _counts_text(counts: Counts) -> str:
    if tuple(name for name, _ in counts) == FUNCTIONS:
        return " ".join(str(number) for _, number in counts)
    return " ".join(f"{name}={number}" for name, number in counts)


def _counts(text: str) -> Counts:
    parts = text.split(" ") if text else []
    if parts and "=" not in parts[0]:
        return tuple(zip(FUNCTIONS, map(int, parts), strict=True))
    named = (part.rpartition("=") for part in parts)
    return tuple((name, int(number)) for name, _, number in named)
