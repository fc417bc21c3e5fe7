"""What rankwatch keeps in Prefect.

TrainingRun is written by people (or `rankwatch add`); HangWindow and Incident by the shift that owns the
epoch; a Claim is created once and never rewritten: its name must be unique, and that is the only atomic
thing that a block gives. Fields are only ever added, with defaults, so that older documents stay readable.
"""

import hashlib
import re
from datetime import datetime
from typing import Any, ClassVar

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from tasks.hang.incident import Phase
from tasks.hang.policy import Action
from tasks.settings import FastConfirm, RasPlace, RasSourceName, Seconds

_SLUG_LENGTH = 60


def slug_of(run_name: str) -> str:
    """A run's name made fit for the name of a block: lowercase letters, digits and dashes.

    A short hash is added when something was lost, so that two runs never share a slug.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:_SLUG_LENGTH].strip("-")
    if plain == run_name:
        return plain
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:6]
    return f"{plain}-{digest}" if plain else digest


class TrainingRun(Block):
    """A training run that is watched. A field that is left empty takes the value of the job's own
    environment, else of the worker's, else the default.
    """

    _block_type_name: ClassVar[str] = "Rankwatch Training Run"
    _block_type_slug: ClassVar[str] = "rankwatch-training-run"

    run_name: str = Field(min_length=1, max_length=200, description="Name of the run in Ray Train")
    run_id: str | None = Field(None, description="Ray Train's run id, where one name was used twice")
    ray_address: str = Field(
        min_length=1, description="host:port of the cluster's GCS, or ray://host:port from outside of it"
    )
    ray_dashboard_url: str = Field(min_length=1, description="Address of Ray's dashboard, http://host:8265")
    ray_token: SecretStr | None = Field(None, description="Token, where the cluster has RAY_AUTH_MODE=token")
    storage_path: str = Field(
        min_length=1, description="Where evidence is kept: <storage_path>/<run>/hang_detector/"
    )
    action: Action | None = Field(None, description="What a confirmed hang leads to: observe or fail")
    source: RasSourceName | None = Field(None, description="How RAS is asked: socket or ncclras_cli")
    place: RasPlace | None = Field(None, description="From where: node (of the run) or direct (from here)")
    ras_addr: str | None = Field(None, description="host:port of RAS where it is not localhost:28028")
    ncclras_binary: str | None = Field(None, description="ncclras on the nodes, for source ncclras_cli")
    spool_path: str | None = Field(None, description="Local folder for the RAS history")
    poll_interval_s: Seconds | None = Field(None, description="Seconds between two polls (15)")
    confirm_duration_s: Seconds | None = Field(None, description="Seconds until a hang is confirmed (600)")
    suspect_after_s: Seconds | None = Field(None, description="Seconds until it is suspected (60)")
    repeat_every_s: Seconds | None = Field(None, description="Seconds between reminders (120)")
    confirm_unresponsive_s: Seconds | None = Field(None, description="Where a rank does not answer")
    confirm_symmetric_s: Seconds | None = Field(None, description="Where all ranks launched the same")
    confirm_init_s: Seconds | None = Field(None, description="Where a communicator is being created")
    unresponsive_action: Action | None = Field(None, description="Where a rank does not answer (as action)")
    symmetric_action: Action | None = Field(None, description="Where all ranks launched the same (observe)")
    init_action: Action | None = Field(None, description="Where a communicator is being created (observe)")
    witness_gap_s: Seconds | None = Field(None, description="Seconds between the samples of a witness (10)")
    extend_factor: float | None = Field(
        None, ge=1, le=10, description="By which the confirm time grows where a rank visibly works (1.5)"
    )
    envelope_cap_s: Seconds | None = Field(
        None, description="Most that earlier stalls make of a confirm time"
    )
    fast_confirm_s: FastConfirm | None = Field(None, description="Confirm early where witnesses agree (off)")
    settle_s: float | None = Field(
        None, ge=0, le=3600, description="Seconds at the start that RAS is not asked"
    )
    shift_s: Seconds | None = Field(None, description="Seconds that one flow run polls (3600)")
    capture_deadline_s: Seconds | None = Field(None, description="Seconds that a capture may take (60)")
    acknowledge_within_s: Seconds | None = Field(
        None, description="Seconds until processes are killed where the in-job part does not answer (20)"
    )

    @property
    def slug(self) -> str:
        """Name of the blocks and of the deployment of this run."""
        return slug_of(self.run_name)


class HangWindow(Block):
    """What is remembered of a run between two polls, and who owns it."""

    _block_type_name: ClassVar[str] = "Rankwatch Hang Window"
    _block_type_slug: ClassVar[str] = "rankwatch-hang-window"

    run_name: str = Field("", description="The training run")
    epoch: int = Field(0, ge=0, description="Fencing token: grows with each shift that takes over")
    owner: str = Field("", description="machine:pid:start of the process that holds the epoch")
    flow_run_id: str = Field("", description="Flow run of the owner")
    heartbeat_at: datetime | None = Field(None, description="When the owner last said that it is there")
    stale_after_s: float = Field(60.0, description="Age of the heartbeat from which on others take over")
    farewell: str = Field("", description="Why the owner left; empty while it is there")
    run_ended: bool = Field(False, description="The training run is over: no further shift is wanted")
    incident: str = Field("", description="The incident that is open")
    window: dict[str, Any] = Field({}, description="Communicators that are not progressing, and blindness")


class Incident(Block):
    """A confirmed hang, from the first frozen report to the first good step after it."""

    _block_type_name: ClassVar[str] = "Rankwatch Incident"
    _block_type_slug: ClassVar[str] = "rankwatch-incident"

    run_name: str = Field(description="The training run")
    attempt_id: str = Field(description="The attempt that hung")
    phase: Phase = Field("confirmed", description="How far it got; the next phase begins after this is saved")
    folder: str = Field("", description="Name of the evidence folder")
    members: list[str] = Field([], description="Communicators that stand still")
    window: dict[str, Any] = Field({}, description="The window when it was confirmed: counts of each rank")
    evidence: str = Field("", description="Where the evidence is")
    verdict: dict[str, Any] = Field({}, description="The verdict, as in verdict.json")
    start_ticks: dict[str, int] = Field({}, description="Start of each process, by pid, when captured")
    decision: str = Field("", description="What was decided, and why")
    acts: list[dict[str, Any]] = Field([], description="What was done, with its outcome")
    times: dict[str, datetime] = Field({}, description="When what happened: opened, confirmed, diagnosed ..")


class Claim(Block):
    """Who may do one thing. Created once, never rewritten."""

    _block_type_name: ClassVar[str] = "Rankwatch Claim"
    _block_type_slug: ClassVar[str] = "rankwatch-claim"

    owner: str = Field(description="machine:pid:start of the process that made it")
    since: datetime = Field(description="When it was made")
    token: str = Field("", description="Tells a request that was sent twice from two who ask")
