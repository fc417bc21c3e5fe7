"""How long is too long, and what is to be done about it: settings as values, checked where they are made."""

from typing import Literal

from msgspec import Struct

from tasks.hang.errors import SettingsError

Action = Literal["observe", "fail"]


class HangPolicy(Struct, frozen=True, kw_only=True):
    """How long is too long. All times in seconds; the defaults are those of Ray Train's own detector.

    Raises:
        SettingsError: a value, or two of them together, cannot work; the text names the field.
    """

    poll_interval_s: float = 15.0
    suspect_after_s: float = 60.0
    confirm_duration_s: float = 600.0
    repeat_every_s: float = 120.0
    blind_after_polls: int = 3

    def __post_init__(self) -> None:
        for field in ("poll_interval_s", "suspect_after_s", "confirm_duration_s", "repeat_every_s"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise SettingsError(f"{field} is {value!r}.", f"Set {field} to a number of seconds above 0.")
        if self.blind_after_polls < 1:
            raise SettingsError(
                f"blind_after_polls is {self.blind_after_polls!r}.", "Set it to a whole number from 1 on."
            )
        if self.poll_interval_s > self.confirm_duration_s:
            raise SettingsError(
                f"poll_interval_s ({self.poll_interval_s:g} s) is longer than "
                f"confirm_duration_s ({self.confirm_duration_s:g} s): no freeze would be seen twice.",
                "Set poll_interval_s to at most confirm_duration_s.",
            )

    @property
    def confirm_polls(self) -> int:
        """Polls that the confirm time takes, rounded up."""
        return -int(-self.confirm_duration_s // self.poll_interval_s)
