"""What Slurm's words mean for a job, beside what the job itself wrote."""

import pytest

from redco_flow.launch.endings import RankEnding, judge
from redco_flow.launch.slurm.messages import find_submit_limit, is_transient
from redco_flow.launch.slurm.queue import JobEntry
from redco_flow.launch.slurm.states import is_same_job, is_terminal, live_status, word_of
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


@pytest.mark.parametrize(
    "reason",
    ["PartitionTimeLimit", "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit",
     "QOSMaxGRESPerJob", "MaxMemPerLimit", "InvalidAccount", "AccountNotAllowed", "InvalidQOS",
     "QOSMinCpuNotSatisfied", "BadConstraints", "DeadLine", "ReservationDeleted",
     "DependencyNeverSatisfied"],
)  # fmt: skip
def test_a_job_whose_reason_to_wait_never_clears_is_reported_as_never_starting(reason):
    status = live_status(JobEntry("1", "PENDING", 0, reason), "")

    assert status.state == "pending"  # an administrator may still change the limit
    assert status.message.startswith(f"will never start: {reason}: ")
    assert "cancel" in status.message


@pytest.mark.parametrize("reason", ["QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit", "Resources"])
def test_a_reason_that_clears_as_other_jobs_end_only_waits(reason):
    assert live_status(JobEntry("1", "PENDING", 0, reason), "").message == (
        f"waits in the queue: {reason}"
    )


def test_a_suspended_job_is_reported_as_suspended():
    status = live_status(JobEntry("1", "SUSPENDED", 0, "", "n1"), "")

    assert (status.state, status.news) == ("pending", "is suspended on n1 until Slurm resumes it")


def test_a_job_that_slurm_cancels_for_its_dependency_is_not_said_to_be_cancelled_by_a_user():
    word = word_of(JobEntry("1", "CANCELLED", 0, "DependencyNeverSatisfied"), "")

    assert word.decided == (
        Cause.CANCELLED,
        "it never began: a job that it depends on did not complete (DependencyNeverSatisfied).",
    )


FAILED_SUBMISSION = "sbatch: error: Batch job submission failed: "
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("said", "is_for_a_while"),
    [
        ("Socket timed out on send/recv operation", True),
        ("Unexpected message received", True),
        ("Slurm backup controller in standby mode", True),
        ("Unable to contact slurm controller (connect failure)", True),
        ("I/O error writing script/environment to file", True),
        ("Resource temporarily unavailable", True),
        ("Zero Bytes were transmitted or received", True),
        ("Connection refused", True),
        ("Invalid account or account/partition combination specified", False),
        ("Invalid partition name specified", False),
        ("Requested node configuration is not available", False),
        (POLICY, False),
    ],
)
def test_refusals_that_pass_by_themselves_are_distinguished_from_those_that_stay(
    said, is_for_a_while
):
    """Fault 52: the texts are Slurm 22.05's own."""
    assert is_transient(FAILED_SUBMISSION + said) == is_for_a_while


def test_the_last_error_of_sbatch_counts_not_what_it_retried_itself():
    retried = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying "

    assert not is_transient(f"{retried}{FAILED_SUBMISSION}Invalid qos specification")


@pytest.mark.parametrize(
    ("limit", "is_of_submission"),
    [
        ("QOSMaxSubmitJobPerUserLimit", True),
        ("AssocMaxSubmitJobLimit", True),
        ("AssocGrpSubmitJobsLimit", True),
        ("QOSMaxWallDurationPerJobLimit", False),
    ],
)
def test_a_limit_of_submitted_jobs_is_found_by_its_name(limit, is_of_submission):
    said = f"sbatch failed with code 1: sbatch: error: {limit} {FAILED_SUBMISSION}{POLICY}"

    assert find_submit_limit(said) == (limit if is_of_submission else "")


@pytest.mark.parametrize(
    ("entry", "is_same"),
    [
        (JobEntry("7", "RUNNING", 0, name="ours", submitted_at=100), True),
        (JobEntry("7", "RUNNING", 0, name="theirs", submitted_at=100), False),
        (JobEntry("7", "RUNNING", 0, name="ours", submitted_at=101), False),
        (JobEntry("7", "RUNNING", 1, name="ours", submitted_at=101), True),  # requeued
        (JobEntry("7", "RUNNING", 1, name="ours", submitted_at=99), False),
        (JobEntry("7", "RUNNING", 0, name="ours"), True),  # Slurm does not report it
    ],
)
def test_a_job_is_recognised_by_name_and_submit_time(entry, is_same):
    """Fault 54: the submit time is later after a requeue, as Slurm 22.05 has it."""
    assert is_same_job(entry, "ours", 100) == is_same
    assert is_same_job(JobEntry("7", "RUNNING", 0, name="any", submitted_at=3), None, None)


def test_an_old_answer_is_told_to_be_old():
    status = live_status(JobEntry("1", "RUNNING", 0, "", "n1"), "squeue did not answer")

    assert status.message == "runs on n1 (last known; squeue did not answer)"
    assert status.source == "squeue of before: RUNNING"
