"""Real runs: tiny stage kinds of our own, real processes, one real Prefect server."""

import os
import sys
from pathlib import Path

import pytest

KINDS = Path(__file__).parent / "kinds"
sys.path.append(str(KINDS))  # jobs and launchers search where this process does

from orchestrate_runs import Runs  # noqa: E402

from redco_flow.orchestrate.prefect_server import ensure_server, stop_server  # noqa: E402


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory):
    """REDCO_FLOW_HOME of this session's Prefect server."""
    before = os.environ.get("REDCO_FLOW_HOME")
    home = tmp_path_factory.mktemp("redco-flow-home")
    os.environ["REDCO_FLOW_HOME"] = str(home)
    os.environ.pop("PREFECT_API_URL", None)
    yield home
    stop_server(grace_seconds=5.0)
    if before is None:
        del os.environ["REDCO_FLOW_HOME"]
    else:
        os.environ["REDCO_FLOW_HOME"] = before


@pytest.fixture(scope="session")
def prefect_server(prefect_home):
    """A real Prefect server that all tests share; its API's address."""
    return ensure_server()


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
