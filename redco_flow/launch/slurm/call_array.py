"""Write what an array of calls consists of: one task for each call, whose attempt is its own.

In the array's directory stand the sbatch file and, for each task, a link to the attempt of its
call. All else stands in the attempts; no process is needed that knows the array as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_flow.launch.slurm.script import JOB_LOG, Submission, render
from redco_flow.records import write_json, write_text
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now

SCRIPT = "job.sh"


def write_call_array(
    submission: Submission, attempts: Sequence[AttemptDirectory], cluster: str
) -> list[dict[str, Any]]:
    """Write the array's directory and each attempt's job.json, which has no id yet.

    Whoever finds such a record looks for the array's name and, in it, for the task.

    Args:
        submission: its `attempt` is the array's directory, which must not exist.
        attempts: those of its tasks, in the same order.
        cluster: $SLURM_CONF, or "".

    Returns:
        Each attempt's job.json.

    Raises:
        UsageError: it cannot be submitted; says why.
        OSError: the disk is full or read-only, or the directory exists; names the path.
    """
    text = render(submission)
    array = AttemptDirectory(submission.attempt)
    (array.path / "tasks").mkdir(parents=True)
    write_text(array.path / SCRIPT, text)
    records = []
    for task, attempt in zip(submission.tasks, attempts, strict=True):
        path = attempt.path.absolute()
        (path / JOB_LOG).parent.mkdir(exist_ok=True)
        array.task(task).path.symlink_to(path)
        record = {
            "executor": "slurm",
            "job_id": "",
            "job_name": submission.job_name,
            "task": task,
            "array": str(array.path),
            "attempt": str(path),
            "cluster": cluster,
            "submitted_at": utc_now(),
        }
        # Before sbatch: a submission whose answer is lost is found by this.
        write_json(attempt.job_path, record)
        records.append(record)
    return records
