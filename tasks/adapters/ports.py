"""The seams between rankwatch and the outside world, one Protocol each.

Each has a real part in this folder and a fake one in tests/fakes.py; one contract test runs over both.
"""

from typing import Any, Literal, Protocol

from msgspec import Struct

from tasks.hang.run import Attempt, Node


class NodePort(Protocol):
    """Runs an operation of node_part.py on a node of the training run."""

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Send `request` to `node` and return the answer of node_part.handle.

        Raises:
            NodeError: the node is gone, refuses the task, or did not answer within `deadline_s` seconds.
        """
        ...


class RasSource(Protocol):
    """Where reports come from."""

    def status(self, attempt: Attempt) -> tuple[bytes, ...]:
        """The reports of one moment, raw JSON as received: one for each separate mesh of the job, so usually
        one, and at least one.

        Raises:
            RasError: there is none; the leaf says why.
        """
        ...

    def visible(self, attempt: Attempt) -> tuple[int, int] | None:
        """How many of the attempt's ranks the last reports showed, and of how many; None where that is not
        known, or no communicator exists yet. Asks nobody.
        """
        ...

    def text(self, attempt: Attempt) -> str:
        """NCCL's own report for people.

        Raises:
            RasError: there is none; the leaf says why.
        """
        ...


class RunDirectory(Protocol):
    """Finds the ranks of a training run."""

    def find(self, run_name: str) -> Attempt:
        """The newest attempt of the run, with host and pid of each world rank.

        Raises:
            RunNotFound: no run of that name.
            ClusterError: the cluster cannot be asked.
        """
        ...

    def job_environment(self, run_name: str) -> dict[str, str]:
        """The variables of NCCL, torch and the watch that the training job itself runs with.

        Raises:
            RunNotFound: no run of that name.
            ClusterError: the cluster cannot be asked.
        """
        ...


class Ack(Struct, frozen=True, kw_only=True):
    """What the in-job part did about a verdict. `refused` says in `reason` why it left the attempt alone:
    the verdict was about another attempt, or about processes that are gone.
    """

    incident: str
    outcome: Literal["failed_attempt", "refused"]
    attempt_id: str = ""
    at: str = ""
    reason: str = ""


class VerdictChannel(Protocol):
    """Carries a verdict to the in-job part, and its acknowledgement back."""

    def post(self, run_id: str, verdict: dict[str, Any]) -> None:
        """Publish `verdict` (incident, attempt, pids, message, ranks) for the run.

        Raises:
            ClusterError: the channel cannot be used.
        """
        ...

    def acknowledged(self, run_id: str, incident: str) -> Ack | None:
        """What the in-job part says about this incident, None while it says nothing.

        Raises:
            ClusterError: the channel cannot be used.
        """
        ...

    def clear(self, run_id: str) -> None:
        """Take the verdict back, so that it cannot hit an attempt that is still to come.

        Raises:
            ClusterError: the channel cannot be used.
        """
        ...


class ObjectStore(Protocol):
    """Keeps evidence under names relative to a storage path."""

    def put(self, name: str, content: bytes) -> str:
        """Write whole or not at all; returns where it is. Raises StoreError."""
        ...

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Write only if there is nothing under that name; says whether it wrote. Raises StoreError."""
        ...

    def get(self, name: str) -> bytes | None:
        """The content, or None where there is nothing. Raises StoreError."""
        ...

    def names(self, prefix: str) -> list[str]:
        """All names under `prefix`, sorted. Raises StoreError."""
        ...
