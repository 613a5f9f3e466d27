"""Set up a worker's process, and end it with an error record whatever happened.

Sets JAX's environment, and ends by `os._exit`: threads, exit hooks and other ranks' barriers could
hang for ever.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from redco_flow.launch import disk_reserve
from redco_flow.launch.redaction import redact_text
from redco_flow.records import explain_no_space, write_json
from redco_flow.spec.names import user_line
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.file_lock import release_all

_NUM_RESERVED = 8


class ReservedFiles:
    """Open files to give up when the process has none left to say so with."""

    def __init__(self) -> None:
        self._descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(_NUM_RESERVED)]

    def release(self) -> None:
        """Give them back."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def prepare(on_terminate: Callable[[], None]) -> None:
    """Make output arrive line by line, stacks appear on SIGUSR1, and SIGTERM ask.

    Args:
        on_terminate: called in the main thread, between any two instructions; it may raise.
    """
    # Imports and traces create objects that live on: with Python's default (700, or 2,000) a tenth
    # of the CPU time of a short stage goes into searching them for garbage.
    gc.set_threshold(50_000)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    signal.signal(signal.SIGTERM, lambda *_: on_terminate())


def log_to_stderr(rank: int) -> None:
    """Let what this package logs appear line by line: progress by rank 0, warnings by all."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    package = logging.getLogger("redco_flow")
    package.addHandler(handler)
    package.propagate = False  # a stage that configures the root logger would say all twice
    package.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def log(text: str) -> None:
    """Write one line of our own to the log."""
    sys.stderr.write(f"redco-flow: {text}\n")


def report_error(attempt: AttemptDirectory, error: BaseException) -> None:
    """Write error.json, and the traceback to the log."""
    secrets = secret_values(os.environ)
    text = "".join(traceback.format_exception(error))
    message = _message(error)
    is_ours = type(error).__module__.startswith("redco_flow.")
    if not is_ours and (line := user_line(error)):
        message += f" (at {line})"
    if isinstance(error, OSError):
        message += _explain_full(attempt, error)
    record = {
        "type": type(error).__name__,
        "message": redact_text(message, secrets),
        "traceback": redact_text(text, secrets),
    }
    disk_reserve.give_back(attempt.path, disk_reserve.ERROR)
    try:
        write_json(attempt.error_path, record)
    except OSError as problem:
        log(f"{attempt.error_path} cannot be written: {problem}")
    sys.stderr.write(text)


def _explain_full(attempt: AttemptDirectory, error: OSError) -> str:
    """Name the full disks, of errors that name no file too, and what ran out there."""
    listed = ""
    if error.errno == errno.ENOSPC:
        directories = disk_reserve.full_disks(attempt.path, Path.cwd())
        listed = f" (full: {', '.join(map(str, directories)) or 'no disk by now'})"
        if error.filename is None and directories:
            error = OSError(error.errno, error.strerror, str(directories[0]))
    advice = explain_no_space(error)
    return f"{listed}. {advice}" if advice else listed


def _message(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception as problem:  # noqa: BLE001 (an error's own text may be broken)
        return f"its text cannot be shown: {type(problem).__name__}"


def end(exit_code: int) -> NoReturn:
    """End now, after what was printed is out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the log is gone; the records say everything
            continue
    release_all()
    os._exit(exit_code)


SHARE_OF_GPU = "0.92"
"""Of a GPU's memory, for a stage's process: JAX's default is 0.75, and torch may take all of it."""
SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def jax_variables(
    environ: Mapping[str, str], *, num_cpu_devices: int | None, compile_cache: Path
) -> dict[str, str]:
    """Return what to set in `environ`.

    Args:
        environ: the worker's environment as inherited.
        num_cpu_devices: replaces whatever number was inherited; None leaves that alone.
        compile_cache: where compiled programs are kept, unless the environment names a place.
    """
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache),
        # By default only slow compiles are kept; a restart pays for each of the others again.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    variables = {name: environ.get(name, value) for name, value in variables.items()}
    if not any(name in environ for name in SHARE_VARIABLES):
        variables[SHARE_VARIABLES[0]] = SHARE_OF_GPU
    if num_cpu_devices is not None:
        flags = [
            flag
            for flag in environ.get("XLA_FLAGS", "").split()
            if flag.partition("=")[0] != _HOST_DEVICES_FLAG
        ]
        variables["XLA_FLAGS"] = " ".join(flags)
        variables["JAX_NUM_CPU_DEVICES"] = str(num_cpu_devices)
    return variables
