"""prefect.yaml and the deployments that `rankwatch add` makes."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from deployments.deploy import deploy_by_hand, deploy_watch, ensure_pool
from deployments.up import Sweep
from flows.watch import watch_run
from tasks.adapters.process import identity
from tasks.blocks import HangWindow, TrainingRun
from tasks.handover import REFUSED, RUN_ENDED, WATCHED_ELSEWHERE, start_next_shift, start_shift
from tasks.ownership import now

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run():
    name = f"run-{uuid.uuid4().hex[:6]}"
    block = TrainingRun(
        run_name=name, ray_address="h:1", ray_dashboard_url="http://h:1", storage_path="/nowhere"
    )
    block.save(name)
    return block


def runs_of(deployment_id):
    with get_client(sync_client=True) as client:
        return [r for r in client.read_flow_runs(limit=200) if r.deployment_id == deployment_id]


def test_prefect_yaml_deploys_watch_diagnose_and_remediate():
    ensure_pool()
    prefect = Path(sys.executable).with_name("prefect")
    done = subprocess.run(
        [prefect, "--no-prompt", "deploy", "--all"],
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with get_client(sync_client=True) as client:
        for name in ("watch_run/watch", "diagnose_run/diagnose", "remediate_run/remediate"):
            deployment = client.read_deployment_by_name(name)
            flow = load_flow_from_entrypoint(str(ROOT / deployment.entrypoint))
            assert flow.name == name.split("/")[0]


def test_a_run_has_one_deployment_however_often_it_is_added(run):
    ensure_pool()
    assert deploy_watch(run) == deploy_watch(run)
    deploy_by_hand()
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"watch_run/watch-{run.slug}")
    assert deployment.parameters == {"run": run.slug}
    assert [schedule.active for schedule in deployment.schedules] == [True]


def test_a_shift_is_started_once_until_it_begins(run):
    ensure_pool()
    deployment = deploy_watch(run)
    before = len(runs_of(deployment))
    assert start_shift(run.slug)
    assert not start_shift(run.slug)
    soon = [r for r in runs_of(deployment) if r.state_type == StateType.SCHEDULED and not r.auto_scheduled]
    assert len(soon) == 1
    assert len(runs_of(deployment)) == before + 1


def end_of(deployment, slug, name):
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run_from_deployment(deployment)
        start_next_shift(watch_run, flow_run, Completed(name=name))
        return client.read_deployment(deployment).paused


def test_the_end_of_a_shift_starts_the_next_one_and_the_end_of_the_run_none(run):
    ensure_pool()
    deployment = deploy_watch(run)
    began = len(runs_of(deployment))
    assert end_of(deployment, run.slug, WATCHED_ELSEWHERE) is False
    assert end_of(deployment, run.slug, REFUSED) is False
    assert end_of(deployment, run.slug, RUN_ENDED) is True
    assert len(runs_of(deployment)) <= began + 3
    assert not start_shift(run.slug)
    assert deploy_watch(run) == deployment
    with get_client(sync_client=True) as client:
        assert client.read_deployment(deployment).paused is False


def test_a_run_without_a_deployment_has_nothing_to_start():
    assert not start_shift("nobody")


def test_the_sweep_starts_what_nobody_watches_and_nothing_else(run):
    ensure_pool()
    deploy_watch(run)
    sweep = Sweep()
    assert run.slug in sweep()
    assert run.slug not in sweep()
    HangWindow(run_name=run.run_name, owner=identity(), heartbeat_at=now()).save(run.slug)
    assert run.slug not in Sweep()()
    HangWindow(run_name=run.run_name, owner=identity(), heartbeat_at=now(), run_ended=True).save(
        run.slug, overwrite=True
    )
    assert run.slug not in Sweep()()
