"""Notice that the kernel's out-of-memory killer struck while a job ran, and how near to it.

Reads the counter of a process's memory cgroup (version 2 or 1), or where there is none the host's,
which another user's process raises too. Growth is evidence, no growth proves nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)

KillScope = Literal["none", "cgroup", "host"]
"""Where the killer is known to have struck: in the process's own cgroup, or on its host."""


@dataclass(frozen=True)
class OomCounters:
    """The files that count kills, with their counts when the job began.

    Args:
        scope: whose kills they count.
    """

    scope: KillScope
    counts: dict[Path, int]

    @classmethod
    def of_process(cls, pid: int, root: Path = Path("/")) -> OomCounters:
        """Read the counters that a kill of process `pid` would raise, the nearest there are.

        Args:
            root: of the file system that has proc/ and sys/.
        """
        if own := _read(_cgroup_counters(pid, root)):
            return cls("cgroup", own)
        return cls("host", _read([root / "proc/vmstat"]))

    def growth(self) -> KillScope:
        """Say where the killer struck since."""
        now = _read(self.counts)
        has_grown = any(now.get(file, 0) > count for file, count in self.counts.items())
        return self.scope if has_grown else "none"


def host_memory_bytes() -> int:
    """Return the memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_counters(pid: int, root: Path) -> Iterator[Path]:
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    groups = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"


def _read(files: Iterable[Path]) -> dict[Path, int]:
    """The counts of those files that can be read and have one."""
    counts: dict[Path, int] = {}
    for file in files:
        try:
            match = _OOM_KILLS.search(file.read_bytes())
        except OSError:
            continue
        if match is not None:
            counts[file] = int(match.group(1))
    return counts
