"""What a Slurm job's script writes when none of its ranks has said anything."""

import pytest
from tiny_stages.calls import new_attempt

from redco_flow.launch.slurm.job_end import main


@pytest.fixture
def attempt(tmp_path):
    return new_attempt(tmp_path / "workspace")


def end(attempt, srun_exit_code=1):
    options = ["--num-processes", "2", "--srun-exit-code", str(srun_exit_code)]
    assert main([str(attempt.path), *options]) == 1
    return attempt.read_exit()


UNREACHABLE = "srun: error: Unable to confirm allocation for job 7: Unable to contact controller"


@pytest.mark.parametrize(
    ("log", "why"), [("", ""), (f"{UNREACHABLE}\nsrun: Check it\n", f" ({UNREACHABLE})")]
)
def test_ranks_that_could_not_be_started_are_a_failure_with_what_srun_said(attempt, log, why):
    attempt.logs.mkdir()
    (attempt.logs / "slurm.log").write_text(log)

    record = end(attempt)

    assert record.cause == "failed"
    assert record.message == f"no rank started, srun ended with 1{why}; see logs/slurm.log."


def test_a_rank_whose_supervisor_was_killed_has_begun(attempt):
    attempt.logs.mkdir()
    attempt.log_path(0).touch()

    killed = "srun ended with 137 (a process was killed by SIGKILL); see logs/slurm.log."
    assert end(attempt, 137).message == f"no rank left a record of its end, {killed}"


def test_a_job_that_is_cancelled_before_its_ranks_start_is_cancelled(attempt):
    """Between the script's first line and srun's: srun then finds the job gone."""
    attempt.cancel_path.write_text("{}")

    assert end(attempt).cause == "cancelled"
