"""Real runs: tiny stage kinds of our own, real processes, one real Prefect server."""

import sys
from pathlib import Path

import pytest

KINDS = Path(__file__).parent / "kinds"
sys.path.append(str(KINDS))  # jobs and launchers search where this process does

from orchestrate_runs import Runs  # noqa: E402


@pytest.fixture
def planning(tmp_path):
    """Runs that are planned, or driven by the test itself: no Prefect server."""
    runs = Runs(tmp_path)
    yield runs
    runs.clean_up()


@pytest.fixture
def runs(tmp_path, prefect_server):
    """Runs with the shared server; nothing of them outlives the test."""
    runs = Runs(tmp_path)
    yield runs
    runs.clean_up()
