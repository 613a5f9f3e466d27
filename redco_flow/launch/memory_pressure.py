"""Notice that the kernel's out-of-memory killer struck while a job ran.

Reads the counter of a process's memory cgroup (version 2 or 1), which other jobs do not share,
or where there is none the host's. Growth is evidence, no growth proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OomCounters:
    """The files that count kills, with their counts when the job began."""

    counts: dict[Path, int]

    @classmethod
    def of_process(cls, pid: int) -> OomCounters:
        """Read the counters that a kill of process `pid` would raise."""
        files = [file for file in _cgroup_counters(pid) if file.exists()]
        return cls({file: _read_count(file) for file in files or [Path("/proc/vmstat")]})

    def has_grown(self) -> bool:
        """Say whether the killer struck since, here or in the process's cgroup."""
        return any(_read_count(file) > count for file, count in self.counts.items())


def _cgroup_counters(pid: int) -> list[Path]:
    files = []
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files.append(_CGROUP_ROOT / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(_CGROUP_ROOT / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _read_count(file: Path) -> int:
    try:
        match = _OOM_KILLS.search(file.read_bytes())
    except OSError:
        return 0
    return int(match.group(1)) if match else 0
