"""Restrict a process: namespaces, files by Landlock, privileges, and system calls by seccomp.

None of it needs privileges. What the kernel does not know is left out: Landlock came with Linux
5.13, truncation with 6.2, TCP with 6.7, signals and abstract UNIX sockets with 6.12. Standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

# linux/landlock.h; the numbers of these system calls are the same on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_LATEST_FILE_RIGHTS = (1 << 16) - 1
_TCP_RIGHTS, _SCOPES = 0b11, 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of Landlock's interface that the kernel offers; 0 where it has none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Restrict the calling thread and the processes that it starts, for good.

    `PR_SET_NO_NEW_PRIVS` must be set. Paths that do not exist are ignored; open files stay open.

    Returns:
        Whether the kernel has Landlock.

    Raises:
        OSError: the kernel has Landlock and refused the rules.
    """
    known = landlock_version()
    if not known:
        return False
    handled = _FILE_RIGHTS.get(known, _LATEST_FILE_RIGHTS)
    # Older kernels refuse a structure with fields that they do not know, unless these are zero.
    attributes = struct.pack(
        "=QQQ", handled, _TCP_RIGHTS if known >= 4 else 0, _SCOPES if known >= 6 else 0
    )
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, handled)
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(folder).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("=Qi", rights, folder)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        finally:
            os.close(folder)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result


# linux/sched.h and linux/mount.h
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_MOUNTS = 0x08000000, 0x00020000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18

_SHARED_MEMORY, _RUN = "/dev/shm", "/run"  # noqa: S108 (what is mounted over, not a file of ours)


def enter_namespaces() -> bool:
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


def mount_fresh_folders(folder: str, num_bytes: int, readable: Iterable[str]) -> bool:
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


# linux/prctl.h, linux/seccomp.h, linux/audit.h, linux/capability.h
_SET_DUMPABLE, _SET_SECCOMP, _DROP_FROM_BOUNDING_SET, _SET_NO_NEW_PRIVS, _AMBIENT = (
    4,
    22,
    24,
    38,
    47,
)
_CLEAR_AMBIENT, _FILTER_MODE, _CAPABILITY_VERSION_3 = 4, 2, 0x20080522
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF: ld [k], jeq, jge, ret
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32 = 0x40000000  # x86-64's second table of system calls
_EVERY_PROCESS = 0xFFFFFFFF  # kill(-1, …)
_EPERM = 1

# The numbers from 424 on are the same everywhere: io_uring, pidfd_getfd, mount_setattr and others.
_SINCE_424 = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)
_DENIED = {
    # socket, shmget, semget, msgget, mq_open, ptrace, process_vm_readv and _writev, kcmp, mount,
    # umount2, pivot_root, unshare, setns, add_key, request_key, keyctl, perf_event_open, bpf,
    # userfaultfd, open_by_handle_at
    "x86_64": (0xC000003E, 62, (41, 29, 64, 68, 240, 101, 310, 311, 312, 165, 166, 155, 272, 308,
                                248, 249, 250, 298, 321, 323, 304)),
    "aarch64": (0xC00000B7, 129, (198, 194, 190, 186, 180, 117, 270, 271, 272, 40, 39, 41, 97, 268,
                                  217, 218, 219, 241, 280, 282, 265)),
}  # fmt: skip


def hide_from_other_processes() -> None:
    """Let no process without capabilities trace this one or open its memory and descriptors."""
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def drop_privileges() -> None:
    """Give up all capabilities at the next exec, and every way to gain some."""
    _libc.prctl(_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    capability = 0
    while _libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0) == 0:
        capability += 1
    _libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
    if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")


def deny_system_calls() -> bool:
    """Make the denied system calls fail with EPERM from now on; see the list above.

    Returns:
        Whether the filter is on: kernels without seccomp and other architectures have none.
    """
    if platform.machine() not in _DENIED:
        return False
    instructions = b"".join(_filter(*_DENIED[platform.machine()]))
    buffer = ctypes.create_string_buffer(instructions)
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(buffer))
    return bool(_libc.prctl(_SET_SECCOMP, _FILTER_MODE, program, 0, 0) == 0)


def _filter(architecture: int, kill: int, denied: tuple[int, ...]) -> list[bytes]:
    fail = _instruction(_RETURN, _FAIL | _EPERM)
    program = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, architecture, if_true=1),
        fail,
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, if_false=1),
        fail,
    ]
    for number in (*denied, *_SINCE_424):
        program += [_instruction(_EQUAL, number, if_false=1), fail]
    return [
        *program,
        _instruction(_EQUAL, kill, if_false=2),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_EQUAL, _EVERY_PROCESS, if_true=1),
        _instruction(_RETURN, _ALLOW),
        fail,
    ]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
