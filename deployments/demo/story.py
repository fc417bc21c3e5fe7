"""What happens in the demo, as Prefect tells it: the events and the incident that rankwatch left there."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import httpx
from msgspec import Struct
from prefect.blocks.core import Block

from tasks.blocks import Incident

B = TypeVar("B", bound=Block)


class Told(Struct, frozen=True):
    """One event of rankwatch."""

    at: datetime
    event: str
    payload: dict[str, Any]

    def __str__(self) -> str:
        word = self.event.removeprefix("incident.").replace("_", " ")
        return f"{word}: {self._detail()}".removesuffix(": ")

    def _detail(self) -> str:
        payload = self.payload
        if payload.get("lagging"):
            ranks = ", ".join(map(str, payload["lagging"]))
            return f"communicator rank {ranks} is behind, nobody moved for {payload['stalled_s']:.0f} s"
        details: dict[str, Callable[[], str]] = {
            "incident.diagnosed": lambda: payload["headline"],
            "incident.decided": lambda: payload["decision"].split(":")[0],
            "incident.acted": lambda: ", ".join(f"{a['rung']} -> {a['outcome']}" for a in payload["acts"]),
            "incident.closed": lambda: "the run moves again",
            "attempt": lambda: f"{payload['attempt_id'][:12]} of the run begins",
            "watching": lambda: payload["summary"],
        }
        other: Callable[[], str] = lambda: payload.get("reason", "")  # noqa: E731
        return str(details.get(self.event, other)())


class Story:
    """Reads the events and the incident of the demo's run from its Prefect server."""

    def __init__(self, ui: str) -> None:
        self._api = httpx.Client(base_url=f"{ui}/api", timeout=10)
        self._seen: set[str] = set()
        self._since = datetime.now(UTC)
        self.told: list[Told] = []

    def news(self) -> list[Told]:
        """Events that were not told yet, oldest first."""
        occurred = {"since": self._since.isoformat()}
        wanted = {"event": {"prefix": ["rankwatch."]}, "occurred": occurred, "order": "ASC"}
        answer = self._api.post("/events/filter", json={"filter": wanted, "limit": 50})
        answer.raise_for_status()
        fresh = [event for event in answer.json()["events"] if event["id"] not in self._seen]
        self._seen.update(event["id"] for event in fresh)
        told = [
            Told(
                datetime.fromisoformat(event["occurred"]),
                event["event"].removeprefix("rankwatch."),
                event["payload"],
            )
            for event in fresh
        ]
        told.sort(key=lambda one: one.at)
        self.told += told
        if told:  # events of one moment may arrive after each other
            self._since = told[-1].at - timedelta(seconds=5)
        return told

    def first(self, event: str) -> datetime | None:
        """When an event was first told."""
        return next((one.at for one in self.told if one.event == event), None)

    def incidents(self) -> list[Incident]:
        """The incidents that are stored, oldest first."""
        return sorted(self.blocks(Incident), key=lambda incident: incident.times["opened"])

    def blocks(self, kind: type[B]) -> list[B]:
        """All blocks of a kind."""
        answer = self._api.post("/block_documents/filter", json={"include_secrets": False, "limit": 200})
        answer.raise_for_status()
        slug = kind.get_block_type_slug()
        return [kind(**d["data"]) for d in answer.json() if d["block_type"]["slug"] == slug]
