"""The one connection of this process to a Ray cluster.

Everything that can be wrong and can be asked with a short deadline is asked before `ray.init`: the address,
the token, the versions, whether address and dashboard belong together. One process drives one cluster. We
connect and disconnect, and never stop anything of the cluster.
"""

import platform
import socket
import threading
from types import TracebackType
from typing import Self

import ray
from msgspec import Struct

from tasks.adapters import ray_init
from tasks.adapters.deadline import Patience
from tasks.adapters.ray_answers import Versions
from tasks.adapters.ray_dashboard import RayDashboard
from tasks.adapters.ray_kv import RayKv
from tasks.hang.errors import (
    ClusterAuthError,
    ClusterError,
    ClusterUnreachable,
    SettingsError,
    VersionMismatch,
)

CONNECT_DEADLINE_S = 60.0
CLIENT_DEADLINE_S = 120.0  # three tries, of which one may take 30 s for nothing: see ray_init
_WEB_S = 1.0
_KNOCK_S = 3.0
_DASHBOARD_S = 10.0
_LEAVE_S = 30.0  # the head may be gone
_LAST_PORT = 65535
_one_at_a_time = threading.Lock()


class Cluster(Struct, frozen=True, kw_only=True):
    """The cluster that this process is connected to; leaving it as a context disconnects."""

    address: str
    dashboard_url: str
    versions: Versions

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disconnect()


_connected: Cluster | None = None


def connect(
    address: str, dashboard_url: str, token: str | None = None, *, deadline_s: float | None = None
) -> Cluster:
    """Connect this process; a second call for the same cluster changes nothing.

    Args:
        address: `host:port` of the GCS where a node of the cluster runs here, else `ray://host:port`.
        dashboard_url: Base address of the same cluster's dashboard.
        token: Where the cluster wants one.
        deadline_s: Seconds that ray.init may take, None for a default that fits the way in.

    Raises:
        SettingsError: the address names no cluster.
        ClusterUnreachable: nothing answers there, or not in time.
        VersionMismatch: Ray or Python differ.
        ClusterAuthError: a token is wanted, or this one is wrong.
        ClusterError: this process uses another cluster already, or the two addresses are of two clusters.
    """
    global _connected  # noqa: PLW0603  Ray's connection belongs to the process, not to an object
    host, port = explicit(address)
    _knock(host, port, address)
    with RayDashboard(dashboard_url, token=token, timeout_s=_DASHBOARD_S) as dashboard:
        mode = dashboard.authentication_mode()
        if mode != "disabled" and not token:
            raise ClusterAuthError(
                f"The cluster at {dashboard.url} wants a token, and ray_token is empty.",
                "Set ray_token to what `ray get-auth-token` prints on the head node.",
            )
        wanted = Cluster(address=address, dashboard_url=dashboard.url, versions=dashboard.versions())
    _compare(wanted)
    usual_s = CLIENT_DEADLINE_S if address.startswith(ray_init.CLIENT) else CONNECT_DEADLINE_S
    with _one_at_a_time:
        if not _is_connected(wanted):
            ray_init.init(address, mode, token, deadline_s or usual_s)
            _check_session(wanted)
        _connected = wanted
    return wanted


def disconnect() -> None:
    """Leave the cluster; does nothing where there is none. The cluster itself goes on.

    Raises:
        ClusterUnreachable: Ray does not let go in time.
    """
    with _one_at_a_time:
        _leave()


def explicit(address: str) -> tuple[str, int]:
    """Host and port of an address that leaves nothing to chance.

    Raises:
        SettingsError: it is empty, `auto` or has no port.
    """
    host, _, port = address.removeprefix(ray_init.CLIENT).rstrip("/").rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise SettingsError(
            f"ray_address is {address!r}, which names no cluster.",
            "Set it to <head>:6379 where the watcher runs on a node of the cluster, else to "
            "ray://<head>:10001; 'auto' could pick another cluster on the same host.",
        )
    return host, int(port)


def _knock(host: str, port: int, address: str) -> None:
    try:
        with socket.create_connection((host, port), timeout=_KNOCK_S) as connection:
            web = _is_web_server(connection)
    except OSError as error:
        raise ClusterUnreachable(
            f"Nothing answers at ray_address {address!r}: {error.strerror or error}.",
            "Set ray_address to the cluster's <head>:6379, or ray://<head>:10001, and check the firewall.",
        ) from error
    if web:
        raise ClusterUnreachable(
            f"A web server answers at ray_address {address!r}, not a Ray cluster.",
            "Set ray_address to the cluster's <head>:6379, or ray://<head>:10001; the dashboard has its "
            "own field, ray_dashboard_url.",
        )


def _is_web_server(connection: socket.socket) -> bool:
    """Whether what answers speaks HTTP/1; Ray speaks gRPC, and would try for a minute to be understood."""
    connection.settimeout(_WEB_S)
    try:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def _compare(cluster: Cluster) -> None:
    """Compare versions before Ray does. The patch level of Python is left to ray.init: whether it counts
    depends on the way in, and on a setting of Ray's.
    """
    theirs = cluster.versions
    python = platform.python_version()
    same_python = not theirs.python or theirs.python.split(".")[:2] == python.split(".")[:2]
    if theirs.ray != ray.__version__ or not same_python:
        raise VersionMismatch(
            f"The cluster at {cluster.address!r} (ray_address) runs Ray {theirs.ray} on Python "
            f"{theirs.python or 'unknown'}; this process has Ray {ray.__version__} on Python {python}.",
            "Run the watcher in the training image, or install the cluster's versions.",
        )


def _is_connected(wanted: Cluster) -> bool:
    """Whether there is nothing to do. A cluster that was started anew at the same address is left."""
    if not ray.is_initialized():
        return False
    try:
        session = _session()
    except ClusterUnreachable:
        session = ""
    if session == wanted.versions.session_name:
        return True
    same_address = _connected is not None and _connected.address == wanted.address
    if same_address and session:
        raise _two_clusters(wanted, session)
    if same_address:
        _leave()
        return False
    held = repr(_connected.address) if _connected else "a cluster that was not chosen by rankwatch"
    raise ClusterError(
        f"This process is connected to {held}, so it cannot use {wanted.address!r} (ray_address).",
        "One process drives one cluster: watch the runs of another cluster from another Prefect worker.",
    )


def _check_session(wanted: Cluster) -> None:
    session = _session()
    if wanted.versions.session_name != session:
        _leave()
        raise _two_clusters(wanted, session)


def _two_clusters(wanted: Cluster, session: str) -> ClusterError:
    return ClusterError(
        f"ray_address {wanted.address!r} and ray_dashboard_url {wanted.dashboard_url} belong to two "
        f"clusters ({session} and {wanted.versions.session_name}).",
        "Set both to the same cluster.",
    )


def _session() -> str:
    """The name of the cluster's session, a new one at each start of its head."""
    return (RayKv("session").get("session_name") or b"").decode()


def _leave() -> None:
    global _connected  # noqa: PLW0603  see connect
    _connected = None
    if ray.is_initialized():
        Patience().within(_LEAVE_S, ray.shutdown, "disconnect")
