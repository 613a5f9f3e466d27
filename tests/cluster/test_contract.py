"""The contract of executors, held by jobs on a real Slurm cluster."""

import pytest
from tiny_stages.contract import ExecutorContract


@pytest.mark.cluster
@pytest.mark.slow
class TestSlurm(ExecutorContract):
    """Jobs of a Slurm cluster, of a user whose own defaults for Slurm's commands hide them."""

    @pytest.fixture(autouse=True)
    def _defaults_of_commands(self, slurm):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SQUEUE_PARTITION", "high")  # jobs are in "main"
            patch.setenv("SCANCEL_STATE", "PENDING")
            yield

    def test_a_job_that_is_killed_whole_is_known_to_have_failed(self, slurm, submit, attempt_of):
        """Fault 11: neither an exit record nor sacct, only squeue."""
        with pytest.raises(RuntimeError, match=r"(?i)accounting"):
            slurm.run("sacct")
        job = submit("hang")

        super().test_a_job_that_is_killed_whole_is_known_to_have_failed(
            lambda action: job, attempt_of
        )

        assert job.state == "FAILED", job.status()
        assert "Slurm says" in job.status().message
