"""Deadlines for calls that have none: Ray's own functions can wait for a dead cluster for ever, and a
thread that waits inside them cannot be interrupted, neither by Prefect's timeouts nor by us.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tasks.hang.errors import ClusterUnreachable

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a daemon thread of its own, which never keeps the process from ending."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  handed over to the thread that waits
            result.set_exception(error)

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    return result


def within(deadline_s: float, call: Callable[[], T], what: str) -> T:
    """Run a call that may hang, and stop waiting for it at the deadline.

    Args:
        deadline_s: Seconds.
        call: Its own errors are raised here.
        what: What is being done, for the error.

    Raises:
        ClusterUnreachable: no answer in time. The thread is left behind.
    """
    result = in_background(call)
    try:
        return result.result(timeout=deadline_s)
    except TimeoutError:
        if result.done():  # the call itself raised a TimeoutError: its words are better than ours
            raise
        raise ClusterUnreachable(
            f"Ray did not answer within {deadline_s:g} s ({what}).", "Check that the head node is alive."
        ) from None
