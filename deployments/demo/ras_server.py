"""A stand-in for the RAS server inside NCCL, for the demo and the tests: no GPU, the same wire protocol.

It speaks what NVIDIA's server speaks, down to its habits: commands in any case, CRLF accepted, lines beyond
1024 bytes reset the connection, one STATUS per connection, the end of the report is the end of the
connection. MONITOR is acknowledged and stays silent. Its answers were compared with recorded ones.
"""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from deployments.demo.ras_report import (
    Place,
    RasCommunicator,
    RasMissingRank,
    RasRank,
    RasSnapshot,
    render_json,
)
from deployments.demo.ras_text import render_text

__all__ = ["Place", "RasCommunicator", "RasMissingRank", "RasRank", "RasServer", "RasSnapshot"]

_LINE_BYTES = 1024
_JOIN_S = 5.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_GROUPS = ("lifecycle", "trace", "all")
_TIMEOUT = re.compile(r"[0-9]*")


class RasServer:
    """Listens from its construction until `close`.

    Args:
        snapshot: Gives what a query collects; called at each STATUS, in a thread of the connection.
        host: Name or address to listen at.
        port: 0 takes a free one. Several servers may share a port, as the processes of a job do.
        json_supported: False behaves as NCCL 2.27.5: no SET FORMAT, no MONITOR.
        missing_comma: Send the invalid JSON of NCCL 2.28.7 to 2.28.9 where ranks are missing.
        truncate_at: End the connection after so many bytes of the report.
        silent: Take connections and never answer, as a stopped process does.
        silent_first: The same, for so many connections only.
    """

    def __init__(
        self,
        snapshot: Callable[[], RasSnapshot],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        json_supported: bool = True,
        missing_comma: bool = False,
        truncate_at: int | None = None,
        silent: bool = False,
        silent_first: int = 0,
    ) -> None:
        self._snapshot = snapshot
        self.json_supported = json_supported
        self.missing_comma = missing_comma
        self.truncate_at = truncate_at
        self.silent = silent
        self.connections = 0
        self._silent_first = silent_first
        self._closing = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._listener.bind(address)
        self._listener.listen(64)
        bound_host, bound_port = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = (bound_host, bound_port)
        self._start(self._accept)

    @property
    def addr(self) -> str:
        """Where it listens, as NCCL_RAS_ADDR is written."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening, end all connections, wait for their threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closing = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        for thread in threads:
            thread.join(_JOIN_S)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="ras_server", daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                silent = self.silent or self.connections <= self._silent_first
                if self._closing:
                    connection.close()
                    return
                self._open.add(connection)
                self._start(self._serve, connection, silent)

    def _serve(self, connection: socket.socket, silent: bool) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                if silent:
                    while connection.recv(_LINE_BYTES):
                        pass
                else:
                    _Conversation(self, connection).run(self._snapshot)
        finally:
            with self._lock:
                self._open.discard(connection)


class _Conversation:
    """One connection, from its first command to its report."""

    def __init__(self, server: RasServer, connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._json = False
        self._rest: bytes | None = None
        self._bytes_left = server.truncate_at

    def run(self, snapshot: Callable[[], RasSnapshot]) -> None:
        buffer = b""
        while self._rest is None:
            if len(buffer) >= _LINE_BYTES:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                return
            received = self._connection.recv(_LINE_BYTES - len(buffer))
            if not received:
                return
            *lines, buffer = (buffer + received).split(b"\n")
            # A STATUS does not keep the rest of the same read from being executed, before the report.
            for line in lines:
                self._execute(line.removesuffix(b"\r").decode("utf-8", "replace"), snapshot)
        self._send_part(self._rest)

    def _execute(self, line: str, snapshot: Callable[[], RasSnapshot]) -> None:
        command = line.upper()
        modern = self._server.json_supported
        if command.startswith("CLIENT PROTOCOL "):
            self._say("SERVER PROTOCOL 2")
        elif command.startswith("TIMEOUT "):
            value = line[len("TIMEOUT ") :]
            self._say("OK" if _TIMEOUT.fullmatch(value) else f"ERROR: Invalid timeout value {value}")
        elif modern and command.startswith("SET FORMAT "):
            self._set_format(line[len("SET FORMAT ") :])
        elif modern and (command == "MONITOR" or command.startswith("MONITOR ")):
            self._monitor(line.split(" ", 1)[1:])
        elif command in ("STATUS", "VERBOSE STATUS"):
            self._report(snapshot(), verbose=command != "STATUS")
        else:
            self._say(f"ERROR: Unknown command {line}")

    def _set_format(self, value: str) -> None:
        known = value.lower() in ("text", "json")
        self._json = value.lower() == "json" if known else self._json
        self._say("OK" if known else f"ERROR: Invalid format {value}")

    def _monitor(self, groups: list[str]) -> None:
        wrong = [group for part in groups for group in part.split(",") if group.lower() not in _GROUPS]
        self._say(f"ERROR: Invalid event group '{wrong[0]}'" if wrong else "OK")

    def _report(self, taken: RasSnapshot, *, verbose: bool) -> None:
        if self._json:
            self._rest = render_json(taken, missing_comma=self._server.missing_comma)
        else:
            head, self._rest = render_text(taken, verbose=verbose)
            self._send_part(head)

    def _send_part(self, content: bytes) -> None:
        part = content[: self._bytes_left]
        if self._bytes_left is not None:
            self._bytes_left -= len(part)
        self._connection.sendall(part)

    def _say(self, reply: str) -> None:
        self._connection.sendall(reply.encode() + b"\n")
