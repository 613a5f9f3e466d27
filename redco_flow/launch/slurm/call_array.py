"""Write what an array of calls consists of: one task for each call, whose attempt is its own.

In the array's directory stand the sbatch file and, for each task, a link to the attempt of its
call. All else stands in the attempts; no process is needed that knows the array as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.launch.slurm.script import JOB_LOG, Submission, render
from redco_flow.records import write_text
from redco_flow.tracking.attempt import AttemptDirectory

SCRIPT = "job.sh"


def write_call_array(submission: Submission, attempts: Sequence[AttemptDirectory]) -> None:
    """Write the array's directory: its sbatch file, and for each task a link to its attempt.

    Args:
        submission: its `attempt` is the array's directory, which must not exist.
        attempts: those of its tasks, in the same order.

    Raises:
        UsageError: it cannot be submitted; says why.
        OSError: the disk is full or read-only, or the directory exists; names the path.
    """
    text = render(submission)
    array = AttemptDirectory(submission.attempt)
    (array.path / "tasks").mkdir(parents=True)
    write_text(array.path / SCRIPT, text)
    for task, attempt in zip(submission.tasks, attempts, strict=True):
        path = attempt.path.absolute()
        (path / JOB_LOG).parent.mkdir(exist_ok=True)
        array.task(task).path.symlink_to(path)
