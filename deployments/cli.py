"""The command line. Exit codes: 0 nothing wrong, 1 failed, 2 unusable input or settings, 3 a hang found."""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from cyclopts import App, Parameter
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.table import Table

from deployments.deploy import deploy_watch, ensure_pool
from deployments.replay import Times, replay
from deployments.up import LOCAL_SERVER
from deployments.up import up as run_up
from tasks.blocks import TrainingRun, slug_of
from tasks.handover import start_shift
from tasks.hang.errors import RankwatchError, RunNotFound, SettingsError
from tasks.hang.memory import recall
from tasks.hang.policy import Action
from tasks.ownership import SERVER_ERRORS, now, owner_is_there, read_window
from tasks.reporting.wording import summary
from tasks.settings import RasPlace, RasSourceName
from tasks.wiring import eyes_of, load_run

_DASHBOARD = "http://127.0.0.1:8265"
app = App(
    name="rankwatch",
    help="Watches distributed training runs for NCCL hangs.",
    version=importlib.metadata.version("rankwatch"),
)


@app.command
def up() -> None:
    """Start what a single machine needs: server (unless PREFECT_API_URL is set), worker, sweep."""
    run_up()


@app.command
def add(
    run: str,
    *,
    ray_address: str | None = None,
    storage_path: str | None = None,
    ray_dashboard_url: str | None = None,
    ray_token: Annotated[str | None, Parameter(env_var="RANKWATCH_RAY_TOKEN")] = None,
    run_id: str | None = None,
    action: Action | None = None,
    source: RasSourceName | None = None,
    place: RasPlace | None = None,
    ras_addr: str | None = None,
    poll_interval_s: float | None = None,
    confirm_duration_s: float | None = None,
    suspect_after_s: float | None = None,
    repeat_every_s: float | None = None,
    confirm_unresponsive_s: float | None = None,
    confirm_symmetric_s: float | None = None,
    confirm_init_s: float | None = None,
    unresponsive_action: Action | None = None,
    symmetric_action: Action | None = None,
    init_action: Action | None = None,
    fast_confirm_s: float | Literal["on", "off"] | None = None,
    witness_gap_s: float | None = None,
    extend_factor: float | None = None,
    envelope_cap_s: float | None = None,
    settle_s: float | None = None,
    capture_deadline_s: float | None = None,
    acknowledge_within_s: float | None = None,
    shift_s: float | None = None,
    spool_path: str | None = None,
) -> None:
    """Watch a training run: check everything, then create its deployment and start it.

    Args:
        run: Name of the run in Ray Train.
        ray_address: host:port of the cluster's GCS, or ray://host:port; needed for a new run.
        storage_path: Folder in which evidence is kept; needed for a new run.
        ray_dashboard_url: Address of Ray's dashboard; http://127.0.0.1:8265 for a new run.
        ray_token: Token of the cluster, better given as RANKWATCH_RAY_TOKEN.
        run_id: Ray Train's run id, where one name was used twice.
        action: What a confirmed hang leads to.
        source: How RAS is asked.
        place: From where RAS is asked.
        ras_addr: host:port of RAS where it is not localhost:28028.
        poll_interval_s: Seconds between two polls.
        confirm_duration_s: Seconds until a hang is confirmed.
        suspect_after_s: Seconds until it is suspected.
        repeat_every_s: Seconds between reminders.
        confirm_unresponsive_s: Seconds until it is a hang where a rank does not answer.
        confirm_symmetric_s: Seconds until it is a hang where all ranks launched the same.
        confirm_init_s: Seconds until it is a hang where a communicator is being created.
        unresponsive_action: What a hang leads to where a rank does not answer.
        symmetric_action: What a hang leads to where all ranks launched the same.
        init_action: What a hang leads to where a communicator is being created.
        fast_confirm_s: Confirm this early where witnesses agree strongly: seconds, on (90) or off.
        witness_gap_s: Seconds between the two samples of a witness.
        extend_factor: By which the confirm time grows, once, when a rank that is behind visibly works.
        envelope_cap_s: The most that earlier stalls can make of a confirm time.
        settle_s: Seconds at the start of an attempt in which RAS is not asked.
        capture_deadline_s: Seconds that a capture may take.
        acknowledge_within_s: Seconds until processes are killed where the in-job part does not answer.
        shift_s: Seconds that one flow run polls.
        spool_path: Local folder for the RAS history.
    """
    given = {
        "ray_token": SecretStr(ray_token) if ray_token else None,
        "run_id": run_id,
        "ray_address": ray_address,
        "ray_dashboard_url": ray_dashboard_url,
        "storage_path": storage_path,
        "action": action,
        "source": source,
        "place": place,
        "ras_addr": ras_addr,
        "poll_interval_s": poll_interval_s,
        "confirm_duration_s": confirm_duration_s,
        "suspect_after_s": suspect_after_s,
        "repeat_every_s": repeat_every_s,
        "confirm_unresponsive_s": confirm_unresponsive_s,
        "confirm_symmetric_s": confirm_symmetric_s,
        "confirm_init_s": confirm_init_s,
        "unresponsive_action": unresponsive_action,
        "symmetric_action": symmetric_action,
        "init_action": init_action,
        "fast_confirm_s": fast_confirm_s,
        "witness_gap_s": witness_gap_s,
        "extend_factor": extend_factor,
        "envelope_cap_s": envelope_cap_s,
        "settle_s": settle_s,
        "capture_deadline_s": capture_deadline_s,
        "acknowledge_within_s": acknowledge_within_s,
        "shift_s": shift_s,
        "spool_path": spool_path,
    }
    with _server():
        block, changes = _merged(run, {name: value for name, value in given.items() if value is not None})
        eyes = eyes_of(block)
        attempt = eyes.find()
        if attempt.finished:
            raise RunNotFound(f"The run {run!r} is over: there is nothing to watch.", "Start it again first.")
        warning = eyes.plan.check_fit(attempt)
        ensure_pool()
        block.save(block.slug, overwrite=True)
        deploy_watch(block)
        started = start_shift(block.slug)
    print(f"{run} is watched as {block.slug} (action {eyes.plan.settings.action}).")
    if warning:
        print(warning)
    for change in changes:
        print(f"Changed: {change}. The next shift goes by it.")
    print("A shift was started." if started else "A shift is at work or about to start.")


