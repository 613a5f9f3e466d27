"""The process that drives a run: `python -m redco_flow.orchestrate.run.orchestrator RUN`.

Detached, so it outlives the terminal. Drives further runs that are offered to it meanwhile
(`sharing.py`), and ends with the first run's exit code when it has none. The next process on the
same directory continues after a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.processes import START_AGAIN_EXIT_CODE, exit_within
from redco_flow.launch.redaction import RedactedStream
from redco_flow.orchestrate.run.cancel import has_ended
from redco_flow.orchestrate.run.driver import LEAVE_CANCELLED, Driver
from redco_flow.orchestrate.run.launcher import is_launcher_job
from redco_flow.orchestrate.run.sharing import Listener, notes_of
from redco_flow.orchestrate.run.start import refuse_to_start_over, reopen_run
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.spec.profile import LOCAL_LAUNCHER
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import ENDED_RUN_STATES
from redco_flow.tracking.deletions import find_run_deletion
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import RunDirectory

_SECONDS_FOR_PYTHON_TO_CLOSE = 15.0
_SECONDS_TO_KEEP = 86400.0


def main(arguments: Sequence[str]) -> int:
    """Drive the run to its end, and others that come; return the first one's exit code."""
    options = _parse(arguments)
    run = RunDirectory(options.run)
    notes = notes_of(options.share) if options.share else None
    driver = Driver(notes, options.job)
    driver.take_signals()
    try:
        if options.job and not (is_launcher_job(run, options.job_name) and _is_left_to_do(run)):
            sys.stderr.write(
                f"job {options.job} has nothing to do: run {run.id} has ended or was removed, or "
                f"launcher.json does not name this job as its launcher\n"
            )
            return 0
        driven = driver.start(run, leave_cancelled=options.leave_cancelled)
    except (RedcoFlowError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return getattr(error, "exit_code", 1)
    if notes is None:
        driver.wait()
        is_left = options.job and driver.is_stopped and not has_ended(run)
        return START_AGAIN_EXIT_CODE if is_left else driven.exit_code
    _remove_old(notes.parent)
    listener = Listener(driver, options.share)
    if listener.is_open:
        _continue_left_behind(driver, notes, run)
    listener.wait()
    return driven.exit_code


def _is_left_to_do(run: RunDirectory) -> bool:
    """Whether a job that the cluster has started, perhaps again, has a run to drive.

    Raises:
        UsageError: another version trained it.
        DamagedRecord: its state cannot be read.
    """
    if run.read_state()["state"] in ENDED_RUN_STATES or find_run_deletion(run):
        return False
    refuse_to_start_over(run)
    return True


def _remove_old(folders: Path) -> None:
    """Remove the empty folders of processes that ended a day ago."""
    for folder in folders.glob("*"):
        with contextlib.suppress(OSError):  # it has notes, or another process was faster
            if time.time() - folder.stat().st_mtime > _SECONDS_TO_KEEP:
                folder.rmdir()


def _continue_left_behind(driver: Driver, notes: Path, first: RunDirectory) -> None:
    """Continue the runs that a killed process of the same name has left without an end."""
    for note in sorted(notes.glob("*")):
        run = RunDirectory(first.path.parent / note.name)
        if driver.is_stopped:
            return
        if find_holder(run) is not None:
            continue
        try:
            if not run.path.exists() or has_ended(run) or find_run_deletion(run):
                note.unlink()
                continue
            if LaunchRecord.read(run).launcher != LOCAL_LAUNCHER:  # it has a job since
                note.unlink()
                continue
            if not run.cancel_requested():  # else it is to be cancelled, by this process
                reopen_run(run)
            driver.start(run, leave_cancelled=note.read_text() == LEAVE_CANCELLED)
        except Exception as error:  # noqa: BLE001 (the other runs are not to suffer from it)
            sys.stderr.write(f"run {run.id}, whose process was killed, is left: {error}\n")
        else:
            sys.stderr.write(f"run {run.id}, whose process was killed, continues here\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.orchestrate.run.orchestrator")
    parser.add_argument("run", type=Path)
    parser.add_argument("--leave-cancelled", action="store_true")
    parser.add_argument("--job", default="", help="id of the cluster's job that this process is in")
    parser.add_argument("--job-name", default="", help="the name of that job")
    parser.add_argument("--share", default="", help="the name under which it accepts further runs")
    return parser.parse_args(arguments)


def run_and_exit(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a process that drives runs, whose standard error is its log, and end it."""
    # A run's flow is the user's code, and so are the errors that it raises.
    sys.stdout = sys.stderr = RedactedStream(sys.stderr, secret_values(os.environ))
    code = main(sys.argv[1:])
    # Prefect's own threads may wait for a lost server only so long.
    exit_within(_SECONDS_FOR_PYTHON_TO_CLOSE, code)
    sys.exit(code)


if __name__ == "__main__":
    run_and_exit(main)
