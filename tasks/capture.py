"""Capture evidence while the ranks are alive: stacks of every rank, and what RAS says and said."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from msgspec import Struct
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run as current_run

from tasks.adapters.ras_ring import Poll
from tasks.hang.errors import NodeError, RankwatchError, RasError, RunNotFound, StoreError
from tasks.hang.evidence import Captured, Entry, Failed, Manifest, Outcome
from tasks.hang.incident import manual_folder
from tasks.hang.memory import recall
from tasks.hang.report import RasReport, parse_report
from tasks.hang.run import Attempt, Node, Rank, by_node
from tasks.hang.stacks import Position, position, read_threads
from tasks.hang.window import Window
from tasks.ownership import load_incident, now, read_window
from tasks.wiring import Eyes, eyes_of, load_run

_NATIVE_S = 10.0
_MARGIN_POLLS = 10


class Case(Struct, frozen=True, kw_only=True):
    """What a capture works on. `incident_id` is empty where a person asked for it."""

    eyes: Eyes
    slug: str
    run_name: str
    incident_id: str
    attempt: Attempt
    window: Window
    folder: str
    deadline_s: float

    def name(self, file: str) -> str:
        """Name of a file of the bundle in the store."""
        return f"{self.folder}/{file}"


class Stacks(Struct, frozen=True):
    """Where each world rank stands, and the start of each process (pid -> start ticks)."""

    entries: tuple[Entry, ...]
    positions: dict[int, Position]
    start_ticks: dict[int, int]


class RasEvidence(Struct, frozen=True):
    """What RAS said: the newest report, if there is one."""

    entries: tuple[Entry, ...]
    report: RasReport | None


def capture_name() -> str:
    """Name of a diagnose flow run."""
    given = current_run.parameters
    return f"diagnose {given['run']} {given.get('incident') or 'by hand'}"


def open_case(slug: str, incident_id: str) -> Case:
    """Gather what a capture needs.

    Raises:
        RankwatchError: the run cannot be found, or its evidence cannot be stored anywhere.
    """
    run = load_run(slug)
    eyes = eyes_of(run)
    attempt = eyes.find()
    if attempt.finished and not incident_id:
        raise RunNotFound(f"The run {run.run_name!r} is over: there is no process to capture.")
    incident = load_incident(incident_id) if incident_id else None
    if incident_id and incident is None:
        raise RunNotFound(f"There is no incident {incident_id!r}.", "Leave it empty for a capture by hand.")
    document = incident.window if incident else read_window(slug)[0].window
    folder = incident.folder if incident else manual_folder(now())
    return Case(
        eyes=eyes,
        slug=slug,
        run_name=run.run_name,
        incident_id=incident_id,
        attempt=attempt,
        window=recall(document, attempt.attempt_id),
        folder=f"{run.run_name}/hang_detector/{folder}",
        deadline_s=eyes.plan.settings.capture_deadline_s,
    )


@task(name="capture stacks", cache_policy=NO_CACHE, retries=0)
def capture_stacks(case: Case) -> Stacks:
    """Stacks of every rank, from outside the process, all nodes at once."""
    nodes = by_node(case.attempt.ranks)
    with ThreadPoolExecutor(max(1, min(16, len(nodes)))) as pool:
        answers = pool.map(lambda item: _stacks_of_node(case, *item), nodes.items())
    results = [result for answer in answers for result in answer]
    for rank, _, stack in results:
        if not stack.get("threads"):
            get_run_logger().warning("No stack of rank %s: %s", rank.world_rank, _why(stack))
    return Stacks(
        entries=tuple(entry for _, entry, _ in results),
        positions={
            rank.world_rank: place for rank, _, stack in results if (place := _position(stack)) is not None
        },
        start_ticks={rank.pid: int(stack["start_ticks"]) for rank, _, stack in results if _started(stack)},
    )


@task(name="capture RAS", cache_policy=NO_CACHE, retries=0)
def capture_ras(case: Case) -> RasEvidence:
    """NCCL's report for people, and each retained poll of the window and ten before it, as received."""
    entries: list[Entry] = []
    try:
        text, reason = case.eyes.ras.text(case.attempt), ""
    except (RasError, NodeError) as error:
        text, reason = "", str(error)
    entries.append(_keep(case, "ncclras_report", "run", "nccl_ras/ncclras_report.txt", text, reason))
    polls = case.eyes.ring.polls(case.attempt.attempt_id)
    keep = case.eyes.plan.policy.window_polls + _MARGIN_POLLS
    taken: dict[str, int] = {}
    newest: bytes | None = None
    for kept in polls[-keep:]:
        raw, reason = _raw(kept)
        newest = raw or newest
        stamp = f"{kept.observed_at:%Y%m%dT%H%M%SZ}"
        taken[stamp] = taken.get(stamp, 0) + 1
        suffix = f"-{taken[stamp]}" if taken[stamp] > 1 else ""
        file = f"nccl_ras/ncclras_{stamp}{suffix}.json"
        entries.append(_keep(case, "ncclras_history", f"poll {stamp}{suffix}", file, raw, reason))
    if newest is None:
        file = "nccl_ras/ncclras_history.txt"
        reason = "No poll of this attempt was retained on this machine."
        entries.append(_keep(case, "ncclras_history", "run", file, b"", reason))
    return RasEvidence(tuple(entries), _read(newest))


