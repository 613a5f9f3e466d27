"""Restrict a process with Landlock: read some paths, write below others, signal no outer process.

Needs no privileges (Linux 5.13 or newer). What the kernel does not know is left out: truncation
came with 6.2, TCP with 6.7, signals and abstract UNIX sockets with 6.12. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

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


def version() -> int:
    """Return the version of Landlock's interface that the kernel offers; 0 where it has none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Restrict the calling thread and the processes that it starts, for good.

    `PR_SET_NO_NEW_PRIVS` must be set. Paths that do not exist are ignored; open files stay open.

    Returns:
        Whether the kernel has Landlock.

    Raises:
        OSError: the kernel has Landlock and refused the rules.
    """
    known = version()
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
