"""Stands in for NCCL's RAS in the demo, whose training job runs on gloo because there is no GPU.

NOT NCCL: it speaks RAS's protocol (ras_server.py), and what it tells comes from the Flight Recorder of each
rank, asked through the socket of torch's worker server that rankwatch_job started there. The counts are
launches, as in NCCL; the hashes, GPU numbers and CUDA versions are made up, and its version ends in +standin.

    python -m deployments.demo.ras_standin --sockets /tmp/rankwatch-0 --host 127.0.0.1 --port 28028

Every answer is taken anew from all ranks. A rank whose process is there but silent (stopped) is missing and
unresponsive, and considered dead after 60 s, for good, as in NCCL; so is one whose process is gone while
others live. Only the first query after that waits for it, and counts a timeout. A communicator of which no
rank answers is not shown.
"""

import argparse
import hashlib
import http.client
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from deployments.demo.launch_counts import RankLaunches, groups_of, members_of
from deployments.demo.ras_server import (
    Place,
    RasCommunicator,
    RasMissingRank,
    RasRank,
    RasServer,
    RasSnapshot,
)

NCCL_VERSION = "2.30.7+standin"
NOTICE = (
    "This stands in for NCCL's RAS: the job runs on gloo, the counts come from PyTorch's Flight Recorder; "
    "hashes, GPUs and CUDA versions are made up."
)

_ASK_S = 1.0
_DEAD_AFTER_S = 60.0
_ASKED_AT_ONCE = 64
_SOCKET = re.compile(r"rank_(\d+)\.(\d+)\.sock")

Answer = dict[str, Any] | Literal["silent", "gone"]


@dataclass
class Member:
    """A rank of an attempt, from the first sight of its socket."""

    pid: int
    path: Path
    launches: RankLaunches = field(default_factory=RankLaunches)
    state: Literal["answers", "silent", "gone"] = "answers"
    missing_since_s: float | None = None
    dead: bool = False
    told_lost: int = 0


