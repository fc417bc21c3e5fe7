"""The only reader of the environment.

A value counts in this order: the TrainingRun block, the job's own runtime_env, the environment of this
process (also a .env file), the default. The variables of Ray Train's own detector are honoured, so that
people can move over (`JOB_VARIABLES`).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks.adapters.node_part import parse_ras_addr
from tasks.hang.errors import SettingsError
from tasks.hang.policy import Action, HangPolicy

RasSourceName = Literal["socket", "ncclras_cli"]
RasPlace = Literal["node", "direct"]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

# Variables that belong to the training job: what the job says of them beats what this process has.
JOB_VARIABLES = {
    "action": "RAY_TRAIN_NCCL_RAS_ACTION",
    "poll_interval_s": "RAY_TRAIN_NCCL_RAS_MIN_POLL_INTERVAL_S",
    "confirm_duration_s": "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S",
    "ras_addr": "NCCL_RAS_ADDR",
}


def _named(field: str) -> AliasChoices:
    variables = [f"RANKWATCH_{field.upper()}"]
    if field in JOB_VARIABLES:
        variables.append(JOB_VARIABLES[field])
    return AliasChoices(*variables, field)


class WatchSettings(BaseSettings):
    """Everything that can be set for a watch."""

    model_config = SettingsConfigDict(env_file=".env", extra="ignore", frozen=True)

    action: Action = Field(
        "observe", validation_alias=_named("action"), description="What a confirmed hang leads to"
    )
    poll_interval_s: Seconds = Field(
        15.0, validation_alias=_named("poll_interval_s"), description="Seconds between two polls of RAS"
    )
    confirm_duration_s: Seconds = Field(
        600.0,
        validation_alias=_named("confirm_duration_s"),
        description="Seconds without any progress after which a freeze is a hang",
    )
    suspect_after_s: Seconds = Field(
        60.0,
        validation_alias=_named("suspect_after_s"),
        description="Seconds without any progress after which it is said for the first time",
    )
    repeat_every_s: Seconds = Field(
        120.0,
        validation_alias=_named("repeat_every_s"),
        description="Seconds between two reminders of a suspicion",
    )
    shift_s: Seconds = Field(
        3600.0, validation_alias=_named("shift_s"), description="Seconds that one flow run polls"
    )
    capture_deadline_s: Seconds = Field(
        60.0, validation_alias=_named("capture_deadline_s"), description="Seconds that a capture may take"
    )
    acknowledge_within_s: Seconds = Field(
        20.0,
        validation_alias=_named("acknowledge_within_s"),
        description="Seconds that the in-job part has to fail the attempt before its processes are killed",
    )
    source: RasSourceName = Field(
        "socket", validation_alias=_named("source"), description="How NCCL's RAS server is asked"
    )
    place: RasPlace = Field(
        "node",
        validation_alias=_named("place"),
        description="Where it is asked from: a node of the run, or directly from here",
    )
    ras_addr: str = Field(
        "", validation_alias=_named("ras_addr"), description="host:port of RAS; empty is localhost:28028"
    )
    ncclras_binary: str = Field(
        "ncclras",
        validation_alias=_named("ncclras_binary"),
        description="Name or path of the ncclras binary on the nodes, for source ncclras_cli",
    )
    spool_path: Path = Field(
        Path("~/.rankwatch").expanduser(),
        validation_alias=_named("spool_path"),
        description="Local folder for the RAS history and for evidence that could not be stored",
    )


class WatchPlan(Struct, frozen=True, kw_only=True):
    """The settings of one run, resolved: values and where each came from."""

    settings: WatchSettings
    policy: HangPolicy
    origin: dict[str, str]


def resolve(block: Mapping[str, Any], job_env: Mapping[str, str]) -> WatchPlan:
    """Settle what is in force for a run.

    Args:
        block: Fields of the TrainingRun block; None means not set.
        job_env: Environment variables that the training job itself runs with.

    Raises:
        SettingsError: a value is not allowed; the text names the field or variable, the value, and what is.
    """
    fields = WatchSettings.model_fields
    given: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for field in fields:
        variable = JOB_VARIABLES.get(field, "")
        if block.get(field) is not None:
            given[field], origin[field] = block[field], "block"
        elif job_env.get(variable):
            given[field], origin[field] = job_env[variable], f"job ({variable})"
    try:
        settings = WatchSettings(**{_first_alias(field): value for field, value in given.items()})
    except ValidationError as error:
        raise _refusal(error, origin) from error
    for field in fields:
        if field not in origin:
            origin[field] = "environment" if field in settings.model_fields_set else "default"
    try:
        parse_ras_addr(settings.ras_addr)
    except ValueError as error:
        raise SettingsError(f"ras_addr (from: {origin['ras_addr']}): {error}") from error
    policy = HangPolicy(
        poll_interval_s=settings.poll_interval_s,
        suspect_after_s=settings.suspect_after_s,
        confirm_duration_s=settings.confirm_duration_s,
        repeat_every_s=settings.repeat_every_s,
    )
    return WatchPlan(settings=settings, policy=policy, origin=origin)


def _first_alias(field: str) -> str:
    return f"RANKWATCH_{field.upper()}"


def _refusal(error: ValidationError, origin: Mapping[str, str]) -> SettingsError:
    first = error.errors()[0]
    alias = str(first["loc"][0])
    field = next(name for name in WatchSettings.model_fields if alias in _named(name).choices)
    match origin.get(field, ""):
        case "block":
            name = f"Field {field} of the TrainingRun block"
        case "":
            variables = [str(choice) for choice in _named(field).choices]
            name = next((v for v in variables if v in os.environ), variables[0]) + " in the environment"
        case _:
            name = f"{JOB_VARIABLES[field]} in the job's runtime_env"
    return SettingsError(
        f"{name} is {first['input']!r}: {first['msg']}.",
        f"It means: {WatchSettings.model_fields[field].description}.",
    )