def file_manifest(case: Case, entries: tuple[Entry, ...], seconds: float) -> str:
    """Write the manifest last, and only if there is none; returns where the bundle is."""
    manifest = Manifest(
        run_name=case.run_name,
        attempt_id=case.attempt.attempt_id,
        incident_id=case.incident_id,
        captured_at=now(),
        seconds=round(seconds, 3),
        entries=entries,
    )
    case.eyes.store.put_if_absent(case.name("manifest.json"), manifest.to_json())
    return case.eyes.where(case.folder)


def keep_json(case: Case, file: str, value: Any) -> None:
    """Store a value as readable JSON."""
    case.eyes.store.put(case.name(file), msgspec.json.format(msgspec.json.encode(value), indent=2))


def _stacks_of_node(
    case: Case, node: Node, ranks: tuple[Rank, ...]
) -> list[tuple[Rank, Entry, dict[str, Any]]]:
    """(rank, entry, what node_part said) of each rank of a node; a node that does not answer leaves its
    reason for each of them.
    """
    request = {
        "op": "dump_stacks",
        "pids": [rank.pid for rank in ranks],
        "native_timeout_s": _NATIVE_S,
        "deadline_s": case.deadline_s * 0.7,
        "py_spy": "",
    }
    try:
        answer = case.eyes.nodes.call(node, request, deadline_s=case.deadline_s * 0.8)
        reason = "" if answer.get("ok") else f"node {node.ip}: {answer.get('detail')}"
    except NodeError as error:
        answer, reason = {}, str(error)
    stacks = answer.get("stacks", {})
    return [_file_stack(case, rank, stacks.get(str(rank.pid)), reason) for rank in ranks]


def _file_stack(
    case: Case, rank: Rank, stack: dict[str, Any] | None, reason: str
) -> tuple[Rank, Entry, dict[str, Any]]:
    stack = stack or {"rung": "none", "failed": [reason or "the node said nothing of this process"]}
    failed = "; ".join(stack.get("failed", []))
    head = f"rank {rank.world_rank} pid {rank.pid} node {rank.node.ip}: rung {stack['rung']}"
    head += f" (failed before: {failed})" if failed else ""
    file = f"stack_traces/rank_{rank.world_rank}.log"
    why = failed if stack["rung"] == "none" else ""
    text = f"{head}\n{stack.get('text', '')}"
    subject = f"rank {rank.world_rank}"
    seconds = float(stack.get("seconds", 0.0))
    entry = _keep(case, "stack_traces", subject, file, text, why, seconds=seconds, detail=str(stack["rung"]))
    if stack.get("threads"):
        keep_json(case, f"stack_traces/rank_{rank.world_rank}.json", stack["threads"])
    return rank, entry, stack


def _keep(  # noqa: PLR0917  a row of the manifest, in the order of its columns
    case: Case,
    tool: str,
    subject: str,
    file: str,
    content: str | bytes,
    reason: str,
    *,
    seconds: float = 0.0,
    detail: str = "",
) -> Entry:
    """Store a file, or the one line that says why there is none."""
    body = content.encode() if isinstance(content, str) else content
    body = f"{tool}: not captured: {reason}\n".encode() if reason else body
    began = time.monotonic()
    try:
        case.eyes.store.put(case.name(file), body)
    except StoreError as error:
        return Entry(tool, subject, Failed(reason=reason or str(error)))
    if reason:
        return Entry(tool, subject, Failed(reason=reason, file=file))
    outcome: Outcome = Captured(
        file=file,
        size_bytes=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        seconds=round(seconds or time.monotonic() - began, 3),
        detail=detail,
    )
    return Entry(tool, subject, outcome)


def _raw(kept: Poll) -> tuple[bytes, str]:
    """A retained report, or why it cannot be had."""
    try:
        return kept.raw(), ""
    except StoreError as error:
        return b"", str(error)


def _read(raw: bytes | None) -> RasReport | None:
    try:
        return parse_report(raw) if raw is not None else None
    except RankwatchError:
        return None


def _position(stack: dict[str, Any]) -> Position | None:
    try:
        return position(read_threads(stack.get("threads") or []))
    except ValueError:
        return None


def _started(stack: dict[str, Any]) -> bool:
    return isinstance(stack.get("start_ticks"), int) and stack["start_ticks"] > 0


def _why(stack: dict[str, Any]) -> str:
    return "; ".join(stack.get("failed", [])) or "py-spy printed no threads"