class Standin:
    """Makes the snapshot for each query.

    Args:
        base: Folder with one folder of sockets for each attempt.
        node_ip: The address that all ranks are said to have.
        ask: Gets a rank's dump from its socket; tests give recorded ones.
        clock: Seconds, monotonic.
        say: Where warnings go.
    """

    def __init__(
        self,
        base: Path,
        node_ip: str,
        *,
        ask: Callable[[Path, int], Answer] | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._base = base
        self._node_ip = node_ip
        self._ask = ask or ask_rank
        self._clock = clock
        self._say = say
        self._attempts: dict[str, dict[int, Member]] = {}
        self._lock = threading.Lock()

    def snapshot(self) -> RasSnapshot:
        """Ask every rank of every attempt that lives."""
        began = self._clock()
        with self._lock:
            self._discover()
            newly_silent = self._collect()
            alive = {
                attempt: members
                for attempt, members in self._attempts.items()
                if any(member.state != "gone" for member in members.values())
            }
            self._attempts = alive
            communicators = [
                self._communicator(attempt, group, members)
                for attempt, members in alive.items()
                for group in groups_of(member.launches for member in members.values())
            ]
        return RasSnapshot(
            communicators=[comm for comm in communicators if comm.size > 1 and comm.ranks],
            nccl_version=NCCL_VERSION,
            timeouts_count=newly_silent,
            collection_time_s=self._clock() - began,
        )

    def _discover(self) -> None:
        for path in sorted(self._base.glob("*/rank_*.sock")):
            named = _SOCKET.fullmatch(path.name)
            if named is None:
                continue
            rank, pid = int(named[1]), int(named[2])
            known = self._attempts.setdefault(path.parent.name, {}).get(rank)
            if known is None or known.pid != pid:
                self._attempts[path.parent.name][rank] = Member(pid, path)

    def _collect(self) -> int:
        """Ask all ranks at once; returns how many fell silent since the last time."""
        members = [member for group in self._attempts.values() for member in group.values()]
        with ThreadPoolExecutor(max_workers=_ASKED_AT_ONCE) as pool:
            answers = list(pool.map(self._answer_of, members))
        newly_silent = 0
        for member, answer in zip(members, answers, strict=True):
            newly_silent += answer == "silent" and member.state == "answers"
            self._note(member, answer)
        return newly_silent

    def _answer_of(self, member: Member) -> Answer:
        """Ask a rank. One that fell silent is not waited for again while its process is stopped: a query of
        NCCL, too, takes long only until the peers have given a process up.
        """
        if member.state == "silent" and is_stopped(member.pid):
            return "silent"
        return self._ask(member.path, member.pid)

    def _note(self, member: Member, answer: Answer) -> None:
        if isinstance(answer, str):
            now = self._clock()
            since_s = now if member.missing_since_s is None else member.missing_since_s
            member.state, member.missing_since_s = answer, since_s
            member.dead = member.dead or now - since_s >= _DEAD_AFTER_S
            return
        member.state, member.missing_since_s = "answers", None
        member.launches.take(answer)
        if member.launches.lost > member.told_lost:
            member.told_lost = member.launches.lost
            self._say(
                f"Flight Recorder of process {member.pid} went round: {member.told_lost} collectives were "
                "not seen and are counted as its most frequent one. Set TORCH_FR_BUFFER_SIZE higher."
            )

    def _communicator(self, attempt: str, group: str, members: Mapping[int, Member]) -> RasCommunicator:
        ranks = members_of(group, {rank: member.launches for rank, member in members.items()})
        digest = hashlib.sha256(f"{attempt}/{group}".encode()).hexdigest()
        present: list[RasRank] = []
        missing: list[RasMissingRank] = []
        for index, world_rank in enumerate(ranks):
            entry = self._entry(index, world_rank, group, members.get(world_rank))
            if isinstance(entry, RasRank):
                present.append(entry)
            else:
                missing.append(entry)
        return RasCommunicator(
            hash=f"{int(digest[:16], 16):#x}",
            secondary_hash=f"{int(digest[16:32], 16):#x}:{int(digest[32:48], 16):#x}",
            size=len(ranks),
            ranks=present,
            missing=missing,
        )

    def _entry(
        self, index: int, world_rank: int, group: str, member: Member | None
    ) -> RasRank | RasMissingRank:
        """A member of a group; the number of its GPU is its world rank."""
        place = Place(
            rank=index,
            host=self._node_ip,
            pid=member.pid if member else -1,
            cuda_dev=world_rank,
            nvml_dev=world_rank,
        )
        if member is None or member.state != "answers" or member.dead:
            return RasMissingRank(**asdict(place), considered_dead=member is not None and member.dead)
        launched = member.launches.groups.get(group)
        return RasRank(**asdict(place), counts=dict(launched.counts) if launched else {})


def ask_rank(path: Path, pid: int, deadline_s: float = _ASK_S) -> Answer:
    """Get the Flight Recorder's dump from a rank.

    Args:
        path: Socket of its worker server.
        pid: Its process.
        deadline_s: Seconds to connect, and for each part of the answer.

    Returns:
        The dump; "gone" where the process is; "silent" where it is there and does not answer.
    """
    connection = http.client.HTTPConnection("localhost", timeout=deadline_s)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(deadline_s)
        connection.sock.connect(str(path))
        connection.request("POST", "/handler/fr_trace_json")
        dump: dict[str, Any] = json.loads(connection.getresponse().read())
    except (ConnectionRefusedError, FileNotFoundError):
        return "gone"
    except (OSError, http.client.HTTPException, ValueError):
        return "silent" if Path("/proc", str(pid)).exists() else "gone"
    else:
        return dump
    finally:
        connection.close()


def is_stopped(pid: int) -> bool:
    """Whether a process is there and stopped (SIGSTOP, or a debugger)."""
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=NOTICE)
    parser.add_argument(
        "--sockets", type=Path, required=True, help="folder that rankwatch_job makes sockets in"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at, and of all ranks")
    parser.add_argument("--port", type=int, default=28028, help="0 takes a free one")
    parser.add_argument("--node-ip", help="address of all ranks, where it is not that of --host")
    options = parser.parse_args(arguments)
    standin = Standin(options.sockets, options.node_ip or options.host)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    with RasServer(standin.snapshot, host=options.host, port=options.port) as server:
        print(f"{NOTICE}\nNCCL_RAS_ADDR={server.addr}", flush=True)
        done.wait()


if __name__ == "__main__":
    main()
