"""Who watches a run, and who may do one thing.

The only atomic operation of Prefect's API is the creation of a block under a name that must be unique. So
the right to a window is the claim block of its next epoch, and the epoch is a fencing token: an owner reads
it again at each heartbeat and before each act, and ends at once when it is no longer its own. A claim whose
holder is gone is not deleted but outnumbered: `<name>`, `<name>-2`, ...
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar
from uuid import UUID, uuid4

import httpx
from msgspec import Struct
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import BlockDocumentCreate, BlockDocumentUpdate
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES

from tasks.adapters.process import identity, is_gone
from tasks.blocks import Claim, HangWindow, Incident
from tasks.hang.errors import NotOurs

B = TypeVar("B", bound=Block)
SERVER_ERRORS = (httpx.HTTPError, PrefectHTTPStatusError, OSError)
_CALL_S = 10.0
_RETRIES = 2  # after 2 and 4 s: a busy SQLite server answers 503 now and then
_CLAIMS_KEPT = 3


class Tenure(Struct):
    """The right to a window: held by whoever made the claim of its epoch."""

    slug: str
    epoch: int
    owner: str
    document_id: UUID


_clients = threading.local()


@contextmanager
def server() -> Iterator[SyncPrefectClient]:
    """A client that gives up after seconds, not minutes: a shift goes on polling without the server.

    One for each thread and server, kept open: making one costs far more CPU than a request.
    """
    outer = get_settings_context()
    if getattr(_clients, "outer", None) is not outer.settings:
        _clients.inner = outer.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: _RETRIES})
        _clients.outer = outer.settings
        _clients.client = get_client(sync_client=True, httpx_settings={"timeout": _CALL_S})
        _clients.client.__enter__()
    with SettingsContext(profile=outer.profile, settings=_clients.inner):
        yield _clients.client


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


_STARTED = (now(), time.monotonic())


def steady_now() -> datetime:
    """The time of this process's start and what passed since, in UTC: a clock that is set while a freeze is
    being timed must neither confirm it early nor hide it.
    """
    wall, ticks = _STARTED
    return wall + timedelta(seconds=time.monotonic() - ticks)


def claim(name: str, *, is_dead: Callable[[Claim], bool], owner: str | None = None) -> bool:
    """Claim the right to do `name` once.

    Args:
        name: Lowercase letters, digits and dashes.
        is_dead: Tells of the claim that is in the way whether its holder can be ignored.
        owner: Who claims; this process by default.

    Returns:
        True for exactly one of all who ask; for another one only after the holder is dead.
    """
    candidate, number = name, 1
    ours = Claim(owner=owner or identity(), since=now(), token=uuid4().hex)
    while True:
        try:
            _create(candidate, ours)
        except ObjectAlreadyExists:
            holder = _read(candidate, Claim)
            if holder is not None and holder[0].token == ours.token:
                return True  # it was made, the answer was lost, and the request was sent again
            if holder is None or not is_dead(holder[0]):
                return False
            number += 1
            candidate = f"{name}-{number}"
        else:
            return True


def read_window(slug: str) -> tuple[HangWindow, UUID | None]:
    """The window of a run and the id of its document; an empty one where the run was never watched."""
    found = _read(slug, HangWindow)
    return found if found is not None else (HangWindow(), None)


def owner_is_there(window: HangWindow, at: datetime) -> bool:
    """Whether the owner of a window still watches: told by /proc where it ran on this machine, else by the
    age of its heartbeat.
    """
    if not window.owner or window.farewell or window.heartbeat_at is None:
        return False
    if is_gone(window.owner):
        return False
    return (at - window.heartbeat_at).total_seconds() <= window.stale_after_s


def take_window(slug: str, run_name: str, *, flow_run_id: str, stale_after_s: float) -> Tenure | None:
    """Take over the window of a run.

    Args:
        slug: Of the run.
        run_name: Its name, for people.
        flow_run_id: Of the shift.
        stale_after_s: Seconds without a heartbeat after which others may take it from us.

    Returns:
        The tenure, None where the owner is there or somebody else was faster.
    """
    window, document_id = read_window(slug)
    if owner_is_there(window, now()):
        return None
    epoch = window.epoch + 1
    if not claim(f"{slug}-epoch-{epoch}", is_dead=lambda holder: _claim_is_stale(holder, stale_after_s)):
        return None
    window, document_id = read_window(slug)
    if window.epoch >= epoch:
        return None
    mine = window.model_copy(
        update={
            "run_name": run_name,
            "epoch": epoch,
            "owner": identity(),
            "flow_run_id": flow_run_id,
            "heartbeat_at": now(),
            "stale_after_s": stale_after_s,
            "farewell": "",
            "run_ended": False,
        }
    )
    if document_id is None:
        document_id = _store(slug, mine)
    else:
        _update(document_id, mine.model_dump(mode="json", exclude={"window"}))
    _sweep_claims(slug, epoch)
    return Tenure(slug=slug, epoch=epoch, owner=identity(), document_id=document_id)


def our_tenure(slug: str) -> Tenure | None:
    """The tenure of this process, None where it does not watch the run (a flow started by hand)."""
    window, document_id = read_window(slug)
    if document_id is None or window.owner != identity() or window.farewell:
        return None
    return Tenure(slug=slug, epoch=window.epoch, owner=window.owner, document_id=document_id)


def require(tenure: Tenure) -> HangWindow:
    """The window, if it is still ours.

    Raises:
        NotOurs: another shift took over.
    """
    window, _ = read_window(tenure.slug)
    if (window.epoch, window.owner) != (tenure.epoch, tenure.owner):
        raise NotOurs(
            f"The watch of {window.run_name} passed to {window.owner} (epoch {window.epoch}; "
            f"ours was {tenure.epoch}).",
            "Nothing to do: this shift ends and the other one goes on.",
        )
    return window


def write(tenure: Tenure, **fields: Any) -> None:
    """Say that we are there, and store `fields` of the window with it.

    Raises:
        NotOurs: another shift took over.
    """
    require(tenure)
    _update(tenure.document_id, {"heartbeat_at": now().isoformat(), **fields})


def claim_phase(tenure: Tenure | None, incident_id: str, phase: str) -> bool:
    """Claim one phase of an incident. The owner of the epoch may outnumber a claim of an earlier owner: that
    one reads the epoch before it acts, and sees that it lost it.
    """
    if tenure is not None:
        require(tenure)

    def is_dead(holder: Claim) -> bool:
        return holder.owner != identity() if tenure is not None else bool(is_gone(holder.owner))

    return claim(f"{incident_id}-{phase}", is_dead=is_dead)


def save_incident(incident_id: str, incident: Incident) -> None:
    """Store how far an incident got."""
    _store(incident_id, incident)


def load_incident(incident_id: str) -> Incident | None:
    """The incident, None where it was never stored."""
    found = _read(incident_id, Incident)
    return found[0] if found is not None else None


# Block.save makes five or six requests each time, to register the type again; these make one or two.


def _read(name: str, kind: type[B]) -> tuple[B, UUID] | None:
    with server() as client:
        try:
            document = client.read_block_document_by_name(name, kind.get_block_type_slug() or "")
        except ObjectNotFound:
            return None
    return kind.model_validate(document.data), document.id


def _create(name: str, block: Block) -> UUID:
    type_id, schema_id = _registered(type(block), PREFECT_API_URL.value())
    document = BlockDocumentCreate(
        name=name, data=block.model_dump(mode="json"), block_type_id=type_id, block_schema_id=schema_id
    )
    with server() as client:
        return client.create_block_document(document).id


def _store(name: str, block: Block) -> UUID:
    """Write a document whether it is there or not. A request is sent again when its answer is lost, and finds
    then what it made itself.
    """
    found = _read(name, type(block))
    if found is None:
        try:
            return _create(name, block)
        except ObjectAlreadyExists:
            found = _read(name, type(block))
            if found is None:
                raise
    _update(found[1], block.model_dump(mode="json"))
    return found[1]


@lru_cache(maxsize=32)
def _registered(kind: type[Block], url: str | None) -> tuple[UUID, UUID]:
    """Ids of a block's type and schema on the server at `url`."""
    del url
    kind.register_type_and_schema()
    if kind._block_type_id is None or kind._block_schema_id is None:  # noqa: SLF001  no public name
        raise RuntimeError(f"Prefect did not register the block {kind.__name__}.")
    return kind._block_type_id, kind._block_schema_id  # noqa: SLF001


def _update(document_id: UUID, fields: dict[str, Any]) -> None:
    with server() as client:
        client.update_block_document(document_id, BlockDocumentUpdate(data=fields, merge_existing_data=True))


def _claim_is_stale(holder: Claim, stale_after_s: float) -> bool:
    """A claim whose maker never wrote the window: it died in between."""
    if is_gone(holder.owner):
        return True
    return (now() - holder.since).total_seconds() > stale_after_s


def _sweep_claims(slug: str, epoch: int) -> None:
    """Delete the claims of epochs that nobody can come back to."""
    with server() as client:
        for old in range(max(1, epoch - _CLAIMS_KEPT - 5), epoch - _CLAIMS_KEPT):
            try:
                name = f"{slug}-epoch-{old}"
                document = client.read_block_document_by_name(name, Claim.get_block_type_slug() or "")
                client.delete_block_document(document.id)
            except ObjectNotFound:
                continue
