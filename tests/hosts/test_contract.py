"""The contract of executors, held by jobs on hosts behind a real sshd, without a shared disk."""

import pytest
from tiny_stages.contract import ExecutorContract


@pytest.mark.cluster
@pytest.mark.slow
class TestHosts(ExecutorContract):
    """Jobs on bare hosts."""
