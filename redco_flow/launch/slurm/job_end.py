"""The last thing that a cluster's job does: say in exit.json how it ended, from its ranks' words.

`python -m redco_flow.launch.slurm.job_end ATTEMPT --num-processes N`, in the job's script after the
ranks. Exits with 75, and writes requeue.json instead, where the cluster only wanted its hosts back.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from redco_flow.launch.rank_endings import TAKEN_BACK, TERMINATED, judge_group, read_endings
from redco_flow.launch.slurm.script import REQUEUE_EXIT_CODE, REQUEUE_FILE
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now

_MAX_NODE_FAILURES = 3  # more in one job are no accident


def main(arguments: list[str]) -> int:
    """Write exit.json, or ask the script to have the job queued again."""
    options = _parse(arguments)
    attempt = AttemptDirectory(options.attempt)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    endings = read_endings(attempt, restart)
    record = judge_group(endings, options.num_processes)
    if not endings:
        said = f"no rank started, srun ended with {options.srun_exit_code}; see logs/slurm.log."
        record |= {"cause": "failed", "message": said}
    if attempt.cancel_path.exists() and (not endings or record["cause"] in TAKEN_BACK):
        record |= {"cause": "cancelled", "message": "it was cancelled."}
    if attempt.result_path.exists():  # rank 0's last act
        record |= {"cause": "completed", "message": "the result is published.", "exit_code": 0}
    is_accident = record["cause"] != "node_failure" or restart < _MAX_NODE_FAILURES
    if record["cause"] in TAKEN_BACK and is_accident and not options.for_good:
        write_json(attempt.path / REQUEUE_FILE, {"restart": restart, "asked_at": utc_now()})
        return REQUEUE_EXIT_CODE
    if record["cause"] == TERMINATED:
        record |= {"cause": "preempted"}
    write_json(attempt.exit_path, record | {"ended_at": record["ended_at"] or utc_now()})
    return 0 if record["cause"] == "completed" else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.launch.slurm.job_end")
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--srun-exit-code", type=int)
    parser.add_argument("--for-good", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