def _merged(run: str, given: dict[str, Any]) -> tuple[TrainingRun, list[str]]:
    """What a run becomes: of one that is known already, a flag that is not given keeps its value.

    Returns:
        The block, and what changes, as `field: old -> new`.

    Raises:
        SettingsError: the run is new, and a flag that it needs is missing.
    """
    try:
        known = load_run(slug_of(run))
    except RunNotFound:
        for name in ("ray_address", "storage_path"):
            if name not in given:
                flag = f"--{name.replace('_', '-')}"
                raise SettingsError(
                    f"{run!r} is not known yet, so {flag} is needed.", f"Give {flag}."
                ) from None
        return TrainingRun(run_name=run, **{"ray_dashboard_url": _DASHBOARD, **given}), []
    asked = TrainingRun(**{**known.model_dump(), **given})
    fields = {name: getattr(asked, name) for name in given}
    changes = [
        f"{name}: {getattr(known, name)} -> {value}"
        for name, value in fields.items()
        if getattr(known, name) != value
    ]
    return known.model_copy(update=fields), changes


@app.command
def status(run: str) -> None:
    """Show what is known of a run, and who watches it.

    Args:
        run: Name of the run in Ray Train.
    """
    with _server():
        try:
            block = load_run(slug_of(run))
        except RunNotFound as error:
            raise RunNotFound(f"No run named {run!r} was added.", error.fix) from error
        stored, _ = read_window(block.slug)
    window = recall(stored.window, str(stored.window.get("attempt_id", "")))
    watched = owner_is_there(stored, now())
    table = Table(title=run, show_header=False)
    beat = stored.heartbeat_at.isoformat(timespec="seconds") if stored.heartbeat_at else "never"
    table.add_row("watched", f"yes, by {stored.owner}" if watched else f"no ({stored.farewell or 'no sign'})")
    table.add_row("last heartbeat", beat)
    table.add_row(
        "state", summary(window) if window.communicators or window.blind else "Nothing stands still."
    )
    table.add_row("open incident", stored.incident or "none")
    Console().print(table)


@app.command(name="replay")
def replay_(
    folder: Path,
    *,
    poll_interval: float | None = None,
    confirm: float = 600.0,
    suspect_after: float | None = None,
    confirm_unresponsive: float | None = None,
    confirm_init: float | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run the detector over stored RAS reports; exits with 3 where it confirms a hang. Needs no server.

    Args:
        folder: Reports in json, one a file, in the order of their names; or the folder of an incident.
        poll_interval: Seconds between two files; without it the time in each report counts, as UTC.
        confirm: Seconds until a freeze is a hang.
        suspect_after: Seconds until it is told of for the first time: 60, or --confirm where that is shorter.
        confirm_unresponsive: As --confirm, where a rank does not answer.
        confirm_init: As --confirm, for a communicator that is being created.
        json: Print one JSON object for each event, and nothing else.
    """
    times = Times(
        poll_interval_s=poll_interval,
        confirm_s=confirm,
        suspect_after_s=suspect_after,
        confirm_unresponsive_s=confirm_unresponsive,
        confirm_init_s=confirm_init,
    )
    return replay(folder, times, as_json=json)


@contextmanager
def _server() -> Iterator[None]:
    """Use the server that is set, else the one that `rankwatch up` starts on this machine.

    Without it Prefect would start a server of its own for each command, and everything would be lost with it.
    """
    if url := PREFECT_API_URL.value():
        _check_server(url)
        yield
        return
    try:
        httpx.get(f"{LOCAL_SERVER}/health", timeout=5).raise_for_status()
    except httpx.HTTPError as error:
        raise SettingsError(
            f"PREFECT_API_URL is not set, and nothing answers at {LOCAL_SERVER} ({error}).",
            "Start one with `rankwatch up`, or set PREFECT_API_URL to yours.",
        ) from error
    with temporary_settings({PREFECT_API_URL: LOCAL_SERVER}):
        yield


def _check_server(url: str) -> None:
    try:
        healthy = httpx.get(f"{url.rstrip('/')}/health", timeout=10).text.strip() == "true"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SettingsError(
            f"PREFECT_API_URL is {url!r}, and nothing answers there ({error}).",
            "Start it, or set the right one.",
        ) from error
    if not healthy:
        raise SettingsError(
            f"PREFECT_API_URL is {url!r}, and what answers there is no Prefect API.",
            "Set it to http://<host>:4200/api, with /api.",
        )


def main() -> None:
    """Run the command line; an error is one sentence, not a traceback."""
    try:
        app()
    except RankwatchError as error:
        sys.exit(_refuse(str(error)))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]).replace("_", "-")
        sys.exit(_refuse(f"--{field} is {first['input']!r}: {first['msg']}."))
    except SERVER_ERRORS as error:
        sys.exit(_refuse(f"The Prefect server does not answer: {error}. Set PREFECT_API_URL or start one."))


def _refuse(text: str) -> int:
    Console(stderr=True, soft_wrap=True).print(
        f"rankwatch: {text}", style="red", markup=False, highlight=False
    )
    return 2
