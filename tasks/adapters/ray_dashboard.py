"""Asks Ray's dashboard over HTTP: versions, runs, actors, logs, jobs. Needs no Ray here.

Most of what a watch wants to know is had from here without becoming a driver of the cluster, from any
host and with any version, and the clear answers of HTTP (401, 403, a version) come before `ray.init`
could hang for a minute over the same fault.
"""

from http import HTTPStatus
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx
from msgspec import Struct

from tasks.adapters.ray_answers import (
    Actor,
    ClusterNode,
    Job,
    TrainRun,
    Versions,
    WorkerProcess,
    parse,
    parse_rows,
)
from tasks.hang.errors import ClusterAuthError, ClusterError, ClusterUnreachable, SettingsError

# The first question about training runs starts a driver inside the dashboard: 4 s cold, far more under load.
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 3.0
_LIMIT = 10_000  # rows; the dashboard refuses to be asked for more
# Ray answers 500 with these words for "there are none"; any other 500 is a fault.
_NO_RUNS = ("Train state data is not available", "Train is not installed")
_NO_FILE = ("not found", "No such file")


class _VersionAnswer(Struct):
    ray_version: str
    session_name: str = ""


class _MetadataAnswer(Struct):
    data: dict[str, Any] = {}


class _ModeAnswer(Struct):
    authentication_mode: str = "disabled"


class _RunsAnswer(Struct):
    train_runs: list[TrainRun]


class RayDashboard:
    """A client of one dashboard.

    Args:
        url: Base address, `http://host:8265`; a bare `host:port` is taken as http.
        token: Bearer token of a cluster with RAY_AUTH_MODE=token.
        timeout_s: Seconds that the dashboard may be silent.

    Raises:
        SettingsError: the address is none.
        ClusterAuthError: the token can be none.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = _base(url)
        self._has_token = bool(token)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {_printable(token)}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def authentication_mode(self) -> str:
        """`token`, or `disabled` (also for a Ray that is too old to know tokens). Asked without a token."""
        answer = self._get("/api/authentication_mode", allow=(HTTPStatus.NOT_FOUND,))
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return "disabled"
        return parse(answer.content, _ModeAnswer, self._at(answer)).authentication_mode

    def versions(self) -> Versions:
        """Ray's version, its session, and the Python that the head runs."""
        answer = self._get("/api/version")
        version = parse(answer.content, _VersionAnswer, self._at(answer))
        more = self._get("/api/v0/cluster_metadata", allow=(HTTPStatus.NOT_FOUND,))
        python = ""
        if more.status_code == HTTPStatus.OK:
            data = parse(more.content, _MetadataAnswer, self._at(more)).data
            python = str(data.get("pythonVersion", data.get("python_version", "")))
        return Versions(version.ray_version, version.session_name, python)

    def train_runs(self) -> list[TrainRun]:
        """The runs that Ray Train's state tracking knows; none where it is not switched on."""
        answer = self._get("/api/train/v2/runs/v1", allow=(HTTPStatus.INTERNAL_SERVER_ERROR,))
        if answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            if any(words in answer.text for words in _NO_RUNS):
                return []
            self._refuse(answer)
        return parse(answer.content, _RunsAnswer, self._at(answer)).train_runs

    def train_workers(self) -> list[Actor]:
        """The actors that hold a rank of a Ray Train run now."""
        return self._actors(state="ALIVE", class_name="RayTrainWorker")

    def actor(self, actor_id: str) -> Actor | None:
        """One actor, dead ones too; None where the cluster no longer knows it."""
        return next(iter(self._actors(actor_id=actor_id)), None)

    def worker_processes(self) -> list[WorkerProcess]:
        """The worker processes that are alive."""
        return self._rows("/api/v0/workers", WorkerProcess, is_alive="true")

    def nodes(self) -> list[ClusterNode]:
        """The nodes of the cluster, dead ones too."""
        return self._rows("/api/v0/nodes", ClusterNode)

    def jobs(self) -> list[Job]:
        """All jobs, submitted ones and plain drivers."""
        answer = self._get("/api/jobs/")
        return parse(answer.content, list[Job], self._at(answer))

    def log_tail(self, node_id: str, filename: str, *, lines: int) -> str:
        """The last `lines` lines of a log file of a node; empty where there is no such file.

        Args:
            node_id: Ray's id of the node.
            filename: Relative to the session's folder of logs.
            lines: How many.
        """
        answer = self._get(
            "/api/v0/logs/file",
            params={"node_id": node_id, "filename": filename, "lines": lines},
            allow=(HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.NOT_FOUND),
        )
        if answer.status_code == HTTPStatus.OK:
            return answer.text
        if not any(words in answer.text for words in _NO_FILE):
            self._refuse(answer)
        return ""

    def _actors(self, **filters: str) -> list[Actor]:
        return self._rows("/api/v0/actors", Actor, detail=1, **filters)

    def _rows(self, path: str, kind: type[Any], *, detail: int = 0, **filters: str) -> list[Any]:
        params: list[tuple[str, str | int | float | bool | None]] = [("detail", detail), ("limit", _LIMIT)]
        for key, value in filters.items():
            params += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        answer = self._get(path, params=params)
        return parse_rows(answer.content, kind, self._at(answer))

    def _get(self, path: str, *, params: Any = None, allow: tuple[int, ...] = ()) -> httpx.Response:
        """Ask, and let only 200 and what `allow` names pass.

        Raises:
            ClusterUnreachable: nothing answers, or only with an error.
            ClusterAuthError: the token is missing or wrong.
        """
        try:
            answer = self._client.get(path, params=params)
        except httpx.TimeoutException as error:
            raise ClusterUnreachable(
                f"Ray's dashboard at {self.url} (ray_dashboard_url) does not answer {path} in time.",
                "Check that the head node is alive and not overloaded.",
            ) from error
        except httpx.HTTPError as error:
            raise ClusterUnreachable(
                f"Nothing answers at {self.url} (ray_dashboard_url): {error}.",
                "Set ray_dashboard_url to the address of the cluster's dashboard, http://<head>:8265.",
            ) from error
        if answer.status_code != HTTPStatus.OK and answer.status_code not in allow:
            self._refuse(answer)
        return answer

    def _refuse(self, answer: httpx.Response) -> NoReturn:
        said = " ".join(answer.text.split())[:200]
        where = self._at(answer)
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            state = "refuses the token that it was given" if self._has_token else "wants a token"
            raise ClusterAuthError(
                f"{where} {state} ({answer.status_code}: {said}).",
                "Set ray_token to what `ray get-auth-token` prints on the head node.",
            )
        if answer.is_server_error or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            raise ClusterUnreachable(f"{where} answers {answer.status_code}: {said}.", "Try again later.")
        raise ClusterError(
            f"{where} answers {answer.status_code}: {said}.",
            "Check that ray_dashboard_url is the address of a Ray dashboard.",
        )

    def _at(self, answer: httpx.Response) -> str:
        return f"{self.url}{answer.request.url.path} (ray_dashboard_url)"


def _base(url: str) -> str:
    text = url.strip()
    if text and "://" not in text:
        text = f"http://{text}"
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise SettingsError(f"ray_dashboard_url is {url!r}, which is no address: {error}.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SettingsError(
            f"ray_dashboard_url is {url!r}, which is no address.", "Set it to http://<head>:8265."
        )
    return text.rstrip("/")


def _printable(token: str) -> str:
    """A stray newline from a secret store would surface as an error that prints the token."""
    text = token.strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ClusterAuthError(
            "ray_token holds a blank or a character that no token has.",
            "Set ray_token to what `ray get-auth-token` prints on the head node.",
        )
    return text
