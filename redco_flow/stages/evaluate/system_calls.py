"""Take privileges and system calls away from a process with seccomp, without being root.

Denied are sockets (network and UNIX), System V and POSIX IPC, tracing and reading other processes,
mounts, namespaces, and interfaces that avoid the filter. Standard library only.
"""

from __future__ import annotations

import ctypes
import platform
import struct

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

_libc = ctypes.CDLL(None, use_errno=True)


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
