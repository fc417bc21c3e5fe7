"""What witnesses make of a freeze. The edge looks (tasks/witness.py), this judges.

Where a rank stands is never what clears it: in a checkpoint or in data loading is where the usual culprit
stands. Only movement does: a stack that changed, CPU time, or bytes.
"""

from collections import Counter
from collections.abc import Sequence

from tasks.hang.counts import ranges
from tasks.hang.states import Freeze, Testimony
from tasks.hang.witness import Look, Witness

_TOLD = 3  # ranks that a reason spells out


def weigh(freeze: Freeze, witness: Witness, *, idle: bool = False) -> Testimony:
    """Judge what was seen of the ranks of a freeze.

    Args:
        freeze: What does not move.
        witness: The two samples of the ranks that were asked for.
        idle: Whether its members go on elsewhere: then that a rank is behind proves nothing.
    """
    if witness.reason and not witness.looks:
        return Testimony("unclear", f"no witness: {witness.reason}")
    if freeze.kind == "unresponsive":
        return _of_silent([look for look in witness.looks if look.rank in freeze.silent])
    looks = [look for look in witness.looks if look.rank not in freeze.departed]
    if freeze.kind == "mismatch" and not freeze.departed and not idle:
        return _of_mismatch(freeze, looks)
    return _of_all(freeze, looks)


def _of_silent(looks: Sequence[Look]) -> Testimony:
    """RAS says the same of a process that was killed and of one that is stopped."""
    gone = [look for look in looks if look.state == "gone"]
    if looks and len(gone) == len(looks):
        ranks = ranges(look.rank for look in gone)
        text = f"the process of rank {ranks} is gone: the job's own health check will act"
        return Testimony("gone", text)
    there = [look for look in looks if look.state not in ("gone", "unknown")]
    if there:
        said = [f"the process of rank {look.rank} is there, {_STATES[look.state]}" for look in there]
        return Testimony("stuck", _few(said))
    return Testimony("unclear", _few([f"rank {look.rank}: {look.problem}" for look in looks if look.problem]))


_STATES = {
    "running": "and yet it does not answer",
    "stopped": "stopped (state T)",
    "uninterruptible": "stuck in the kernel (state D)",
}


def _of_mismatch(freeze: Freeze, looks: Sequence[Look]) -> Testimony:
    behind = [look for look in looks if look.rank in freeze.lagging]
    moving = [look for look in behind if look.moved]
    if moving:
        return Testimony("moves", _few([f"rank {look.rank} moves: {look.moved}" for look in moving]))
    seen = [look for look in behind if _was_seen(look)]
    if not seen:
        problems = [f"rank {look.rank}: {look.problem or 'nothing was seen'}" for look in behind]
        return Testimony("unclear", _few(problems))
    text = _few([f"rank {look.rank} {_stands(look)}" for look in seen])
    waits = len(seen) == len(behind) and all(look.waits for look in seen)
    return Testimony("stuck", text, strong=_agree(freeze, looks), waits=waits)


def _of_all(freeze: Freeze, looks: Sequence[Look]) -> Testimony:
    """Counts are no proof here, so every rank has to be seen waiting, or stopped."""
    moving = [look for look in looks if look.moved]
    if moving:
        return Testimony("moves", _few([f"rank {look.rank} moves: {look.moved}" for look in moving]))
    waiting = [look for look in looks if look.waits or look.pending]
    stopped = [look for look in looks if look.state in ("stopped", "uninterruptible")]
    members = set(freeze.counts) - set(freeze.departed)
    still = {look.rank for look in looks if look.same_frames} if freeze.kind == "mismatch" else set()
    open_ranks = members - {look.rank for look in (*waiting, *stopped)} - still
    if waiting and not open_ranks:
        how = Counter(look.collective or "a collective" for look in waiting).most_common(1)[0][0]
        halted = (
            f"; {_few([f'rank {look.rank} is {_STATES[look.state]}' for look in stopped])}" if stopped else ""
        )
        return Testimony("stuck", f"{len(waiting)} ranks wait in {how} in both samples{halted}")
    free = [look for look in looks if look.rank in open_ranks]
    said = [f"rank {look.rank} {_stands(look) if _was_seen(look) else look.problem}" for look in free]
    unseen = open_ranks - {look.rank for look in free}
    said += [f"ranks {ranges(unseen)} were not seen"] if unseen else []
    return Testimony("unclear", f"not every rank waits: {_few(said)}")


def _agree(freeze: Freeze, looks: Sequence[Look]) -> bool:
    """All but a minority in the same collective, and the minority elsewhere with the same frames twice."""
    waiting = [look for look in looks if look.waits and look.collective]
    elsewhere = [look for look in looks if not look.waits]
    return (
        len(looks) == freeze.size
        and len({look.collective for look in waiting}) == 1
        and 0 < len(elsewhere) < len(waiting)
        and all(look.waits is False and look.same_frames and not look.moved for look in elsewhere)
    )


def _was_seen(look: Look) -> bool:
    return look.state in ("stopped", "uninterruptible") or look.same_frames is not None


def _stands(look: Look) -> str:
    if look.state in ("stopped", "uninterruptible"):
        return f"is {_STATES[look.state]}"
    return f"stands in {look.where} in both samples" if look.same_frames else f"stands in {look.where}"


def _few(said: Sequence[str]) -> str:
    more = len(said) - _TOLD
    return "; ".join(said[:_TOLD]) + (f" and {more} more" if more > 0 else "")
