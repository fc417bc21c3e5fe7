"""How often a job may be asked, and when not at all.

A question costs the training job something. The process that answers copies its output once for each 4 KB
of it, so the cost grows with the square of the number of rank entries (one for each rank of each
communicator). Measured on NVIDIA's server of 2.30.7, 64 processes on two loaded cores, so an upper bound:

    entries   report    CPU of the process that answers    share of a core at 15 s
      3,840   2.1 MB    0.8 s                               5 %
      6,400   3.4 MB    2.3 s                              15 %

Both are 5.5e-8 s for each entry squared. At 5,000 entries that is 1.4 s, and 9 % of one core at an
interval of 15 s, in another process of the node each time. That share is the limit: up to 5,000 entries the
interval is 15 s, beyond it grows with the square of the entries, to 120 s at 14,000; no longer, since a
hang is to be confirmed within ten minutes. A faster machine shows in the collection time of its own
reports, which the cost cannot exceed; a long collection alone says nothing, since it is also waiting for
peers that do not answer.

Some versions of NCCL can crash when asked. They are in `VERSIONS`, with what is known of them.
"""

import re
from datetime import UTC, datetime

from msgspec import Struct

from tasks.hang.run import Attempt

MAX_INTERVAL_S = 120.0
MAX_SUSPENDED_S = 600.0

_COST_S = 5.5e-8  # CPU seconds of the answering process for each rank entry squared
_FREE_ENTRIES = 5_000
_FREE_INTERVAL_S = 15.0
_FREE_COST_S = _COST_S * _FREE_ENTRIES**2
_RISKY_MIN_S = 60.0
_SKEW_S = 60.0

Version = tuple[int, int, int]
_VERSION = re.compile(r"\s*v?(\d+)\.(\d+)\.(\d+)")


class Pace(Struct, frozen=True):
    """How long to wait between two polls. `reason` is empty where it is just what was set."""

    interval_s: float
    reason: str = ""


class RiskyVersions(Struct, frozen=True, kw_only=True):
    """Versions of NCCL that polling can harm, both ends included; `source` says where that is known from."""

    first: Version
    last: Version
    factor: float
    why: str
    source: str


# Before 2.28.7 RAS has no json and is not asked for reports at all. 2.27.3 to 2.30.7 can blank a report
# while a communicator is being created (NVIDIA/nccl#2346): that is no crash in json, and polling is suspended
# then anyway.
VERSIONS: tuple[RiskyVersions, ...] = (
    RiskyVersions(
        first=(2, 28, 7),
        last=(2, 28, 9),
        factor=4.0,
        why="can crash a training process when it is asked while ranks are missing, and 2.29.2 fixes that",
        source="NVIDIA/nccl#1762",
    ),
)


def pace(
    poll_interval_s: float, *, explicit: bool, entries: int, nccl_version: str, collection_time_s: float
) -> Pace:
    """How long to wait until the next poll.

    An interval that somebody chose is kept whatever it costs the job. Only a version of NCCL that can crash
    stretches it, by the factor of `VERSIONS`; of the default, to a minute at least.

    Args:
        poll_interval_s: As set.
        explicit: Whether somebody chose it; else it is the default.
        entries: Rank entries of the last report, present and missing; 0 where there was none.
        nccl_version: As the last report says it, with any suffix; empty where there was none.
        collection_time_s: Of the last report; 0 where unknown.
    """
    risk = _risk_of(nccl_version)
    if explicit:
        if risk is None:
            return Pace(poll_interval_s)
        return Pace(
            poll_interval_s * risk.factor,
            f"{risk.factor:g} times the interval that is set, since NCCL {nccl_version} {risk.why}",
        )
    fair_s = _FREE_INTERVAL_S * (_cost_s(entries, collection_time_s) / _FREE_COST_S)
    grown_s = max(poll_interval_s, min(MAX_INTERVAL_S, fair_s))
    if risk is not None:
        interval_s = max(poll_interval_s, min(MAX_INTERVAL_S, max(_RISKY_MIN_S, grown_s * risk.factor)))
        return Pace(interval_s, f"NCCL {nccl_version} {risk.why}")
    if grown_s > poll_interval_s:
        return Pace(
            grown_s, f"the process that answers spends time with the square of {entries} rank entries"
        )
    return Pace(poll_interval_s)


def advice(nccl_version: str) -> str:
    """One sentence to warn with, once; empty where nothing is known against a version."""
    risk = _risk_of(nccl_version)
    if risk is None:
        return ""
    return (
        f"NCCL {nccl_version} {risk.why} ({risk.source}): it is polled {risk.factor:g} times less often; "
        "use 2.29.2 or newer in the training image."
    )


def settled(attempt_started_at: float, now_s: float, settle_s: float) -> bool:
    """Whether an attempt is old enough to be asked: old NCCL can crash when asked during its init.

    Args:
        attempt_started_at: Unix seconds; 0.0 is unknown, and counts as long ago.
        now_s: Unix seconds, of another machine's clock: a start in the future by more than `settle_s` says
            that the clocks disagree, and is not waited for.
        settle_s: How long an attempt is left alone.
    """
    return abs(now_s - attempt_started_at) >= settle_s


def suspended(attempt: Attempt, now_s: float, settle_s: float) -> str:
    """Why an attempt is not to be asked now; empty where it may be.

    A suspension that ends later than any may last comes from a clock that is wrong: it is not honoured, since
    nobody would watch for as long as the clock is ahead.
    """
    if attempt.status != "running":
        return f"the attempt is not running ({attempt.status})"
    if not settled(attempt.started_at, now_s, settle_s):
        return f"the attempt began less than {settle_s:g} s ago"
    left_s = attempt.suspended_until - now_s
    if 0 < left_s <= MAX_SUSPENDED_S + _SKEW_S:
        until = datetime.fromtimestamp(attempt.suspended_until, UTC).isoformat(timespec="seconds")
        return f"the training asks not to be polled until {until}: {attempt.suspended_reason or 'no reason'}"
    return ""


def _cost_s(entries: int, collection_time_s: float) -> float:
    """CPU seconds that a question costs the process that answers, at most."""
    model_s = _COST_S * entries**2
    return min(model_s, collection_time_s) if collection_time_s > 0 else model_s


def _risk_of(nccl_version: str) -> RiskyVersions | None:
    found = _VERSION.match(nccl_version)
    if found is None:
        return None
    version = (int(found[1]), int(found[2]), int(found[3]))
    return next((risk for risk in VERSIONS if risk.first <= version <= risk.last), None)
