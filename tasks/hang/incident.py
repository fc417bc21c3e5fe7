"""One hang, told once.

An incident is a run, an attempt and the moment of the first freeze. Communicators that freeze with it are its
members: one stuck tensor-parallel group that stalls four others is one incident and one restart.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from tasks.hang.states import Freeze
from tasks.hang.window import Window

Phase = Literal["confirmed", "diagnosed", "decided", "acted", "closed"]
PHASES: tuple[Phase, ...] = ("confirmed", "diagnosed", "decided", "acted", "closed")


class Incident(Struct, frozen=True, kw_only=True):
    """A confirmed hang.

    Args:
        incident_id: 12 hexadecimal digits, the same for everyone who saw the same freeze.
        opened_at: When a report first showed the counts that did not move any more (UTC).
        members: Keys of the communicators that stand still: hangs in front, those whose ranks are apart
            before those that may only wait for them, and of these the ones that stopped first.
    """

    incident_id: str
    run_name: str
    attempt_id: str
    opened_at: datetime
    members: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Name of its evidence folder."""
        return f"incident-{self.opened_at.astimezone(UTC):%Y%m%dT%H%M%SZ}-{self.incident_id[:8]}"


def incident_of(run_name: str, window: Window) -> Incident | None:
    """The incident that a window holds, None where nothing is confirmed.

    Its moment is that of the earliest freeze among the first that were confirmed, so a communicator that is
    confirmed later joins the incident instead of opening another one.
    """
    confirmed = window.confirmed
    if not confirmed:
        return None
    opened_at = window.opened_at or min(freeze.stalled_since for freeze in confirmed.values())
    stalled = sorted(window.stalled.items(), key=lambda item: _order(item[0], item[1], confirmed))
    text = f"{run_name}\n{window.attempt_id}\n{opened_at.astimezone(UTC).isoformat()}"
    return Incident(
        incident_id=hashlib.sha256(text.encode()).hexdigest()[:12],
        run_name=run_name,
        attempt_id=window.attempt_id,
        opened_at=opened_at,
        members=tuple(key for key, _ in stalled),
    )


def _order(key: str, freeze: Freeze, confirmed: Mapping[str, Freeze]) -> tuple[Any, ...]:
    older = freeze.idle_until is not None  # apart before anybody stood still
    waits = freeze.testimony is not None and freeze.testimony.waits  # its ranks behind wait for others
    equal = freeze.kind == "symmetric"
    return key not in confirmed, older, equal, waits, freeze.stalled_since, freeze.size, key


def manual_folder(at: datetime) -> str:
    """Folder of a capture that a person asked for."""
    return f"manual-{at.astimezone(UTC):%Y%m%dT%H%M%SZ}"
