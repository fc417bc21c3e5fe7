"""Which value counts, where it came from, and what is refused."""

import pytest

from tasks.hang.errors import SettingsError
from tasks.settings import JOB_VARIABLES, WatchSettings, resolve


def test_the_defaults_are_those_of_rays_own_detector():
    plan = resolve({}, {})
    policy = plan.policy
    assert (policy.poll_interval_s, policy.confirm_duration_s, policy.confirm_polls) == (15, 600, 40)
    assert (policy.suspect_after_s, policy.repeat_every_s) == (60, 120)
    assert plan.settings.action == "observe"
    assert set(plan.origin.values()) == {"default"}


def test_block_then_job_then_environment_then_default(monkeypatch):
    job = {"RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S": "300", "NCCL_RAS_ADDR": "node:4000"}
    monkeypatch.setenv("RANKWATCH_CONFIRM_DURATION_S", "200")
    monkeypatch.setenv("RANKWATCH_SHIFT_S", "100")
    plan = resolve({"confirm_duration_s": 400.0, "action": None}, job)
    assert plan.settings.confirm_duration_s == 400
    assert plan.settings.ras_addr == "node:4000"
    assert plan.settings.shift_s == 100
    assert plan.origin["confirm_duration_s"] == "block"
    assert plan.origin["ras_addr"] == "job (NCCL_RAS_ADDR)"
    assert plan.origin["shift_s"] == "environment"
    assert plan.origin["action"] == "default"
    assert resolve({}, job).settings.confirm_duration_s == 300
    assert resolve({}, {}).settings.confirm_duration_s == 200


@pytest.mark.parametrize("field", sorted(JOB_VARIABLES))
def test_the_variables_of_rays_detector_are_honoured(field, monkeypatch):
    value = {"action": "fail", "ras_addr": "h:1", "poll_interval_s": "7"}.get(field, "70")
    monkeypatch.setenv(JOB_VARIABLES[field], value)
    assert str(getattr(resolve({}, {}).settings, field)).startswith(value)
    monkeypatch.setenv(
        f"RANKWATCH_{field.upper()}",
        {"action": "observe", "ras_addr": "h:2", "poll_interval_s": "8"}.get(field, "80"),
    )
    assert not str(getattr(resolve({}, {}).settings, field)).startswith(value)


@pytest.mark.parametrize(
    ("block", "job", "env", "named"),
    [
        ({"poll_interval_s": -1}, {}, {}, "Field poll_interval_s of the TrainingRun block is -1"),
        ({}, {"RAY_TRAIN_NCCL_RAS_ACTION": "kill"}, {}, "RAY_TRAIN_NCCL_RAS_ACTION in the job's runtime_env"),
        (
            {},
            {},
            {"RAY_TRAIN_NCCL_RAS_ACTION": "kill"},
            "RAY_TRAIN_NCCL_RAS_ACTION in the environment is 'kill'",
        ),
        ({}, {}, {"RANKWATCH_SHIFT_S": "soon"}, "RANKWATCH_SHIFT_S in the environment is 'soon'"),
        ({}, {}, {"RANKWATCH_POLL_INTERVAL_S": "nan"}, "RANKWATCH_POLL_INTERVAL_S"),
        ({}, {}, {"RANKWATCH_POLL_INTERVAL_S": "inf"}, "RANKWATCH_POLL_INTERVAL_S"),
        ({}, {"NCCL_RAS_ADDR": "::1"}, {}, "::1"),
        ({"ras_addr": "host:"}, {}, {}, "host:"),
        ({"poll_interval_s": 700}, {}, {}, "longer than confirm_duration_s"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name_and_value(block, job, env, named, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        resolve(block, job)
    assert named in str(refused.value)


def test_every_setting_says_what_it_means():
    assert all(field.description for field in WatchSettings.model_fields.values())
