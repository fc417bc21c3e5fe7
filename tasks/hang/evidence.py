"""What was captured, and what could not be, and why. A gap is never silent."""

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct


class Captured(Struct, frozen=True, kw_only=True, tag="captured"):
    """A file of the bundle."""

    file: str
    size_bytes: int
    sha256: str
    seconds: float
    detail: str = ""


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """A tool was tried and did not deliver; `file` holds the reason in one line."""

    reason: str
    file: str = ""


class Unsupported(Struct, frozen=True, kw_only=True, tag="unsupported"):
    """A tool has nothing to work on here."""

    reason: str
    file: str = ""


Outcome = Captured | Failed | Unsupported


class Entry(Struct, frozen=True):
    """What one tool brought of one rank, node or the run. `subject` is `rank 3`, `node 10.0.0.1`, `run`."""

    tool: str
    subject: str
    outcome: Outcome


class Manifest(Struct, frozen=True, kw_only=True):
    """The last file of a bundle: its presence means that the bundle is complete."""

    format: int = 1
    run_name: str
    attempt_id: str
    incident_id: str
    captured_at: datetime
    seconds: float
    entries: tuple[Entry, ...]

    def to_json(self) -> bytes:
        """The manifest as it is stored."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def tally(entries: tuple[Entry, ...]) -> list[dict[str, Any]]:
    """One row for each tool: how many subjects it captured, and why not the others."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        row = rows.setdefault(entry.tool, {"tool": entry.tool, "captured": 0, "missing": 0, "why": ""})
        match entry.outcome:
            case Captured():
                row["captured"] += 1
            case Failed(reason=reason) | Unsupported(reason=reason):
                row["missing"] += 1
                row["why"] = row["why"] or f"{entry.subject}: {reason}"
    return list(rows.values())
