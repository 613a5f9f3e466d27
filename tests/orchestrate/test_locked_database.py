"""Prefect's database, locked by another program for longer than anybody waits."""

import sqlite3

import pytest
from orchestrate_api import Api
from orchestrate_runs import TWO_STAGES, events, until, wait_for_end, wait_for_stage

from redco_flow.orchestrate.prefect_server import prefect_directory

pytestmark = pytest.mark.slow


@pytest.fixture
def lock(prefect_server):
    """Take the database as a backup program would; what is returned ends that when closed."""
    connections = []

    def lock():
        connection = sqlite3.connect(prefect_directory() / "prefect.db", timeout=30)
        connection.execute("begin exclusive")
        connections.append(connection)
        return connection

    yield lock
    for connection in connections:
        connection.close()


def test_a_database_that_is_locked_while_a_run_ends_has_the_end_once_it_is_free(
    runs, prefect_server, lock, tmp_path
):
    """Fault 16."""
    run = runs.start(TWO_STAGES, [f"train.gate={tmp_path / 'gate'}"])
    wait_for_stage(run, "train")

    locked = lock()
    (tmp_path / "gate").touch()
    state = wait_for_end(run, seconds=30)
    locked.close()

    assert state["state"] == "completed"
    api = Api(prefect_server)
    until(lambda: api.flow_run_of(run)["state"]["type"] == "COMPLETED", seconds=120)


def test_a_database_that_is_locked_when_a_run_begins_costs_seconds_and_the_page(runs, lock):
    """Fault 16: tried again, then told, and the stages go on."""
    lock()

    run = runs.start(TWO_STAGES)
    state = wait_for_end(run)

    assert state["state"] == "completed"
    assert state.get("prefect_url") is None
    assert "flow_lost" in events(run)
    log = run.log_path.read_text()
    assert "does not take this run" in log
    assert "its database may be locked" in log
