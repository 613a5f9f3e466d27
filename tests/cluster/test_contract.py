"""The contract of executors, held by jobs on a real Slurm cluster."""

import pytest
from tiny_stages.contract import ExecutorContract


@pytest.mark.cluster
@pytest.mark.slow
class TestSlurm(ExecutorContract):
    """Jobs of a Slurm cluster."""
