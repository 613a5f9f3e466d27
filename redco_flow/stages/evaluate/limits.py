"""Run a program with limits: its arguments are REPORT SECONDS MEMORY_BYTES FOLDER WORD…

The program gets limits of time, memory and files; namespaces, Landlock and seccomp where the system
has them. When it has ended, or its time is over, all processes that it left are ended. Then a line
of JSON is written to the descriptor REPORT: `exit_code` (below 0: a signal's number; null: it ran
out of time), `is_apart` (whether it had its own namespaces and mounts), `is_confined` (whether
Landlock restricted its files) and `word`, by which the reader knows that the line is not the
program's. Standard library only.
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
from collections.abc import Iterator, Mapping
from typing import NoReturn

from redco_flow.stages.evaluate.sandbox import (
    deny_system_calls,
    drop_privileges,
    enter_namespaces,
    hide_from_other_processes,
    landlock_version,
    mount_fresh_folders,
    restrict_files,
)

WORD_VARIABLE = "REDCO_FLOW_REPORT_WORD"
READABLE_VARIABLE = "REDCO_FLOW_READABLE"

# linux/prctl.h
_SIGNAL_AT_PARENTS_DEATH, _ADOPT_ORPHANS = 1, 36

_MAX_FILE_BYTES = 64 << 20
_MAX_FOLDER_BYTES = 256 << 20  # in namespaces
_MAX_OPEN_FILES = 256
_MAX_PROCESSES = 256
_SECONDS_TO_END = 5.0
_DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
_SYSTEM_FILES = ["/sys/devices/system/cpu", "/proc/self", "/proc/sys"]
_SYSTEM_FILES += [f"/proc/{name}" for name in ("cpuinfo", "meminfo", "stat", "filesystems")]

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the program that the command line names, and report how it ended."""
    report, seconds, num_bytes, folder, words = _arguments()
    os.set_inheritable(report, False)
    limits = _limits(seconds, num_bytes)
    has_namespaces = enter_namespaces()
    # The program, of the same user, must not reach the descriptors and the word of this process.
    hide_from_other_processes()
    _libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    from_keeper, to_us = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(from_keeper)
        _keep(words, folder, limits, to_us, has_namespaces=has_namespaces)
    os.close(to_us)
    is_mounted = has_namespaces and os.read(from_keeper, 1) == b"1"
    exit_code = _read_exit_code(from_keeper, seconds)
    _end(keeper, has_namespaces=has_namespaces)
    found = {
        "exit_code": exit_code,
        "is_apart": is_mounted,
        "is_confined": landlock_version() > 0,
        "word": os.environ.get(WORD_VARIABLE, ""),
    }
    os.write(report, json.dumps(found).encode() + b"\n")


def _arguments() -> tuple[int, float, int, str, list[str]]:
    report, seconds, num_bytes, folder, *words = sys.argv[1:]
    return int(report), float(seconds), int(num_bytes), folder, words


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


def _keep(
    words: list[str], folder: str, limits: Mapping[int, int], report: int, *, has_namespaces: bool
) -> NoReturn:
    """Start the program, wait for it, and write how it ended.

    The first process of a PID namespace gets no signal that it does not handle, so the program is
    its child; when the first ends, the kernel ends all others.
    """
    _libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
    is_mounted = has_namespaces and mount_fresh_folders(folder, _MAX_FOLDER_BYTES, _readable())
    if has_namespaces:
        os.write(report, b"1" if is_mounted else b"0")
    program = os.fork()
    if program == 0:
        os.close(report)
        _become(words, folder, limits, is_mounted=is_mounted)
    ended = 0
    while ended != program:
        ended, status = os.wait()  # orphans, too
    os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _readable() -> list[str]:
    return os.environ.get(READABLE_VARIABLE, "").split(os.pathsep)


def _become(
    words: list[str], folder: str, limits: Mapping[int, int], *, is_mounted: bool
) -> NoReturn:
    """Replace this process by the program, with all limits set."""
    try:
        _libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
        os.chdir(folder)
        own_variables = (WORD_VARIABLE, READABLE_VARIABLE)
        environment = {k: v for k, v in os.environ.items() if k not in own_variables}
        # Only its own file systems and processes are there to be seen.
        own = ["/proc", "/dev/shm"] if is_mounted else []  # noqa: S108 (mounted by us)
        confine([*_readable(), *own], [folder, *own])
        for limit, value in limits.items():
            _, most = resource.getrlimit(limit)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(limit, (value, value))
        os.execve(words[0], words, environment)  # noqa: S606 (without a shell, by intention)
    except BaseException as error:  # noqa: BLE001 (nothing of ours may run on in this process)
        os.write(2, f"{words[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def confine(readable: list[str], writable: list[str]) -> None:
    """Restrict this process and its children to some files, and deny what no test needs."""
    drop_privileges()
    restrict_files([*readable, *_SYSTEM_FILES], [*writable, *_DEVICES])
    deny_system_calls()


def _read_exit_code(from_keeper: int, seconds: float) -> int | None:
    """Wait for the keeper's report; None where it does not come in time."""
    ready, _, _ = select.select([from_keeper], [], [], seconds)
    said = os.read(from_keeper, 16) if ready else b""
    if ready and not said:
        return -int(signal.SIGKILL)  # the program ended its keeper
    return int(said) if said else None


def _end(keeper: int, *, has_namespaces: bool) -> None:
    """End all that the program left; in a PID namespace the kernel does so at the keeper's end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    limit = time.monotonic() + _SECONDS_TO_END
    while not has_namespaces and (left := _descendants()) and time.monotonic() < limit:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none of them forks meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants() -> list[int]:
    """Return the processes below this one, which adopts orphans."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found
