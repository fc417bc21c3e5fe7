"""Who am I, and is somebody else still there? Answers from /proc."""

import os
import socket
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat: with the pid it names a process for good. None where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else int(fields[19])


def machine() -> str:
    """A name for this pid namespace of this boot of this host: pids mean the same only within it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    namespace = str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")
    return f"{socket.gethostname()}-{boot}-{namespace}"


def identity(pid: int | None = None) -> str:
    """`machine:pid:start` of this process, or of another one here."""
    known = pid or os.getpid()
    return f"{machine()}:{known}:{start_ticks(known)}"


def is_gone(owner: str) -> bool | None:
    """Whether the process behind an identity has ended; None where it ran on another machine."""
    place, pid, start = owner.rsplit(":", 2)
    if place != machine():
        return None
    return str(start_ticks(int(pid))) != start
