"""Reports of NCCL's RAS, asked on a node of the training run.

Any process of the job answers for all that were initialised together with it, so one node is usually enough;
but the answer may be wrong in four ways:

- The process that takes the connection is stopped, or its node is gone: the next node is asked.
- The port belongs to another job: ask again, since a new connection usually lands on another process; then
  the next node; then the watch is blind.
- The process was stopped for over a minute and resumed: it takes all others for dead, for ever. An answer in
  which most members are lost is asked for twice more, and the best one counts.
- It shows only a part of the job (meshes of processes that were never initialised together): the nodes of the
  ranks that nobody showed are asked too, and the answers are handed on side by side.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from tasks.adapters.node_part import parse_ras_addr
from tasks.adapters.ports import NodePort
from tasks.adapters.ras_meshes import Answer, Meshes, Turn
from tasks.hang.errors import (
    RAS_ERRORS,
    NodeError,
    RasError,
    RasNoAnswer,
    RasUnreachable,
    RasWrongJob,
    SettingsError,
)
from tasks.hang.presence import lost_count, lost_share, mark_of
from tasks.hang.run import Attempt, Node

_TRANSPORT_SLACK_S = 10.0  # a first Ray task on a node starts a worker process: 1 s, 7 s under load
_RECONNECTS = 3
_ISLAND_SHARE = 0.5
_ASKS_OF_AN_ISLAND = 2

_FIXES = {
    "unreachable": "RAS starts with the job's first communicator; else check NCCL_RAS_ADDR of the job.",
    "disabled": "Start the job with NCCL_RAS_ENABLE=1, or without that variable.",
    "too_old": "Use NCCL 2.28.7 or newer in the training image (2.29.2 fixes crashes with missing ranks).",
    "no_binary": "Set source to socket, which needs no binary, or install ncclras on the nodes.",
    "no_answer": "If that goes on, raise the poll interval, or look for stopped processes on the node.",
    "truncated": "The process that answered may be ending; the next poll asks again.",
    "malformed": "Check that NCCL_RAS_ADDR names the port of RAS and no other service.",
    "wrong_job": "Give each job on the node its own NCCL_RAS_ADDR.",
}


T = TypeVar("T")


class NodeRas:
    """RasSource over any NodePort.

    Args:
        node_port: Reaches the nodes.
        method: `socket` speaks the protocol itself, `ncclras_cli` runs NVIDIA's client on the node.
        addr: Address of RAS as the node sees it; empty is localhost:28028.
        collect_timeout_s: How long RAS waits for its peers, at least 1: with 0 each query leaks memory in
            the training process.
        deadline_s: For one question to one node. After twice that no further question begins.
        binary: Name or path of ncclras on the nodes.
        max_nodes: How many nodes are asked before giving up, and how many more questions one poll may ask to
            see the rest of a job of several meshes.

    Raises:
        SettingsError: address or collect timeout cannot be right.
    """

    def __init__(
        self,
        node_port: NodePort,
        *,
        method: Literal["socket", "ncclras_cli"] = "socket",
        addr: str = "",
        collect_timeout_s: int = 5,
        deadline_s: float = 15.0,
        binary: str = "ncclras",
        max_nodes: int = 3,
    ) -> None:
        try:
            parse_ras_addr(addr)
        except ValueError as error:
            raise SettingsError(f"The address of RAS is {error}") from error
        if collect_timeout_s < 1:
            raise SettingsError(f"collect_timeout_s is {collect_timeout_s}.", "Set it to 1 or more.")
        self._node_port = node_port
        self._request: dict[str, Any] = {
            "op": "ras_status",
            "method": method,
            "addr": addr,
            "collect_timeout_s": collect_timeout_s,
            "deadline_s": deadline_s,
            "reconnects": _RECONNECTS,
            "binary": binary,
        }
        self._deadline_s = deadline_s
        self._max_nodes = max_nodes
        self._first: Node | None = None
        self._meshes: Meshes | None = None

    def status(self, attempt: Attempt) -> tuple[bytes, ...]:
        """The reports of one moment, raw JSON as received, one for each separate mesh of the job.

        Raises:
            RasError: there is none; the leaf says why.
        """
        if self._meshes is None or not self._meshes.are_of(attempt):
            self._meshes = Meshes(attempt, self._max_nodes)
        meshes = self._meshes
        turn = Turn(time.monotonic() + 2 * self._deadline_s, self._max_nodes)
        first = self._first_answer(attempt, meshes, turn)
        answers = meshes.complete(first, lambda node: self._try(attempt, meshes, node), turn)
        return tuple(answer.raw for answer in answers)

    def visible(self, attempt: Attempt) -> tuple[int, int] | None:
        """How many of the attempt's ranks the last comparison saw, and of how many; None where there was
        none, or no communicator exists yet.
        """
        return self._meshes.visible if self._meshes is not None and self._meshes.are_of(attempt) else None

    def text(self, attempt: Attempt) -> str:
        """NCCL's own report for people. It names no process of a healthy job, so it cannot be checked to be
        ours: read it beside the JSON of the same moment.

        Raises:
            RasError: there is none; the leaf says why.
        """
        raw, _ = self._ask_nodes(attempt, lambda node: self._call(attempt, node, "text"))
        return raw.decode("utf-8", "replace")

    def _first_answer(self, attempt: Attempt, meshes: Meshes, turn: Turn) -> Answer:
        """A sane answer of the first node that gives one."""
        answer, nodes = self._ask_nodes(attempt, lambda node: self._ask(attempt, meshes, node))
        best = self._reconsider(attempt, meshes, answer, nodes[1:2] or nodes, turn)
        self._first = best.node
        return best

    def _ask_nodes(self, attempt: Attempt, ask: Callable[[Node], T]) -> tuple[T, list[Node]]:
        """What the first node says that does not fail, and the nodes in order from that one on."""
        nodes = self._in_order(attempt.nodes)
        if not nodes:
            raise RasUnreachable(f"Run {attempt.run_name} has no ranks yet, so there is nobody to ask.")
        until = time.monotonic() + 2 * self._deadline_s
        errors: list[RasError] = []
        for node in nodes[: self._max_nodes]:
            if errors and time.monotonic() > until:
                break
            try:
                said = ask(node)
            except RasError as error:
                errors.append(error)
                self._first = nodes[len(errors) % len(nodes)]
            else:
                self._first = node
                return said, self._in_order(nodes)
        raise _verdict(errors)

    def _in_order(self, nodes: Sequence[Node]) -> list[Node]:
        """Start with the node that answered last, or with the one after those that did not: a run whose
        first nodes are lost must not stay unwatched.
        """
        start = nodes.index(self._first) if self._first in nodes else 0
        return [*nodes[start:], *nodes[:start]]

    def _reconsider(
        self, attempt: Attempt, meshes: Meshes, answer: Answer, others: Sequence[Node], turn: Turn
    ) -> Answer:
        """The best of up to three answers, where most members of the first one are lost: it may be an
        island's. Where they are lost indeed, three answers say the same. One that shows no communicator has
        no missing ranks either, and is no better.
        """
        best = answer
        for node in (answer.node, *others)[:_ASKS_OF_AN_ISLAND]:
            if lost_share(best.raw) <= _ISLAND_SHARE or not turn.in_time:
                break
            again = self._try(attempt, meshes, node)
            if again is None or not again.mark.communicators_count:
                continue
            if lost_count(again.raw) < lost_count(best.raw):
                best = again
        return best

    def _try(self, attempt: Attempt, meshes: Meshes, node: Node) -> Answer | None:
        """One more question; that it fails is no reason to lose the answer there is."""
        try:
            return self._ask(attempt, meshes, node)
        except RasError:
            return None

    def _ask(self, attempt: Attempt, meshes: Meshes, node: Node) -> Answer:
        """Ask a node, and once more if another job answers: the kernel picks among the processes that share
        the port.
        """
        raw = self._call(attempt, node, "json")
        if meshes.roster.is_foreign(raw):
            raw = self._call(attempt, node, "json")
            if meshes.roster.is_foreign(raw):
                where = f"RAS at {self._where(node)}"
                raise RasWrongJob(f"{where} shows none of the processes of this run.", _FIXES["wrong_job"])
        return Answer(node, raw, mark_of(raw))

    def _call(self, attempt: Attempt, node: Node, wanted: str) -> bytes:
        pids = [rank.pid for rank in attempt.ranks if rank.node == node]
        request = {**self._request, "format": wanted, "pids": pids}
        try:
            answer = self._node_port.call(node, request, deadline_s=self._deadline_s + _TRANSPORT_SLACK_S)
        except NodeError as error:
            raise RasNoAnswer(
                f"RAS at {self._where(node)} could not be asked: {error.what}", error.fix
            ) from error
        if answer.get("ok"):
            return bytes(answer["raw"])
        code, detail = str(answer.get("code")), str(answer.get("detail"))
        what = f"RAS at {self._where(node)}: {detail}"
        if code in RAS_ERRORS:
            raise RAS_ERRORS[code](what, _FIXES[code])
        raise RasNoAnswer(f"{what} ({code})", "This is a defect of rankwatch: please report this text.")

    def _where(self, node: Node) -> str:
        return f"node {node.ip}, address {self._request['addr'] or 'localhost:28028'}"


def _verdict(errors: Sequence[RasError]) -> RasError:
    """The last error, unless it is permanent and another node said something else: what one node says
    must not end the watch of all.
    """
    last = errors[-1]
    if not last.permanent or len({type(error) for error in errors}) == 1:
        return last
    passing = [error for error in errors if not error.permanent]
    if passing:
        return passing[-1]
    return RasUnreachable("The nodes disagree: " + " / ".join(error.what for error in errors), last.fix)
