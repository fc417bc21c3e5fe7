"""Deadlines for calls that have none: Ray's own functions can wait for a dead cluster for ever, and a
thread that waits inside them cannot be interrupted, neither by Prefect's timeouts nor by us.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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


class Patience:
    """Calls to one place, each with a deadline.

    A call that missed its deadline is left behind in its thread. While it waits there, further calls are
    refused at once: a head that is away for an hour would otherwise gather a thread for each poll.
    """

    def __init__(self) -> None:
        self._late: Future[Any] | None = None

    def within(self, deadline_s: float, call: Callable[[], T], what: str) -> T:
        """Run a call that may hang.

        Args:
            deadline_s: Seconds.
            call: Its own errors are raised here.
            what: What is being done, for the error.

        Raises:
            ClusterUnreachable: no answer in time, or still none to an earlier call.
        """
        late = self._late
        if late is not None and not late.done():
            raise ClusterUnreachable(
                f"Ray has still not answered an earlier call ({what}).", "Check that the head node is alive."
            )
        result = in_background(call)
        try:
            return result.result(timeout=deadline_s)
        except TimeoutError:
            if result.done():  # the call itself raised a TimeoutError: its words are better than ours
                raise
            self._late = result
            raise ClusterUnreachable(
                f"Ray did not answer within {deadline_s:g} s ({what}).", "Check that the head node is alive."
            ) from None
