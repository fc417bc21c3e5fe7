"""`ray.init` with a deadline, an environment of our choice, and errors that say what to set.

Left alone it picks address, token and runtime environment from the environment, takes the SIGTERM handler
away from whoever runs us when it is called in the main thread, and tries for up to a minute before it says
what is wrong. So it runs in a thread of its own.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn

import ray
from ray import _raylet
from ray._private import ray_constants

from tasks.adapters.deadline import in_background
from tasks.hang.errors import ClusterAuthError, ClusterUnreachable, VersionMismatch

NAMESPACE = "rankwatch"
CLIENT = "ray://"
_CLIENT_TRIES = 3
_SHUT_OUT = (
    "RAY_ADDRESS",
    "RAY_NAMESPACE",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
)
# How Ray should behave in a process that watches, unless the environment says otherwise. After 60 s without
# the head Ray ends the process of a driver, without a word to it; a watch goes on, and connects anew when the
# head is back. And the thread that exports Ray's metrics was seen to crash a driver of Ray 2.60 (SIGSEGV in
# opentelemetry, just after ray.init); nobody needs the metrics of a watcher.
_PREFERRED = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_enable_metrics_collection": "0",
}
_WAYS_IN = (
    "An address host:port works only on a node of that cluster; from outside set ray_address to "
    "ray://<head>:10001."
)
_FORKS = (
    "Start the head with GRPC_ENABLE_FORK_SUPPORT=0: without it Ray Client's servers may hang as they start."
)
# A ray.init that was given up and has not come back: a second one beside it would wait for its lock.
_late: "Future[Any] | None" = None


def init(address: str, mode: str, token: str | None, deadline_s: float) -> None:
    """Make this process a driver of the cluster. Not thread-safe.

    Args:
        address: As ray.init takes it.
        mode: The cluster's authentication mode, `disabled` or `token`.
        token: For mode `token`.
        deadline_s: Seconds to wait.

    Raises:
        ClusterUnreachable: no connection, or not in time.
        VersionMismatch: Ray or Python differ.
        ClusterAuthError: the cluster refuses the token.
    """
    global _late  # noqa: PLW0603  ray.init acts on the whole process, and so does what is left of it
    if _late is not None and not _late.done():
        raise ClusterUnreachable("An earlier attempt to connect to Ray has not come back yet.", _fix(address))
    with _environment(mode, token):
        _late = in_background(lambda: _ray_init(address))
        try:
            _late.result(timeout=deadline_s)
        except Exception as error:  # noqa: BLE001  ray.init raises what it likes
            if isinstance(error, TimeoutError) and not _late.done():
                raise ClusterUnreachable(
                    f"{address!r} (ray_address) listens, but Ray could not connect to it within "
                    f"{deadline_s:g} s.",
                    _fix(address),
                ) from None
            _explain(error, address)


def _ray_init(address: str) -> None:
    """For a Ray Client the head forks a server of its own, and with Ray 2.60 that fork hung or died in 4 of
    18 cases, and in 0 of 25 with gRPC's fork support switched off on the head. The head gives up after 30 s,
    and the next try gets another fork.
    """
    tries = _CLIENT_TRIES if address.startswith(CLIENT) else 1
    for left in reversed(range(tries)):
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,  # it would print the output of the training into our logs
                logging_level=logging.ERROR,
                _skip_env_hook=True,
            )
        except ConnectionAbortedError:
            if not left:
                raise
        else:
            return


def _fix(address: str) -> str:
    return _FORKS if address.startswith(CLIENT) else _WAYS_IN


def _explain(error: BaseException, address: str) -> NoReturn:
    """Ray wraps what went wrong in a ConnectionError that does not say it."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    text = " <- ".join(" ".join(str(link).split()) for link in chain)
    where = f"{address!r} (ray_address)"
    if "ersion mismatch" in text:
        raise VersionMismatch(
            f"The cluster at {where} has other versions: {text}",
            "Run the watcher in the training image, or install the cluster's versions.",
        ) from error
    if "uthenticat" in text or "InvalidAuthToken" in text:
        raise ClusterAuthError(
            f"The cluster at {where} refuses ray_token: {text}",
            "Set ray_token to what `ray get-auth-token` prints on the head node.",
        ) from error
    raise ClusterUnreachable(f"Ray could not connect to {where}: {text}", _fix(address)) from error


@contextmanager
def _environment(mode: str, token: str | None) -> Iterator[None]:
    """The environment as ray.init should see it, and afterwards as it was.

    Ray keeps the token that it has read, so it need not stay where child processes inherit it.
    """
    kept = {name: os.environ[name] for name in (*_SHUT_OUT, *_PREFERRED) if name in os.environ}
    for name in _SHUT_OUT:
        os.environ.pop(name, None)
    os.environ.update({name: kept.get(name, value) for name, value in _PREFERRED.items()})
    os.environ["RAY_AUTH_MODE"] = mode
    if token and mode != "disabled":
        os.environ["RAY_AUTH_TOKEN"] = token
    _reread_configuration()
    try:
        with _without_uv():
            yield
    finally:
        for name in (*_SHUT_OUT, *_PREFERRED):
            os.environ.pop(name, None)
        os.environ.update(kept)


@contextmanager
def _without_uv() -> Iterator[None]:
    """Under `uv run` Ray would send our working directory to the training nodes as runtime environment."""
    switch = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    before = getattr(ray_constants, switch, None)
    setattr(ray_constants, switch, False)
    try:
        yield
    finally:
        setattr(ray_constants, switch, before)


def _reread_configuration() -> None:
    """Ray reads these variables once, when it is imported; before 2.51 it knows no tokens."""
    config, loader = (getattr(_raylet, name, None) for name in ("Config", "AuthenticationTokenLoader"))
    if config is not None and loader is not None:
        config.initialize("")
        loader.instance().reset_cache()
