"""Runs node_part.py on the nodes of a run, as Ray tasks that need no CPU, no GPU and nothing installed.

The training holds all resources and is hung: a task that wants none and is pinned to a node is scheduled
all the same. The module travels by value; a runtime environment would have Ray build one on the node
first, for minutes.
"""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tasks.adapters import node_part
from tasks.adapters.deadline import Patience
from tasks.hang.errors import ClusterUnreachable, NodeError
from tasks.hang.run import Node

# What submitting and giving up may take beyond the deadline of the task itself.
_SLACK_S = 2.0


class RayNodes:
    """Sends requests to nodes of the connected cluster. Calls to several nodes may run side by side."""

    def __init__(self) -> None:
        self._driver = ""
        self._task: Any = None
        self._patience: dict[str, Patience] = {}

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Run `node_part.handle(request)` on a node.

        Args:
            node: Named by Ray's id.
            request: Plain values.
            deadline_s: Seconds until the task is given up and cancelled.

        Raises:
            NodeError: the node is gone, the task failed there, or there is no answer in time.
        """
        if not node.node_id:
            raise NodeError(f"Ray does not know node {node.ip}: it has no id of Ray's.")
        where = f"Node {node.ip} ({node.node_id[:12]})"
        patience = self._patience.setdefault(node.node_id, Patience())
        try:
            answer = patience.within(
                deadline_s + _SLACK_S,
                lambda: self._ask(node.node_id, request, deadline_s),
                _name_of(request),
            )
        except (GetTimeoutError, ClusterUnreachable) as error:
            raise NodeError(
                f"{where} did not answer {_name_of(request)} within {deadline_s:g} s.",
                "Check that the node is alive and can start another Ray worker.",
            ) from error
        except RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            raise NodeError(f"{where} failed at {_name_of(request)}: {cause!r}.") from error
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            raise NodeError(
                f"{where} did not run {_name_of(request)}: {type(error).__name__} {said}",
                "The node may have left the cluster; find the run again.",
            ) from error
        if not isinstance(answer, dict):
            raise NodeError(f"{where} answers {type(answer).__name__} to {_name_of(request)}.")
        return answer

    def _ask(self, node_id: str, request: dict[str, Any], deadline_s: float) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        reference = self._remote().options(scheduling_strategy=pinned).remote(request)
        try:
            return ray.get(reference, timeout=deadline_s)
        except GetTimeoutError:
            # A stuck py-spy would hold its worker for ever, and each poll would start another one.
            ray.cancel(reference, force=True)
            raise

    def _remote(self) -> Any:
        """The task, made once for each connection: each making stores a copy in the cluster."""
        driver = ray.get_runtime_context().get_job_id()
        if self._task is None or driver != self._driver:
            ray.cloudpickle.register_pickle_by_value(node_part)
            self._task = ray.remote(num_cpus=0, max_retries=0)(node_part.handle)
            self._driver = driver
        return self._task


def _name_of(request: dict[str, Any]) -> str:
    return str(request.get("op", "a request"))
