"""Composition root: settings become adapters here and nowhere else."""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from msgspec import Struct

from tasks.adapters.local_node import LocalNode
from tasks.adapters.object_store import open_store
from tasks.adapters.ports import NodePort, ObjectStore, RasSource, RunDirectory, VerdictChannel
from tasks.adapters.ras import NodeRas
from tasks.adapters.ras_ring import RasRing
from tasks.adapters.ray_cluster import connect
from tasks.adapters.ray_dashboard import RayDashboard
from tasks.adapters.ray_discovery import RayRunDirectory
from tasks.adapters.ray_kv import RayKv, RayVerdictChannel
from tasks.adapters.ray_nodes import RayNodes
from tasks.blocks import TrainingRun
from tasks.hang.errors import RunNotFound
from tasks.hang.run import Attempt
from tasks.settings import WatchPlan, WatchSettings, resolve

_RING_MARGIN_POLLS = 10
_ANSWER_SLACK_S = 8.0


class Eyes(Struct, frozen=True, kw_only=True):
    """Everything that sees and touches one training run."""

    plan: WatchPlan
    directory: RunDirectory
    ras: RasSource
    nodes: NodePort
    channel: VerdictChannel
    store: ObjectStore
    ring: RasRing
    storage_path: str
    run_key: str
    reconnect: Callable[[], object]

    def find(self) -> Attempt:
        """The newest attempt of the run.

        Raises:
            RunNotFound: the cluster knows it no more.
            ClusterError: the cluster cannot be asked.
        """
        return self.directory.find(self.run_key)

    def where(self, name: str) -> str:
        """Where people find an object of the store."""
        return f"{self.storage_path.rstrip('/')}/{name}"


def load_run(slug: str) -> TrainingRun:
    """The TrainingRun block of a run.

    Raises:
        RunNotFound: there is none of that name.
    """
    try:
        run = TrainingRun.load(slug)
    except ValueError as error:
        raise RunNotFound(
            f"Prefect has no TrainingRun block named {slug!r}.", "Add the run with: rankwatch add RUN ..."
        ) from error
    if not isinstance(run, TrainingRun):
        raise RunNotFound(f"The block {slug!r} is no TrainingRun.", "Add the run with: rankwatch add RUN ...")
    return run


def eyes_of(run: TrainingRun) -> Eyes:
    """Wire a run, once for each process and version of its block.

    Raises:
        SettingsError: a value of the block or the environment is not allowed.
        ClusterError: the cluster cannot be used.
        StoreError: the storage path cannot be written.
        RunNotFound: the cluster knows no such run.
    """
    return _wire(run.model_dump_json())


@lru_cache(maxsize=8)
def _wire(document: str) -> Eyes:
    run = TrainingRun.model_validate_json(document)
    fields = run.model_dump(exclude={"run_name", "run_id", "ray_token"})
    resolve(fields, {})  # refuse what is wrong in the block before anything is asked
    token = run.ray_token.get_secret_value() if run.ray_token else None
    store = open_store(run.storage_path)
    store.probe()
    dashboard = RayDashboard(run.ray_dashboard_url, token=token)
    join = partial(connect, run.ray_address, run.ray_dashboard_url, token)
    join()
    kv = RayKv()
    directory = RayRunDirectory(kv=kv, dashboard=dashboard)
    run_key = run.run_id or run.run_name
    directory.find(run_key)
    plan = resolve(fields, directory.job_environment(run_key))
    settings = plan.settings
    nodes = RayNodes()
    ring = RasRing(
        Path(settings.spool_path).expanduser() / run.slug / "nccl_ras",
        plan.policy.window_polls + _RING_MARGIN_POLLS,
    )
    ring.probe()
    return Eyes(
        plan=plan,
        directory=directory,
        ras=_ras(settings, nodes),
        nodes=nodes,
        channel=RayVerdictChannel(kv),
        store=store,
        ring=ring,
        storage_path=run.storage_path,
        run_key=run_key,
        reconnect=join,
    )


def _ras(settings: WatchSettings, nodes: NodePort) -> RasSource:
    collect_s = max(1, int(min(settings.poll_interval_s, 5.0)))
    return NodeRas(
        LocalNode() if settings.place == "direct" else nodes,
        method=settings.source,
        addr=settings.ras_addr,
        collect_timeout_s=collect_s,
        deadline_s=collect_s + _ANSWER_SLACK_S,
        binary=settings.ncclras_binary,
    )
