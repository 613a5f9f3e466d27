"""Write a Slurm job's exit.json from its ranks' exit records, as the job's last command.

`python -m redco_flow.launch.slurm.job_end ATTEMPT --num-processes N`, in the job's script after the
ranks of each of its stages. After a preemption or a node failure it writes requeue.json instead and
exits with 75, so that the script requeues the job.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from redco_flow.launch.endings import (
    ClusterWord,
    end_later_stages,
    judge,
    read_endings,
    write_exit,
)
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.process_identity import utc_now

REQUEUE_EXIT_CODE = 75
REQUEUE_FILE = "requeue.json"
KILLED_EXIT_CODE = 137  # of srun, where SIGKILL ended the process
_MAX_NODE_FAILURES = 3  # more in one job are no accident


def main(arguments: list[str]) -> int:
    """Write exit.json, or ask the script to requeue the job."""
    options = _parse(arguments)
    attempt = AttemptDirectory(options.attempt)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    begun, why = "no rank left a record of its end", ""
    if not attempt.ranks_with_logs():
        begun, why = "no rank started", _last_error(attempt.path / options.log)
    if options.srun_exit_code == KILLED_EXIT_CODE:
        why = " (a process was killed by SIGKILL)"
    said = f"{begun}, srun ended with {options.srun_exit_code}{why}; see {options.log}."
    record = judge(
        read_endings(attempt, restart),
        options.num_processes,
        ClusterWord(unstarted=(Cause.FAILED, said)),
        has_result=attempt.result_path.exists(),
        was_cancelled=attempt.cancel_path.exists(),
    )
    is_accident = record.cause is not Cause.NODE_FAILURE or restart < _MAX_NODE_FAILURES
    if record.cause.is_taken_back and is_accident and not options.for_good:
        write_json(attempt.path / REQUEUE_FILE, {"restart": restart, "asked_at": utc_now()})
        return REQUEUE_EXIT_CODE
    write_exit(attempt, record)
    if record.cause is not Cause.COMPLETED:
        end_later_stages(map(AttemptDirectory, options.later), attempt, record.cause)
    return 0 if record.cause is Cause.COMPLETED else 1


def _last_error(log: Path) -> str:
    """Return the last error in a job's log that gives a reason, in brackets; "" without one."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if line.startswith(("srun: error: ", "slurmstepd: error: "))]
    reasons = [line for line in errors if not any(words in line for words in _NO_REASON)]
    return f" ({reasons[-1]})" if reasons else ""


_NO_REASON = ("Timed out waiting for job step", "Exited with exit code")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.launch.slurm.job_end")
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--srun-exit-code", type=int)
    parser.add_argument("--for-good", action="store_true")
    parser.add_argument("--log", default="logs/slurm.log", help="the job's own output")
    parser.add_argument("--later", type=Path, action="append", default=[])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
