"""The report of NCCL's RAS server for people: a stand-in for NCCL, for the demo and the tests.

Sections, table and sentences are those of NVIDIA's server, checked against recorded answers of it. One thing
it cannot know: the job summary counts the processes that hold communicators, NVIDIA's counts all.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from deployments.demo.ras_report import FUNCTIONS, Place, RasCommunicator, RasSnapshot, is_failure

_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
    8: "Timeout",
}
_MOST_LISTED = 10


def render_text(snapshot: RasSnapshot, *, verbose: bool = False) -> tuple[bytes, bytes]:
    """The report for people: the part that is sent before the ranks are asked, and the rest."""
    head = (
        f"NCCL version {snapshot.nccl_version} compiled with CUDA {_cuda(snapshot.cuda_runtime_version)}\n"
        f"CUDA runtime version {snapshot.cuda_runtime_version}, "
        f"driver version {snapshot.cuda_driver_version}\n\n"
        f"{_titled('Job summary')}{_job_summary(snapshot)}\nCommunicators..."
    )
    digits = 2 if snapshot.nccl_version.startswith(("2.24", "2.25", "2.26", "2.27")) else 3
    groups = _grouped(snapshot.communicators)
    named = [(f"#{g}-{i}", comm) for g, group in enumerate(groups) for i, comm in enumerate(group)]
    share = 0.5 - 1e-9 if verbose else 0.25
    errors = [*_processes(snapshot), *(block for name, comm in named for block in _errors(name, comm))]
    warnings = [block for name, comm in named for block in _warnings(name, comm, share)]
    rest = (
        f" ({snapshot.collection_time_s:.{digits}f}s)\n=============\n\n{_table(groups)}\n"
        + _titled("Errors")
        + "".join(f"{block}\n" for block in errors)
        + _titled("Warnings")
        + "\n".join(warnings)
    )
    return head.encode(), rest.encode()


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _titled(title: str) -> str:
    return f"{title}\n{'=' * len(title)}\n\n"


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values)) or [0]
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _tally(keys: Iterable[Any]) -> list[int]:
    return [len(list(group)) for _, group in groupby(sorted(keys))]


def _job_summary(snapshot: RasSnapshot) -> str:
    places = [place for comm in snapshot.communicators for place in (*comm.ranks, *comm.missing)]
    processes = {(place.host, place.pid) for place in places}
    devices = {(place.host, place.pid, place.nvml_dev) for place in places}
    hosts = [host for host, _ in processes]
    return (
        "  Nodes  Processes         GPUs  Processes     GPUs\n"
        "(total)   per node  per process    (total)  (total)\n"
        f"{len(set(hosts)):7}{_span(_tally(hosts)):>11}{_span(_tally(d[:2] for d in devices)):>13}"
        f"{len(processes):11}{len(devices):9}\n"
    )


def _shape(comm: RasCommunicator) -> tuple[Any, ...]:
    """What communicators of one row of the table have in common, in the order of the rows."""
    hosts = {rank.host for rank in comm.ranks}
    return (-comm.size, -len(hosts), comm.errors == "OK", comm.errors, comm.status)


def _grouped(communicators: Sequence[RasCommunicator]) -> list[list[RasCommunicator]]:
    ordered = sorted(communicators, key=lambda comm: (_shape(comm), int(comm.hash, 16)))
    return [list(group) for _, group in groupby(ordered, key=_shape)]


def _table(groups: Sequence[Sequence[RasCommunicator]]) -> str:
    if not groups:
        return "No communicator data collected!\n"
    rows = [
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n",
        "    #  in group  per comm  per node  per comm  in group\n",
    ]
    for number, group in enumerate(groups):
        nodes = _span(len({rank.host for rank in comm.ranks}) for comm in group)
        per_node = _span(n for comm in group for n in _tally(rank.host for rank in comm.ranks))
        present = sum(len(comm.ranks) for comm in group)
        rows.append(
            f"{number:5}{len(group):10}{nodes:>10}{per_node:>10}{group[0].size:10}{present:10}"
            f"{group[0].status:>10}  {group[0].errors:>6}\n"
        )
    return "".join(rows)


def _processes(snapshot: RasSnapshot) -> list[str]:
    """One block for the processes that are dead, one for those that are just silent."""
    silent = [rank for comm in snapshot.communicators for rank in comm.missing if rank.unresponsive]
    blocks = []
    for dead in (True, False):
        found = sorted({(r.host, r.pid, r.cuda_dev) for r in silent if r.considered_dead == dead})
        if not found:
            continue
        some = f"{len(found)} job process{'es' if len(found) > 1 else ''}"
        title = (
            f"DEAD\n  {some} {'are' if len(found) > 1 else 'is'} considered dead "
            "(unreachable via the RAS network)\n"
            if dead
            else f"INCOMPLETE\n  Missing communicator data from {some}\n"
        )
        lines = [f"  Process {pid} on node {host} managing GPU {device}\n" for host, pid, device in found]
        blocks.append(title + "".join(lines))
    return blocks


def _heading(name: str, comm: RasCommunicator, word: str) -> str:
    return f"{name} ({int(comm.hash, 16):016x}) {word}\n"


def _some(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _errors(name: str, comm: RasCommunicator) -> list[str]:
    blocks = []
    silent = [rank for rank in comm.missing if rank.unresponsive]
    if silent:
        lines = "".join(f"  Rank {rank.rank} -- {rank}\n" for rank in silent)
        title = f"  Missing communicator data from {_some(len(silent))}\n"
        blocks.append(_heading(name, comm, "INCOMPLETE") + title + lines)
    for kind, attribute in (("Initialization", "init_state"), ("Asynchronous", "async_error")):
        results = ((getattr(rank, attribute), rank) for rank in comm.ranks)
        failed = _by(
            (_ERRORS.get(result, f"error {result}"), rank) for result, rank in results if is_failure(result)
        )
        if failed:
            title = f"  {kind} errors on {_some(sum(map(len, failed.values())))}\n"
            lines = _classes(failed, "reported {value}", _MOST_LISTED)
            blocks.append(_heading(name, comm, "ERROR") + title + lines)
    return blocks


def _warnings(name: str, comm: RasCommunicator, share: float) -> list[str]:
    most = min(_MOST_LISTED, int(comm.size * share))
    words = _by((rank.word, rank) for rank in comm.ranks)
    left = _by(("NOCOMM", rank) for rank in comm.missing if not rank.unresponsive)
    body = ""
    if len(words) + len(left) > 1:
        body += "  Communicator ranks have different status\n"
        body += _classes(words, "{have} status {value}", most) + _classes(left, "{have} status {value}", most)
    for function in FUNCTIONS:
        counts = _by((rank.counts.get(function, 0), rank) for rank in comm.ranks)
        if len(counts) > 1:
            body += f"  Communicator ranks have different {function} operation counts\n"
            body += _classes(counts, "{have} launched up to operation {value}", most) + "\n"
    return [_heading(name, comm, "MISMATCH") + body] if body else []


def _by(pairs: Iterable[tuple[Any, Place]]) -> dict[Any, list[Place]]:
    found: dict[Any, list[Place]] = {}
    for key, place in pairs:
        found.setdefault(key, []).append(place)
    return found


def _classes(found: Mapping[Any, Sequence[Place]], sentence: str, most: int) -> str:
    """A line for each value, the most common first; its ranks are named where they are few."""
    lines = []
    for value, ranks in sorted(found.items(), key=lambda item: (-len(item[1]), item[1][0].rank)):
        if len(ranks) == 1:
            said = sentence.format(have="has", value=value)
            lines.append(f"  Rank {ranks[0].rank} {said} -- {ranks[0]}\n")
            continue
        lines.append(f"  {len(ranks)} ranks {sentence.format(have='have', value=value)}\n")
        lines += [f"  Rank {rank.rank} -- {rank}\n" for rank in ranks if len(ranks) <= most]
    return "".join(lines)
