"""Everything that can go wrong, as one tree.

A leaf says the cause; its text says what happened, where, and what to set or do.

RankwatchError
├── SettingsError          a field or variable holds a value that is not allowed
├── RunNotFound            no training run of that name
├── ClusterError           the Ray cluster cannot be used
│   ├── ClusterUnreachable nothing answers at the address
│   ├── VersionMismatch    other Ray or Python version than ours
│   └── ClusterAuthError   a token is wanted, or the one given is wrong
├── StoreError             the storage path cannot be written
├── NodeError              a node of the run did not do what it was asked
├── NotOurs                a claim, an epoch or an incident belongs to somebody else
└── RasError               there is no report
    ├── RasUnreachable     nothing listens at the address
    ├── RasDisabled        the job switched RAS off
    ├── RasTooOld          NCCL before 2.28.7 has no json
    ├── RasNoBinary        source ncclras_cli, and no such binary
    ├── RasNoAnswer        the deadline passed
    ├── RasTruncated       the answer ends in the middle
    ├── RasMalformed       the answer is not the report that NCCL documents
    └── RasWrongJob        the answer holds none of our processes
"""

from typing import ClassVar


class RankwatchError(Exception):
    """Base of all errors; `what` is one sentence, `fix` says what to set or do. Survives pickling."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} {self.fix}".strip()


class SettingsError(RankwatchError):
    """A field or variable holds a value that is not allowed."""


class RunNotFound(RankwatchError):
    """No training run of that name is known where we looked."""


class ClusterError(RankwatchError):
    """The Ray cluster cannot be used."""


class ClusterUnreachable(ClusterError):
    """Nothing answers at the cluster's address."""


class VersionMismatch(ClusterError):
    """The cluster runs another Ray or Python version than this process."""


class ClusterAuthError(ClusterError):
    """The cluster wants a token, or refuses the one it was given."""


class StoreError(RankwatchError):
    """The storage path cannot be written."""


class NodeError(RankwatchError):
    """A node of the run did not do what it was asked to do."""


class NotOurs(RankwatchError):
    """A claim, an epoch or an incident belongs to somebody else."""


class RasError(RankwatchError):
    """There is no report. `code` is what node_part.py answers with; `permanent` says that asking again
    in the same attempt of the run cannot help.
    """

    code: ClassVar[str] = ""
    permanent: ClassVar[bool] = False


class RasUnreachable(RasError):
    """Nothing listens at the address."""

    code = "unreachable"


class RasDisabled(RasError):
    """The job switched RAS off (NCCL_RAS_ENABLE is not 1)."""

    code = "disabled"
    permanent = True


class RasTooOld(RasError):
    """NCCL before 2.28.7: RAS has no json."""

    code = "too_old"
    permanent = True


class RasNoBinary(RasError):
    """The source is ncclras_cli and there is no such binary on the node."""

    code = "no_binary"
    permanent = True


class RasNoAnswer(RasError):
    """The deadline passed without a whole answer."""

    code = "no_answer"


class RasTruncated(RasError):
    """The answer ends in the middle."""

    code = "truncated"


class RasMalformed(RasError):
    """The answer is not the report that NCCL documents."""

    code = "malformed"


class RasWrongJob(RasError):
    """The answer holds none of our processes: another job shares the port."""

    code = "wrong_job"


RAS_ERRORS: dict[str, type[RasError]] = {
    leaf.code: leaf
    for leaf in (
        RasUnreachable, RasDisabled, RasTooOld, RasNoBinary,
        RasNoAnswer, RasTruncated, RasMalformed, RasWrongJob,
    )
}  # fmt: skip
