"""The contract of executors, held by jobs of XManager's local backend."""

import pytest
from tiny_stages.contract import ExecutorContract


@pytest.mark.cluster
@pytest.mark.slow
class TestXManager(ExecutorContract):
    """Jobs of XManager's."""
