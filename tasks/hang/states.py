"""What a communicator can be, as values: one frozen value for each state, with only that state's data."""

from datetime import datetime
from typing import Literal

from msgspec import Struct

from tasks.hang.counts import Counts
from tasks.hang.policy import FreezeKind
from tasks.hang.report import RasReport
from tasks.hang.witness import Witness

EventKind = Literal["suspected", "still_suspected", "confirmed", "recovered", "blind", "idle"]
Process = tuple[str, int, int]  # host as RAS prints it, pid, number of the device


class Testimony(Struct, frozen=True, omit_defaults=True):
    """What witnesses make of a freeze.

    `stuck`: nothing that was seen moves (`waits`: the ranks behind wait in a collective themselves, so
    something else holds them up). `moves`: a rank visibly works. `gone`: the processes that do not
    answer have ended. `unclear`: neither can be told. `strong`: all but a few wait in the same collective,
    and the few stand elsewhere, the same in both samples.
    """

    finding: Literal["stuck", "moves", "gone", "unclear"]
    reason: str = ""
    strong: bool = False
    waits: bool = False


class Freeze(Struct, frozen=True, kw_only=True):
    """Counts that do not move.

    Args:
        since: When a report first showed these counts.
        repeated: Whether a later report showed them again.
        digest: Of the last record; the same digest proves that nothing moved.
        counts: Launches of each communicator rank, from the last report that showed it.
        lagging: Ranks that the others wait for: behind in launches, silent, or not through their init.
        missing: Communicator ranks that the last report did not show.
        silent: Those of them that did not answer, though they are members.
        exact: Whether a report without timeouts named a silent rank: one with timeouts may name healthy ones.
        departed: Ranks that finish, abort, have left or are gone: they do not count as hung.
        remark: What is particular about its ranks, in words.
        processes: Which process is which rank; empty after a restart, until a report is looked into.
        idle_until: Until when all of its members went on in other communicators, None where they did not:
            what happened before that was no stall of them, and what is older than a stall did not cause it.
        extended: Whether the confirm time was extended; that happens once.
        asked_at: When a witness was last asked, and after which ranks (`asked`).
        testimony: What it said; None while it has not.
    """

    kind: FreezeKind
    since: datetime
    repeated: bool
    digest: str
    size: int
    counts: dict[int, Counts]
    lagging: tuple[int, ...]
    leading: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...] = ()
    exact: bool = True
    departed: tuple[int, ...] = ()
    remark: str = ""
    processes: dict[int, Process] = {}
    idle_until: datetime | None = None
    extended: bool = False
    asked_at: datetime | None = None
    asked: tuple[int, ...] = ()
    testimony: Testimony | None = None

    @property
    def stalled_since(self) -> datetime:
        """From when on its members stand still."""
        return max(self.since, self.idle_until) if self.idle_until else self.since


class Progressing(Struct, frozen=True, tag="progressing", gc=False):
    """The last record of a communicator that moves, and when it was first seen like that."""

    digest: str
    since: datetime
    size: int
    missing: int = 0


class Aside(Struct, frozen=True, tag="aside"):
    """A communicator that is neither healthy nor hung, and what it is instead.

    `unobservable`: no counter of it ever moved; sends and receives are not counted. `leaving`: ranks of it
    finish, abort or have left, and the others are not apart. `counts` are kept where not every rank is there
    and running: the next record may differ without anybody having moved.
    """

    what: Literal["unobservable", "leaving"]
    digest: str
    since: datetime
    size: int
    missing: int = 0
    remark: str = ""
    counts: dict[int, Counts] = {}


class Frozen(Struct, frozen=True, tag="frozen"):
    """Nobody moves, for less than the suspect time, or as a consequence of another freeze."""

    freeze: Freeze


class Suspected(Struct, frozen=True, tag="suspected"):
    """Frozen for the suspect time; `told_at` is when that was last said."""

    freeze: Freeze
    told_at: datetime


class Idle(Struct, frozen=True, tag="idle"):
    """Ranks disagree and nobody moves in it, while all of its members go on in other communicators."""

    freeze: Freeze
    told_at: datetime


class Confirmed(Struct, frozen=True, tag="confirmed"):
    """Frozen for the confirm time: a hang."""

    freeze: Freeze
    confirmed_at: datetime


Stopped = Frozen | Suspected | Idle | Confirmed
STOPPED = (Frozen, Suspected, Idle, Confirmed)  # to ask for one: a tuple is faster than a union
State = Progressing | Aside | Stopped


class Blind(Struct, frozen=True):
    """Nothing is known about the run. `permanent`: asking again in this attempt cannot help."""

    since: datetime
    reason: str
    permanent: bool


class Sighting(Struct, frozen=True):
    """A poll that brought a report. `visible` is (ranks of the run that it shows, ranks of the run)."""

    observed_at: datetime
    report: RasReport
    visible: tuple[int, int] | None = None


class Blank(Struct, frozen=True):
    """A poll that brought none, and why."""

    observed_at: datetime
    reason: str
    permanent: bool = False


Observation = Sighting | Blank | Witness


class Event(Struct, frozen=True, kw_only=True):
    """A change of state that somebody may want to hear of.

    Ranks are ranks of the communicator. `communicator` is empty and `kind` None where the whole run is
    meant: blind, and recovered from it. `due_s` is how long this communicator may stand still before it is
    confirmed.
    """

    at: datetime
    event: EventKind
    communicator: str = ""
    kind: FreezeKind | None = None
    lagging: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    size: int = 0
    stalled_s: float = 0.0
    reason: str = ""
    due_s: float = 0.0


def seconds(since: datetime, at: datetime) -> float:
    """How long it is from one moment to the next, 0 where the clock stepped back between them."""
    return max(0.0, (at - since).total_seconds())
