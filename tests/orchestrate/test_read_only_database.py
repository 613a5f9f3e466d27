"""Prefect's database, which takes no more writes: the disk has become read-only under it."""

import subprocess

import pytest
from orchestrate_api import Api
from orchestrate_runs import TWO_STAGES, events, until, wait_for_end, wait_for_stage

from redco_flow.orchestrate.prefect_server import prefect_directory

pytestmark = pytest.mark.slow


@pytest.fixture
def freeze(prefect_server):
    """Let the database take no more, not even from who has it open; what is returned ends that."""

    def change(flag):
        # Not SQLite's shared memory beside them: a write into that would kill the server.
        paths = [prefect_directory() / name for name in ("prefect.db", "prefect.db-wal")]
        return subprocess.run(["chattr", flag, *paths], capture_output=True, text=True)

    def freeze():
        done = change("+i")
        if done.returncode != 0:
            pytest.skip(f"files cannot be made immutable here: {done.stderr.strip()}")
        return lambda: change("-i").check_returncode()

    yield freeze
    change("-i")


def test_a_database_that_became_read_only_while_a_run_went_on_has_the_end_once_it_is_writable(
    runs, prefect_server, freeze, tmp_path
):
    """Fault 16."""
    run = runs.start(TWO_STAGES, [f"train.gate={tmp_path / 'gate'}"])
    wait_for_stage(run, "train")

    thaw = freeze()
    (tmp_path / "gate").touch()
    state = wait_for_end(run, seconds=30)
    thaw()

    assert state["state"] == "completed"
    api = Api(prefect_server)
    until(lambda: api.flow_run_of(run)["state"]["type"] == "COMPLETED", seconds=120)


def test_a_database_that_is_read_only_when_a_run_begins_costs_seconds_and_the_page(runs, freeze):
    """Fault 16: tried again, then told, and the stages go on."""
    freeze()

    run = runs.start(TWO_STAGES)
    state = wait_for_end(run)

    assert state["state"] == "completed"
    assert state.get("prefect_url") is None
    assert "flow_lost" in events(run)
    log = run.log_path.read_text()
    assert "does not take this run" in log
    assert "its database may be locked, read-only or full" in log
