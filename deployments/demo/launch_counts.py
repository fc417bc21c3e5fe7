"""From Flight Recorder dumps to what NCCL's RAS would count: launches of each rank in each process group.

RAS counts since the start; a Flight Recorder is a ring that forgets. So counts are kept from dump to dump by
record id. Where the ring went round between two dumps, the group's own sequence numbers say how many
collectives are lost; they are counted as the function that the rank launches most, and that is said.

Gloo does not write down who is in a group (its `pg_config` has one entry without a name): members are the
ranks that have launched in it, all ranks in the default group.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_GROUP = "0"

# The part behind the colon of profiling_name. Send, receive, and what is built of them is not counted.
_FUNCTIONS = {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "allgather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "allreduce": "AllReduce",
    "sparse_all_reduce": "AllReduce",
    "barrier": "AllReduce",  # NCCL makes a barrier of one
}
_AFFIXES = ("_oop", "_base", "_into_tensor_coalesced", "_tensor_coalesced", "_coalesced", "_barrier")


def function_of(profiling_name: str) -> str | None:
    """The function that RAS would count an operation as, None for one that it does not count."""
    name = profiling_name.rpartition(":")[2].lstrip("_")
    for affix in _AFFIXES:
        name = name.removesuffix(affix)
    return _FUNCTIONS.get(name)


@dataclass
class GroupLaunches:
    """What a rank has launched in one process group."""

    counts: Counter[str] = field(default_factory=Counter)
    last_seq: int = 0
    lost: int = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Count a record; what its sequence number skips was overwritten before we saw it."""
        seq = int(entry["collective_seq_id"])
        function = function_of(str(entry["profiling_name"]))
        if seq > self.last_seq + 1:
            usual = self.counts.most_common(1)[0][0] if self.counts else function
            missed = seq - self.last_seq - 1
            self.lost += missed
            if usual is not None:
                self.counts[usual] += missed
        self.last_seq = max(seq, self.last_seq)
        if function is not None:
            self.counts[function] += 1


@dataclass
class RankLaunches:
    """What a rank has launched, over all dumps."""

    groups: dict[str, GroupLaunches] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    last_record: int = -1

    @property
    def lost(self) -> int:
        """Collectives that no dump showed."""
        return sum(group.lost for group in self.groups.values())

    def take(self, dump: Mapping[str, Any]) -> None:
        """Add what a dump shows that those before did not."""
        for entry in sorted(dump.get("entries", ()), key=lambda entry: int(entry["record_id"])):
            if int(entry["record_id"]) <= self.last_record:
                continue
            self.last_record = int(entry["record_id"])
            if not entry["is_p2p"]:
                self.groups.setdefault(str(entry["process_group"][0]), GroupLaunches()).add(entry)
        for name, config in dump.get("pg_config", {}).items():
            ranks = config.get("ranks") or []
            members = json.loads(ranks) if isinstance(ranks, str) else ranks
            if members:
                self.members[name] = tuple(int(rank) for rank in members)


def members_of(group: str, ranks: Mapping[int, RankLaunches]) -> tuple[int, ...]:
    """The world ranks of a group in order.

    Args:
        group: Name of the process group.
        ranks: World rank to its launches, one for each rank that is known.
    """
    said = {members for launches in ranks.values() if (members := launches.members.get(group))}
    if said:
        return max(said, key=len)
    if group == DEFAULT_GROUP:
        unnamed = (len(launches.members.get("", ())) for launches in ranks.values())
        return tuple(range(max(max(ranks) + 1, *unnamed)))
    return tuple(sorted(rank for rank, launches in ranks.items() if group in launches.groups))


def groups_of(ranks: Iterable[RankLaunches]) -> list[str]:
    """All groups in which anybody has launched anything."""
    return sorted({group for launches in ranks for group in launches.groups})
