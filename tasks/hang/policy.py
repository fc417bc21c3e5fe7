"""How long is too long, and what is to be done about it: settings as values, checked where they are made."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tasks.hang.errors import SettingsError

Action = Literal["observe", "fail"]
FreezeKind = Literal["mismatch", "unresponsive", "symmetric", "init"]

ENVELOPE_FACTOR = 1.5  # a stall a little longer than the longest one that recovered is no hang yet


class HangPolicy(Struct, frozen=True, kw_only=True):
    """How long is too long. All times in seconds; the defaults are those of Ray Train's own detector.

    Args:
        confirm_unresponsive_s: Confirm time of that kind; None is `confirm_duration_s`. So are the next two.
        witnesses: Whether processes can be looked at. Without (a replay), a mismatch is confirmed on counts
            alone, and what needs a witness stays suspected.
        witness_gap_s: Between the two samples of a witness, at most a quarter of the confirm time.
        extend_factor: By which the confirm time grows, once, when a rank that is behind visibly moves.
        envelope_cap_s: The most that a stall which recovered can make of a confirm time; None is twice the
            confirm time.
        fast_confirm_s: Confirm a mismatch this early when witnesses agree strongly; 0 is never.
        limit_s: No hang is confirmed later than this, so that the capture ends before the run's earliest
            watchdog kills the evidence; None where no watchdog is known.

    Raises:
        SettingsError: a value, or two of them together, cannot work; the text names the field.
    """

    poll_interval_s: float = 15.0
    suspect_after_s: float = 60.0
    confirm_duration_s: float = 600.0
    confirm_unresponsive_s: float | None = None
    confirm_symmetric_s: float | None = None
    confirm_init_s: float | None = None
    repeat_every_s: float = 120.0
    blind_after_polls: int = 3
    witnesses: bool = True
    witness_gap_s: float = 10.0
    extend_factor: float = 1.5
    envelope_cap_s: float | None = None
    fast_confirm_s: float = 0.0
    limit_s: float | None = None

    def __post_init__(self) -> None:
        for field in _TIMES:
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{field} is {value!r}.", f"Set {field} to a number of seconds above 0.")
        if not 0 <= self.fast_confirm_s < float("inf"):
            raise SettingsError(
                f"fast_confirm_s is {self.fast_confirm_s!r}.", "Set it to seconds, or 0 to switch it off."
            )
        if not 1 <= self.extend_factor <= 10:  # noqa: PLR2004  beyond that nothing would ever be confirmed
            raise SettingsError(
                f"extend_factor is {self.extend_factor!r}.", "Set it to a number from 1 to 10."
            )
        if self.blind_after_polls < 1:
            raise SettingsError(
                f"blind_after_polls is {self.blind_after_polls!r}.", "Set it to a whole number from 1 on."
            )
        for field in ("confirm_duration_s", *_OWN_TIME.values()):
            confirm_s = getattr(self, field)
            if confirm_s is not None and self.poll_interval_s > confirm_s:
                raise SettingsError(
                    f"poll_interval_s ({self.poll_interval_s:g} s) is longer than "
                    f"{field} ({confirm_s:g} s): no freeze would be seen twice.",
                    f"Set poll_interval_s to at most {field}.",
                )

    def confirm_s(self, kind: FreezeKind) -> float:
        """The confirm time of a kind, before anything is learned about the communicator."""
        own = getattr(self, _OWN_TIME[kind]) if kind in _OWN_TIME else None
        return self._cut(own if own is not None else self.confirm_duration_s)

    def due_s(self, kind: FreezeKind, *, envelope_s: float = 0.0, extended: bool = False) -> float:
        """How long a communicator may stand still before it is a hang.

        Args:
            kind: Of the freeze.
            envelope_s: Its longest stall that recovered, 0 where there was none.
            extended: Whether a witness saw a rank move.
        """
        confirm_s = self.confirm_s(kind)
        cap_s = self.envelope_cap_s if self.envelope_cap_s is not None else 2 * confirm_s
        learned_s = max(confirm_s, min(ENVELOPE_FACTOR * envelope_s, cap_s))
        return self._cut(learned_s * (self.extend_factor if extended else 1.0))

    def gap_s(self, kind: FreezeKind) -> float:
        """Seconds between the two samples of a witness."""
        return min(self.witness_gap_s, self.confirm_s(kind) / 4)

    def lead_s(self, kind: FreezeKind) -> float:
        """How long before it is needed a witness is asked, so that confirming does not wait for it."""
        return self.gap_s(kind) + 3 * self.poll_interval_s

    def patience_s(self, kind: FreezeKind) -> float:
        """How long an answer of a witness is waited for."""
        return self.gap_s(kind) + self.poll_interval_s / 2

    @property
    def confirm_polls(self) -> int:
        """Polls that the confirm time of a mismatch takes, rounded up."""
        return -int(-self.confirm_s("mismatch") // self.poll_interval_s)

    @property
    def window_polls(self) -> int:
        """Polls from a freeze to its confirmation at most, with all that can lengthen it, rounded up."""
        longest_s = max(self.due_s(kind, envelope_s=1e9, extended=True) for kind in KINDS)
        return -int(-longest_s // self.poll_interval_s)

    def _cut(self, seconds: float) -> float:
        return min(seconds, self.limit_s) if self.limit_s is not None else seconds


KINDS: tuple[FreezeKind, ...] = ("mismatch", "unresponsive", "symmetric", "init")
_OWN_TIME: dict[FreezeKind, str] = {
    "unresponsive": "confirm_unresponsive_s",
    "symmetric": "confirm_symmetric_s",
    "init": "confirm_init_s",
}
_TIMES = (
    "poll_interval_s", "suspect_after_s", "confirm_duration_s", "repeat_every_s", "witness_gap_s",
    "envelope_cap_s", "limit_s", *_OWN_TIME.values(),
)  # fmt: skip


class Fit(Struct, frozen=True):
    """A policy that ends in time, and what had to be said about it; empty where nothing was cut."""

    policy: HangPolicy
    warning: str


def fit(
    policy: HangPolicy,
    *,
    watchdog_s: float | None,
    watchdog: str,
    capture_s: float,
    explicit: frozenset[str],
) -> Fit:
    """Make a policy end before the watchdog of the run does.

    A rank waits from its launch on, up to one poll before the first report that shows it; the confirmation
    comes with a poll, and then the capture runs: all that has to be over when the watchdog ends the process.

    Args:
        policy: As set.
        watchdog_s: After so many seconds in a collective the earliest watchdog ends the process; None where
            none is known.
        watchdog: What that watchdog is called.
        capture_s: How long a capture may take.
        explicit: Names of the fields that somebody set.

    Raises:
        SettingsError: a confirm time that somebody set cannot fit; or nothing can, the watchdog being so
            short.
    """
    if watchdog_s is None:
        return Fit(policy, "")
    limit_s = watchdog_s - capture_s - 2 * policy.poll_interval_s
    said = (
        f"The {watchdog} ends the processes after {watchdog_s:g} s. Less a capture ({capture_s:g} s) and two "
        f"polls ({policy.poll_interval_s:g} s each), {max(0.0, limit_s):g} s are left to confirm a hang"
    )
    if limit_s < policy.poll_interval_s:
        raise SettingsError(
            f"{said}.", "Lengthen that timeout, or set poll_interval_s and capture_deadline_s shorter."
        )
    for field in ("confirm_duration_s", *_OWN_TIME.values()):
        value = getattr(policy, field)
        if field in explicit and value is not None and value > limit_s:
            raise SettingsError(
                f"{said}, and {field} is {value:g} s.",
                f"Set {field} to at most {limit_s:g}, or lengthen that timeout.",
            )
    fitted = replace(policy, limit_s=limit_s)
    cut = policy.confirm_duration_s > limit_s
    return Fit(
        fitted, f"{said}: confirmed after that instead of {policy.confirm_duration_s:g} s." if cut else ""
    )
