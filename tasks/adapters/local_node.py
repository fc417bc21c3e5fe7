"""Runs node_part in this process: where RAS is reached over TCP from here, and in tests."""

import threading
from typing import Any

from tasks.adapters import node_part
from tasks.hang.errors import NodeError
from tasks.hang.run import Node


class LocalNode:
    """NodePort for this machine.

    An operation may be stuck in the kernel (reading /proc of a process in D state, a name server that is
    silent). So it runs in a daemon thread that is left behind when its time is over.
    """

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Run the operation here, whatever `node` says.

        Raises:
            NodeError: no answer within `deadline_s` seconds.
        """
        answers: list[dict[str, Any]] = []
        worker = threading.Thread(
            target=lambda: answers.append(node_part.handle(request)),
            name=f"node_part {request.get('op')}",
            daemon=True,
        )
        worker.start()
        worker.join(deadline_s)
        if not answers:
            raise NodeError(
                f"{request.get('op')!r} for node {node.ip}, run on this machine, took over {deadline_s:g} s.",
                "Look for processes in state D, or raise the deadline.",
            )
        return answers[0]
