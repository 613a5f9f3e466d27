"""Give a process its own namespaces: users, processes, network, IPC and mounts.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

# linux/sched.h and linux/mount.h
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_MOUNTS = 0x08000000, 0x00020000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18

_SHARED_MEMORY, _RUN = "/dev/shm", "/run"  # noqa: S108 (what is mounted over, not a file of ours)

_libc = ctypes.CDLL(None, use_errno=True)


def leave() -> bool:
    """Enter new namespaces where that is permitted; the next child is the first process there.

    Returns:
        Whether this process has them now.
    """
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_USER | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC | _NEW_MOUNTS) != 0:
        return False
    # Without these the process's user would have no name, and its files no owner.
    texts = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    with contextlib.suppress(OSError):
        for name, text in texts.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def mount(folder: str, num_bytes: int, readable: Iterable[str]) -> bool:
    """Mount a fresh /proc, and empty file systems in memory as `folder`, /dev/shm and /run.

    For the first process of new namespaces. /run stays where one of `readable` lies below it.

    Args:
        num_bytes: the size of each of these file systems.

    Returns:
        Whether all was mounted: some systems permit namespaces and no mounts.
    """
    if _libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
        return False
    # Containers that mask parts of /proc permit no fresh one: then there is none to look into.
    is_mounted = _mount("proc", "/proc", "") or _mount("tmpfs", "/proc", "size=0,mode=0555")
    size = f"size={num_bytes},nr_inodes=65536,mode=0700"
    folders = [folder, *(path for path in (_SHARED_MEMORY, _RUN) if Path(path).is_dir())]
    if any(Path(path).resolve().is_relative_to(_RUN) for path in readable):
        folders.remove(_RUN)
    return all(_mount("tmpfs", path, size) for path in folders) and is_mounted


def _mount(kind: str, folder: str, options: str) -> bool:
    flags = _NO_SETUID | _NO_DEVICES | (_NO_PROGRAMS if kind == "proc" else 0)
    arguments = kind.encode(), os.fsencode(folder), kind.encode(), flags, options.encode() or None
    return bool(_libc.mount(*arguments) == 0)
