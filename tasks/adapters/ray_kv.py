"""The key-value store of the cluster's control service: where the in-job part announces itself and reads
verdicts.

It needs no service of ours, survives every process but the head, and answers in milliseconds. It is not a
public interface of Ray: what is missing of it in another version is said, not guessed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import ray
from ray.experimental import internal_kv

from tasks.adapters.deadline import Patience
from tasks.adapters.ports import Ack
from tasks.hang.errors import ClusterError, ClusterUnreachable

KV_DEADLINE_S = 10.0

T = TypeVar("T")


class RayKv:
    """Keys and values of one namespace of the connected cluster.

    Args:
        namespace: Ours by default; Ray's own are read for the name of a session.
        deadline_s: Seconds that one call may take.
    """

    def __init__(self, namespace: str = "rankwatch", *, deadline_s: float = KV_DEADLINE_S) -> None:
        self._namespace = namespace.encode()
        self._deadline_s = deadline_s
        self._patience = Patience()

    def get(self, key: str) -> bytes | None:
        """The value, None where there is none. Raises ClusterError."""
        found: bytes | None = self._call("_internal_kv_get", key.encode())
        return found

    def put(self, key: str, value: bytes) -> None:
        """Store a value in place of whatever there is. Raises ClusterError."""
        self._call("_internal_kv_put", key.encode(), value, True)

    def delete(self, key: str) -> None:
        """Remove a key if there is one. Raises ClusterError."""
        self._call("_internal_kv_del", key.encode())

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, sorted. Raises ClusterError."""
        found: list[bytes] = self._call("_internal_kv_list", prefix.encode())
        return sorted(key.decode() for key in found)

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(internal_kv, name, None)
        if function is None:
            raise ClusterError(
                f"Ray {ray.__version__} has no {name}: the in-job part cannot be reached.",
                "Use a version of Ray that rankwatch is tested with.",
            )
        if not ray.is_initialized():
            raise ClusterUnreachable("This process is not connected to a Ray cluster.", "Call connect first.")
        try:
            return self._patience.within(
                self._deadline_s, lambda: function(*arguments, namespace=self._namespace), "key-value store"
            )
        except ClusterError:
            raise
        except Exception as error:
            raise ClusterUnreachable(f"The cluster's key-value store fails: {error}") from error


class RayVerdictChannel:
    """Carries verdicts to the in-job part under `verdict:<run_id>`; it answers under
    `ack:<run_id>:<incident>`, a key for each incident, so that an old answer is never taken for a new one.
    """

    def __init__(self, kv: RayKv) -> None:
        self._kv = kv

    def post(self, run_id: str, verdict: dict[str, Any]) -> None:
        """Publish a verdict in place of the one before.

        Raises:
            ClusterError: the cluster does not take it.
        """
        self._kv.put(f"verdict:{run_id}", msgspec.json.encode(verdict))

    def acknowledged(self, run_id: str, incident: str) -> Ack | None:
        """What the in-job part says about an incident, None while it says nothing.

        Raises:
            ClusterError: the cluster does not answer, or the answer is none of ours.
        """
        content = self._kv.get(f"ack:{run_id}:{incident}")
        if not content:
            return None
        try:
            return msgspec.json.decode(content, type=Ack, strict=False)
        except msgspec.MsgspecError as error:
            raise ClusterError(f"The in-job part answers something unknown: {content[:200]!r}.") from error

    def clear(self, run_id: str) -> None:
        """Take the verdict back.

        Raises:
            ClusterError: the cluster does not answer.
        """
        self._kv.delete(f"verdict:{run_id}")
