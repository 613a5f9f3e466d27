"""What Slurm's words mean for a job, beside what the job itself wrote."""

import pytest

from redco_flow.launch.endings import RankEnding, judge
from redco_flow.launch.slurm.job import is_terminal, live_status, word_of
from redco_flow.launch.slurm.queue import JobEntry
from redco_flow.tracking.attempt import Cause

FAILED_RANK = RankEnding(
    rank=3,
    cause=Cause.OUT_OF_MEMORY,
    message="killed by the kernel",
    host="n2",
    restart=0,
    exit_code=None,
    ended_at="2030-01-01T00:00:00.000+00:00",
)


def ended(state, endings=(), *, was_cancelled=False, has_result=False, log_end=""):
    word = word_of(JobEntry("1", state), log_end)
    record = judge(endings, 4, word, was_cancelled=was_cancelled, has_result=has_result)
    return record.cause, record.message


@pytest.mark.parametrize(
    "state",
    [
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SIGNALING", "SUSPENDED", "STOPPED"),
        *("REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "STAGE_OUT", "A_STATE_OF_THE_FUTURE"),
    ],
)
def test_states_that_are_no_end_never_end_a_job(state):
    assert not is_terminal(JobEntry("1", state))
    assert not live_status(JobEntry("1", state), "").is_finished


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"),
        ("NODE_FAIL", "node_failure"),
        ("BOOT_FAIL", "node_failure"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "out_of_memory"),
        ("CANCELLED", "cancelled"),
        ("FAILED", "failed"),
        ("COMPLETED", "failed"),  # there is no result
    ],
)
def test_an_end_that_slurm_decided_has_its_cause(state, cause):
    assert is_terminal(JobEntry("1", state))
    assert ended(state)[0] == cause


def test_a_published_result_counts_more_than_how_the_job_was_ended_afterwards():
    assert ended("NODE_FAIL", has_result=True)[0] == "completed"


def test_a_cancel_by_redco_flow_counts_whatever_slurm_calls_it():
    assert ended("FAILED", was_cancelled=True)[0] == "cancelled"


def test_a_rank_that_failed_explains_the_job_that_slurm_only_calls_failed():
    assert ended("FAILED", [FAILED_RANK]) == (
        "out_of_memory",
        "rank 3 of 4 on n2: killed by the kernel",
    )


def test_without_any_rank_the_end_of_the_jobs_own_log_explains_it():
    assert "module: command not found" in ended("FAILED", log_end="module: command not found")[1]


def test_a_waiting_job_is_told_with_its_reason_and_a_running_one_with_hosts_and_restarts():
    waiting = live_status(JobEntry("1", "PENDING", 0, "Priority"), "")
    running = live_status(JobEntry("1", "RUNNING", 2, "", "n[1-2]"), "")

    assert (waiting.state, waiting.message) == ("pending", "waits in the queue: Priority")
    assert (running.state, running.message) == ("running", "runs on n[1-2], restarted 2 times")


def test_an_old_answer_is_told_to_be_old():
    status = live_status(JobEntry("1", "RUNNING", 0, "", "n1"), "squeue did not answer")

    assert status.message == "runs on n1 (last known; squeue did not answer)"
    assert status.source == "squeue of before: RUNNING"
