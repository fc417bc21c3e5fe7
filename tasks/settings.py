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
from pydantic import AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks.adapters.node_part import parse_ras_addr
from tasks.hang.errors import SettingsError
from tasks.hang.policy import Action, Fit, FreezeKind, HangPolicy, fit
from tasks.hang.run import Attempt

RasSourceName = Literal["socket", "ncclras_cli"]
RasPlace = Literal["node", "direct"]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
_FAST = {"on": 90.0, "off": 0.0}


def _switch(value: Any) -> Any:
    return _FAST.get(value.lower(), value) if isinstance(value, str) else value


FastConfirm = Annotated[float, Field(ge=0, le=7 * 24 * 3600), BeforeValidator(_switch)]

# Variables that belong to the training job: what the job says of them beats what this process has.
JOB_VARIABLES = {
    "action": "RAY_TRAIN_NCCL_RAS_ACTION",
    "poll_interval_s": "RAY_TRAIN_NCCL_RAS_MIN_POLL_INTERVAL_S",
    "confirm_duration_s": "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S",
    "ras_addr": "NCCL_RAS_ADDR",
}


_POLICY_FIELDS = (
    "poll_interval_s", "suspect_after_s", "confirm_duration_s", "confirm_unresponsive_s",
    "confirm_symmetric_s", "confirm_init_s", "repeat_every_s", "witness_gap_s", "extend_factor",
    "envelope_cap_s", "fast_confirm_s",
)  # fmt: skip


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
    confirm_unresponsive_s: Seconds | None = Field(
        None,
        validation_alias=_named("confirm_unresponsive_s"),
        description="The same where a rank does not answer; empty is confirm_duration_s",
    )
    confirm_symmetric_s: Seconds | None = Field(
        None,
        validation_alias=_named("confirm_symmetric_s"),
        description="The same where all ranks launched the same; empty is confirm_duration_s",
    )
    confirm_init_s: Seconds | None = Field(
        None,
        validation_alias=_named("confirm_init_s"),
        description="The same for a communicator that is being created; empty is confirm_duration_s",
    )
    unresponsive_action: Action | None = Field(
        None,
        validation_alias=_named("unresponsive_action"),
        description="What a hang of a rank that does not answer leads to; empty is action",
    )
    symmetric_action: Action = Field(
        "observe",
        validation_alias=_named("symmetric_action"),
        description="What a hang leads to in which all ranks launched the same",
    )
    init_action: Action = Field(
        "observe",
        validation_alias=_named("init_action"),
        description="What a communicator leads to whose creation does not end",
    )
    witness_gap_s: Seconds = Field(
        10.0,
        validation_alias=_named("witness_gap_s"),
        description="Seconds between the two samples of a witness",
    )
    extend_factor: float = Field(
        1.5,
        ge=1,
        le=10,
        validation_alias=_named("extend_factor"),
        description="By which the confirm time grows, once, when a rank that is behind visibly works",
    )
    envelope_cap_s: Seconds | None = Field(
        None,
        validation_alias=_named("envelope_cap_s"),
        description="The most that earlier stalls can make of a confirm time; empty is twice that time",
    )
    fast_confirm_s: FastConfirm = Field(
        0.0,
        validation_alias=_named("fast_confirm_s"),
        description="Confirm this early where witnesses agree strongly: seconds, `on` (90) or `off`",
    )
    settle_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        validation_alias=_named("settle_s"),
        description="Seconds at the start of an attempt in which RAS is not asked",
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

    def action_for(self, kind: FreezeKind) -> Action:
        """What a confirmed hang of a kind leads to."""
        match kind:
            case "unresponsive":
                return self.unresponsive_action or self.action
            case "symmetric":
                return self.symmetric_action
            case "init":
                return self.init_action
            case "mismatch":
                return self.action


class WatchPlan(Struct, frozen=True, kw_only=True):
    """The settings of one run, resolved: values and where each came from."""

    settings: WatchSettings
    policy: HangPolicy
    origin: dict[str, str]

    @property
    def explicit(self) -> frozenset[str]:
        """The fields that somebody set."""
        return frozenset(field for field, origin in self.origin.items() if origin != "default")

    def check_fit(self, attempt: Attempt) -> str:
        """See that every hang is confirmed before the watchdog of the attempt ends its processes.

        Returns:
            What had to be cut, empty where nothing was.

        Raises:
            SettingsError: a value that somebody set cannot fit.
        """
        return self._fit(attempt, self.explicit).warning

    def fitted(self, attempt: Attempt) -> tuple[HangPolicy, str]:
        """The policy for an attempt, cut to fit whoever set it, and what is to be said about that."""
        try:
            found = self._fit(attempt, self.explicit)
        except SettingsError as error:
            try:
                found = self._fit(attempt, frozenset())
            except SettingsError:
                return self.policy, f"{error} Evidence may be lost."
            return found.policy, f"{error} It is cut."
        return found.policy, found.warning

    def _fit(self, attempt: Attempt, explicit: frozenset[str]) -> Fit:
        return fit(
            self.policy,
            watchdog_s=attempt.watchdog_s,
            watchdog=attempt.watchdog_source,
            capture_s=self.settings.capture_deadline_s,
            explicit=explicit,
        )


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
    policy = HangPolicy(**{field: getattr(settings, field) for field in _POLICY_FIELDS})
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
