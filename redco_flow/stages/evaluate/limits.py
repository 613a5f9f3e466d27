"""Run a program with limits: `python -I -S limits.py SECONDS MEMORY_BYTES WORD…`.

Started by its path, it needs the standard library alone. Where the system lets a user make
namespaces, the program has no network and sees no process but its own. When it has ended, or its
time is over, so have all processes that it left; then comes a line of JSON on standard output:
`exit_code` (below 0: a signal's number; null: it ran out of time) and `is_apart`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

# linux/sched.h and linux/prctl.h
_NEW_USER, _NEW_PIDS, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_SIGNAL_AT_PARENTS_DEATH, _ADOPT_ORPHANS = 1, 36

_MAX_FILE_BYTES = 64 << 20
_MAX_OPEN_FILES = 256
_MAX_PROCESSES = 256
_SECONDS_TO_END = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the program that the command line names, and say how it ended."""
    seconds, num_bytes, words = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    limits = _limits(seconds, num_bytes)
    is_apart = _set_apart()
    _libc.prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    from_keeper, to_us = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(from_keeper)
        _keep(words, limits, to_us)
    os.close(to_us)
    exit_code = _read_exit_code(from_keeper, seconds)
    _end(keeper, is_apart=is_apart)
    sys.stdout.write(json.dumps({"exit_code": exit_code, "is_apart": is_apart}) + "\n")


def _limits(seconds: float, num_bytes: int) -> dict[int, int]:
    return {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_AS: num_bytes,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        # The kernel counts all of the user's threads, those of other programs too.
        resource.RLIMIT_NPROC: _num_threads_of_user() + _MAX_PROCESSES,
    }


def _num_threads_of_user() -> int:
    user, count = os.getuid(), 0
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _set_apart() -> bool:
    """Leave the network and the other processes, where that is permitted: children then have."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_USER | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC) != 0:
        return False
    # Without these the program's user would have no name, and its files no owner.
    said = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    with contextlib.suppress(OSError):
        for name, text in said.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def _keep(words: list[str], limits: dict[int, int], report: int) -> NoReturn:
    """Start the program, wait for it, and say how it ended.

    The first process of a PID namespace gets no signal that it does not handle, so the program is
    its child; when the first ends, the kernel ends all others.
    """
    _libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
    program = os.fork()
    if program == 0:
        os.close(report)
        _become(words, limits)
    ended = 0
    while ended != program:
        ended, status = os.wait()  # orphans, too
    os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(words: list[str], limits: dict[int, int]) -> NoReturn:
    """Be the program, with the limits on; standard output is ours to report on."""
    try:
        _libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for limit, value in limits.items():
            _, most = resource.getrlimit(limit)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(limit, (value, value))
        os.execv(words[0], words)  # noqa: S606 (no shell is what is wanted)
    except BaseException as error:  # noqa: BLE001 (nothing of ours may run on in this process)
        os.write(2, f"{words[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def _read_exit_code(from_keeper: int, seconds: float) -> int | None:
    """Wait for the keeper's word; None where it does not come in time."""
    ready, _, _ = select.select([from_keeper], [], [], seconds)
    said = os.read(from_keeper, 16) if ready else b""
    if ready and not said:
        return -int(signal.SIGKILL)  # the program ended its keeper
    return int(said) if said else None


def _end(keeper: int, *, is_apart: bool) -> None:
    """End all that the program left; in a namespace of their own the keeper's end is theirs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    limit = time.monotonic() + _SECONDS_TO_END
    while not is_apart and (left := _descendants()) and time.monotonic() < limit:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none of them forks meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants() -> list[int]:
    """Return the processes below this one, which orphans come to as well."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


if __name__ == "__main__":
    main()
