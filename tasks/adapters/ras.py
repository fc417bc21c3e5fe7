"""Reports of NCCL's RAS, asked on a node of the training run.

Any process of the job answers for all of them, so one node is enough; but that process may be stopped, its
node may be gone, and the port may belong to another job. So a failure moves on to the next node, and an
answer counts only if it shows one of our processes.
"""

import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from tasks.adapters.node_part import parse_ras_addr
from tasks.adapters.ports import NodePort
from tasks.hang.errors import (
    RAS_ERRORS,
    NodeError,
    RasError,
    RasNoAnswer,
    RasUnreachable,
    RasWrongJob,
    SettingsError,
)
from tasks.hang.run import Attempt, Node

_TRANSPORT_SLACK_S = 10.0  # a first Ray task on a node starts a worker process: 1 s, 7 s under load
_RECONNECTS = 3
_PID = re.compile(rb'"pid": (-?\d+)')

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
        max_nodes: How many nodes are asked before giving up.

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

    def status(self, attempt: Attempt) -> bytes:
        """One report, raw JSON as received.

        Raises:
            RasError: there is none; the leaf says why.
        """
        return self._ask_nodes(attempt, "json")

    def text(self, attempt: Attempt) -> str:
        """NCCL's own report for people. It names no process of a healthy job, so it cannot be checked to be
        ours: read it beside the JSON of the same moment.

        Raises:
            RasError: there is none; the leaf says why.
        """
        return self._ask_nodes(attempt, "text").decode("utf-8", "replace")

    def _ask_nodes(self, attempt: Attempt, wanted: str) -> bytes:
        nodes = self._in_order(attempt.nodes)
        if not nodes:
            raise RasUnreachable(f"Run {attempt.run_name} has no ranks yet, so there is nobody to ask.")
        until = time.monotonic() + 2 * self._deadline_s
        errors: list[RasError] = []
        for node in nodes[: self._max_nodes]:
            if errors and time.monotonic() > until:
                break
            try:
                raw = self._ask(node, attempt, wanted)
            except RasError as error:
                errors.append(error)
                self._first = nodes[len(errors) % len(nodes)]
            else:
                self._first = node
                return raw
        raise _verdict(errors)

    def _in_order(self, nodes: Sequence[Node]) -> list[Node]:
        """Start with the node that answered last, or with the one after those that did not: a run whose
        first nodes are lost must not stay unwatched.
        """
        start = nodes.index(self._first) if self._first in nodes else 0
        return [*nodes[start:], *nodes[:start]]

    def _ask(self, node: Node, attempt: Attempt, wanted: str) -> bytes:
        """Ask a node, and once more if another job answers: the kernel picks among the processes that share
        the port.
        """
        pids = [rank.pid for rank in attempt.ranks if rank.node == node]
        request = {**self._request, "format": wanted, "pids": pids}
        raw = self._call(node, request)
        if wanted == "json" and _is_foreign(raw, attempt.pids):
            raw = self._call(node, request)
            if _is_foreign(raw, attempt.pids):
                where = f"RAS at {self._where(node)}"
                raise RasWrongJob(f"{where} shows none of the processes of this run.", _FIXES["wrong_job"])
        return raw

    def _call(self, node: Node, request: dict[str, Any]) -> bytes:
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


def _is_foreign(raw: bytes, pids: frozenset[int]) -> bool:
    """Whether the answer shows processes, and none of ours. Found by scanning up to the first one of ours:
    a report of a large job has 100 MB. A report without any communicator shows nobody, and is fine.
    """
    seen = False
    for found in _PID.finditer(raw):
        if int(found[1]) in pids:
            return False
        seen = True
    return seen and bool(pids)


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
