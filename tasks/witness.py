"""Be the witness: look twice at the processes that launch counts alone cannot judge."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tasks.hang.errors import RankwatchError
from tasks.hang.run import Attempt, Node, Rank
from tasks.hang.witness import Look, Question, Witness, read_look, unseen
from tasks.ownership import steady_now
from tasks.wiring import Eyes

# Beyond the gap: to start a task on the node and, of that, for the samples themselves.
_CALL_S = 10.0
_SAMPLES_S = 7.0
# Whether a process is there and stopped needs no long look; twice, since one in state D may leave it at once.
_PROBE_GAP_S = 1.0
# Each call waits in threads of its own, so a larger run is looked at in rounds.
_NODES_AT_ONCE = 256


def ask(
    eyes: Eyes, attempt: Attempt, question: Question, members: Mapping[int, tuple[str, int]], gap_s: float
) -> Witness:
    """Take two samples of each rank asked for, all nodes at once. Never raises for what the outside world
    does: a rank that cannot be seen is a rank that was not seen, with the reason.

    Takes about `gap_s` and a second, and at most `gap_s` and ten on each node, stuck ones included.

    Args:
        eyes: Of the run.
        attempt: Its ranks, with what was announced of them.
        question: What the window wants to know.
        members: Communicator rank -> (host, pid) as RAS names them.
        gap_s: Seconds between the two samples.
    """
    looks: dict[int, Look] = {}
    wanted: dict[Node, dict[int, Rank]] = {}
    for number in question.ranks:
        rank, problem = _process_of(attempt, members.get(number))
        if rank is None:
            looks[number] = unseen(number, problem)
        else:
            wanted.setdefault(rank.node, {})[number] = rank
    gap_s = gap_s if question.stacks else min(gap_s, _PROBE_GAP_S)
    failures: list[str] = []
    with ThreadPoolExecutor(max(1, min(_NODES_AT_ONCE, len(wanted)))) as pool:
        answers = pool.map(lambda node: _look_at(eyes, node, wanted[node], question.stacks, gap_s), wanted)
        for seen, failure in answers:
            looks.update(seen)
            failures += [failure] if failure else []
    return Witness(
        observed_at=steady_now(),
        communicator=question.communicator,
        looks=tuple(looks[number] for number in question.ranks),
        reason=_nothing(looks, failures),
    )


def _process_of(attempt: Attempt, member: tuple[str, int] | None) -> tuple[Rank | None, str]:
    if member is None:
        return None, "RAS names no process of this rank"
    rank = attempt.rank_of(*member)
    return rank, "" if rank else f"process {member[1]} of {member[0]} is none that the run is known by"


def _look_at(
    eyes: Eyes, node: Node, ranks: Mapping[int, Rank], stacks: bool, gap_s: float
) -> tuple[dict[int, Look], str]:
    """What is seen on one node, and why nothing is. Ranks that share a process share its samples."""
    servers = {rank.pid: rank.worker_server for rank in ranks.values()}
    request = {
        "op": "look",
        "processes": [{"pid": pid, "worker_server": server} for pid, server in servers.items()],
        "gap_s": gap_s,
        "deadline_s": gap_s + _SAMPLES_S,
        "stacks": stacks,
        "py_spy": "",
    }
    try:
        answer = eyes.nodes.call(node, request, deadline_s=gap_s + _CALL_S)
        failure = "" if answer.get("ok") else f"node {node.ip}: {answer.get('detail')}"
    except RankwatchError as error:
        answer, failure = {}, str(error)
    if failure:
        return {number: unseen(number, failure) for number in ranks}, failure
    looks = answer.get("looks")
    found = looks if isinstance(looks, dict) else {}
    return {number: _read(number, rank, found.get(str(rank.pid))) for number, rank in ranks.items()}, ""


def _read(number: int, rank: Rank, raw: Any) -> Look:
    if raw is None:
        return unseen(number, f"node {rank.node.ip} says nothing of process {rank.pid}")
    started = raw.get("start_ticks") if isinstance(raw, dict) else None
    if started and rank.start_ticks is not None and started != rank.start_ticks:
        problem = f"process {rank.pid} is gone: its pid belongs to another one now"
        return Look(rank=number, state="gone", problem=problem)
    return read_look(number, raw)


def _nothing(looks: Mapping[int, Look], failures: list[str]) -> str:
    """Why nothing was seen; empty where something was."""
    if any(look.state != "unknown" for look in looks.values()):
        return ""
    reasons = failures or [look.problem for look in looks.values()]
    return "; ".join(dict.fromkeys(reasons))[:500] or "no rank was asked for"
