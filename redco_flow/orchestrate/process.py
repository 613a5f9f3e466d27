"""The process that drives one run: `python -m redco_flow.orchestrate.process RUN_DIRECTORY`.

In a session of its own, so it outlives the terminal. Holds the lease, takes signals, and ends
with the run's exit code; what happens in between is `driving`'s. What a killed process left is
taken up by the next one on the same directory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.redaction import RedactedStream
from redco_flow.orchestrate.state_book import StateBook, note_takeover
from redco_flow.orchestrate.stopping import StopRequest
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.clock import utc_now
from redco_flow.tracking.lease import Lease, acquire
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import State

if TYPE_CHECKING:
    from redco_flow.orchestrate.flow_thread import FlowThread

_SECONDS_FOR_PREFECT_TO_CLOSE = 180.0
_SECONDS_FOR_PYTHON_TO_CLOSE = 15.0


def main(arguments: Sequence[str]) -> int:
    """Drive the run to its end; return the exit code."""
    options = _parse(arguments)
    run = RunDirectory(options.run)
    try:
        with acquire(run) as lease:
            exit_code, flow = _drive(run, lease, options)
    except RedcoFlowError as error:
        say(str(error))
        return error.exit_code
    except OSError as error:  # of a record: only the log can still tell it
        say(
            f"{error.filename or run.path} cannot be written ({error.strerror or error}): this "
            f"process ends; jobs run on, and what is recorded stays. Make it writable, or free "
            f"space, then `redco-flow resume {run.id}`."
        )
        return 1
    if flow is not None:
        # The run has ended; Prefect may take its time without keeping others from the run.
        flow.close(_SECONDS_FOR_PREFECT_TO_CLOSE)
    return exit_code


def _drive(
    run: RunDirectory, lease: Lease, options: argparse.Namespace
) -> tuple[int, FlowThread | None]:
    """Return the exit code, and the flow where there is one to close.

    Raises:
        OSError: the run's records cannot be written; names the path.
    """
    note_takeover(run, lease)
    book = StateBook(run)
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop.on_signal)
    try:
        # Imported now, so that the process that started this one sees the lease at once. submitit
        # configures logging when it is imported, which closes every handler: once Prefect
        # has its own, that can wait for ever on a lock.
        importlib.import_module("redco_flow.launch.executor")
        from redco_flow.orchestrate.driving import drive, open_session
        from redco_flow.orchestrate.flow_thread import FlowThread

        session = open_session(
            run,
            book,
            stop,
            leave_cancelled=options.leave_cancelled,
            judges_ended=options.judge_ended,
        )
        flow = FlowThread(session, say)
        return drive(session, flow, say).exit_code, flow
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the run's files must say it)
        say(traceback.format_exc())
        code = error.exit_code if isinstance(error, RedcoFlowError) else 1
        book.close_run(State.FAILED, code, _told(error))
        return code, None


def _told(error: BaseException) -> str:
    """What went wrong, for the run's message: ours speak for themselves."""
    if isinstance(error, RedcoFlowError):
        return str(error)
    return f"the run could not be driven: {type(error).__name__}: {error}"


def say(line: str) -> None:
    """Write one line to orchestrator.log, which is this process's standard error."""
    sys.stderr.write(f"{utc_now()} {line}\n")
    sys.stderr.flush()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.orchestrate.process")
    parser.add_argument("run", type=Path)
    parser.add_argument("--leave-cancelled", action="store_true")
    parser.add_argument("--judge-ended", action="store_true")
    return parser.parse_args(arguments)


def _exit(code: int) -> None:
    """End the process; Prefect's own threads may wait for a lost server only so long."""
    late = threading.Timer(_SECONDS_FOR_PYTHON_TO_CLOSE, os._exit, [code])
    late.daemon = True
    late.start()
    sys.exit(code)


if __name__ == "__main__":
    # The run's flow is the user's code, and so are the errors that it raises.
    sys.stdout = sys.stderr = RedactedStream(sys.stderr, secret_values(os.environ))
    _exit(main(sys.argv[1:]))
