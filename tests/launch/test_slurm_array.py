"""What is submitted for a stage in shards, and what its tasks' states make together."""

from dataclasses import replace
from pathlib import Path

import pytest

from redco_flow.errors import StageFailed
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import reattach
from redco_flow.launch.job import JobStatus
from redco_flow.launch.slurm.array import array_ending, array_status
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.script import Submission, render
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State

SUBMISSION = Submission(
    attempt=Path("/data/my ws/1"),
    title="tiny-abcd preprocess 1",
    directory=Path("/home/me"),
    resources=JobResources(shards=(0, 1, 2)),
    settings=Config(python="python"),
    stall_seconds=1800,
    grace_seconds=30,
)
RUNNING = JobStatus(State.RUNNING, source="squeue: RUNNING")
WAITING = JobStatus(State.PENDING, message="waits in the queue: Priority", source="squeue: PENDING")
DONE = JobStatus(Cause.COMPLETED)


def ended(cause):
    return JobStatus(Cause(cause), f"it was {cause}.")


def test_an_array_has_a_task_for_each_shard_with_records_of_its_own():
    text = render(SUBMISSION)

    assert "#SBATCH --array=0-2\n" in text
    assert "#SBATCH --output=tasks/%a/logs/slurm.log\n" in text
    assert '"$SLURM_ARRAY_JOB_ID" > slurm.jobid\n' in text
    place = "'/data/my ws/1'/tasks/\"$SLURM_ARRAY_TASK_ID\""
    for command in ("redco_flow.launch.rank \\\n    ", "redco_flow.launch.slurm.job_end "):
        assert f"{command}{place} " in text
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text  # of one task


def test_the_profile_limits_how_many_tasks_run_at_once():
    settings = Config(max_array_tasks=2)
    left = JobResources(shards=(1, 4))

    text = render(replace(SUBMISSION, settings=settings, resources=left))

    assert "#SBATCH --array=1,4%2\n" in text


def test_an_array_says_how_many_tasks_are_done_at_work_and_waiting():
    status = array_status({0: DONE, 1: RUNNING, 2: WAITING, 3: WAITING, 4: ended("failed")})

    text = "1 of 5 tasks done, 1 at work, 2 waiting (Priority), 1 failed"
    assert (status.state, status.message, status.news) == ("running", text, text)
    assert array_status({0: WAITING}).state == "pending"


@pytest.mark.parametrize(
    ("causes", "cause"),
    [
        (["completed", "completed"], "completed"),
        (["preempted", "timeout"], "timeout"),
        (["timeout", "failed"], "failed"),
        (["cancelled", "completed"], "cancelled"),
        (["cancelled", "out_of_memory"], "out_of_memory"),
        (["node_failure", "never_submitted"], "never_submitted"),
    ],
)
def test_an_array_ends_as_the_gravest_of_its_tasks(causes, cause):
    tasks = {shard: ended(one) for shard, one in enumerate(causes)}

    record = array_ending(tasks, was_cancelled=False, has_result=False)

    assert record.cause == cause
    if cause != "completed":
        assert record.message.startswith(f"task {causes.index(cause)}: it was {cause}.")


def test_a_cancelled_array_is_cancelled_unless_it_has_its_result():
    tasks = {0: DONE, 1: ended("failed")}

    for has_result, cause in ((False, "cancelled"), (True, "completed")):
        record = array_ending(tasks, was_cancelled=True, has_result=has_result)
        assert record.cause == cause


@pytest.fixture
def unsubmitted(tmp_path):
    """The job of an attempt whose launcher ended before it submitted the first of two arrays."""
    attempt = AttemptDirectory(tmp_path)
    record = {"executor": "slurm", "job_id": "", "attempt": str(tmp_path), "cluster": ""}
    write_json(attempt.job_path, record | {"arrays": [[0, 1], [2]]})
    return reattach(attempt.read_job())


def test_arrays_that_are_not_submitted_are_pending_for_all_but_the_launcher(unsubmitted):
    """No other process ends the attempt, unless it is cancelled."""
    text = "0 of 3 tasks done, 3 waiting (for the launcher to submit its array)"
    assert (unsubmitted.status().message, unsubmitted.state) == (text, "PENDING")
    assert unsubmitted.is_unsubmitted
    assert not unsubmitted.done()
    assert unsubmitted.attempt.read_exit() is None

    unsubmitted.cancel()

    assert unsubmitted.attempt.read_exit().cause is Cause.CANCELLED
    assert not unsubmitted.is_unsubmitted


def test_a_launcher_that_takes_over_ends_an_attempt_whose_arrays_are_refused_for_good(unsubmitted):
    def refuse(number):
        raise StageFailed(f"sbatch: invalid account for array {number}")

    unsubmitted.drive(refuse, refuse)

    assert unsubmitted.done()
    record = unsubmitted.attempt.read_exit()
    assert record.cause is Cause.NEVER_SUBMITTED
    assert "invalid account for array 0" in record.message
