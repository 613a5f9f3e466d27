"""Prefect's database takes no writes: another program has locked it, or the disk is read-only."""

import sqlite3
import subprocess

import pytest
from orchestrate_api import Api
from orchestrate_runs import TWO_STAGES, until, wait_for_end, wait_for_stage

from redco_flow.orchestrate.prefect.server import prefect_directory

pytestmark = pytest.mark.slow


def lock():
    """Take the database as a backup program would; what is returned ends that."""
    connection = sqlite3.connect(prefect_directory() / "prefect.db", timeout=300)
    connection.execute("begin exclusive")
    return connection.close


def freeze():
    """Let the database take no more, not even from who has it open; what is returned ends that."""
    reader = sqlite3.connect(prefect_directory() / "prefect.db", timeout=300)
    reader.execute("select count(*) from sqlite_master")  # so that there is a log to freeze
    done = change("+i")
    if "not permitted" in done.stderr or "not supported" in done.stderr:
        pytest.skip(f"files cannot be made immutable here: {done.stderr.strip()}")
    done.check_returncode()

    def thaw():
        change("-i").check_returncode()
        reader.close()

    return thaw


def change(flag):
    # Not SQLite's shared memory beside them: a write into that would kill the server.
    paths = [prefect_directory() / name for name in ("prefect.db", "prefect.db-wal")]
    return subprocess.run(["chattr", flag, *paths], capture_output=True, text=True)


@pytest.fixture(params=[lock, freeze], ids=["locked", "read-only"])
def close_database(request, prefect_server):
    """Close it to every write; what is returned opens it again, as does the test's end."""
    opens = []

    def close():
        opens.append(request.param())
        return opens[-1]

    yield close
    for open_again in opens:
        open_again()


def test_a_database_that_is_unwritable_while_a_run_ends_has_the_end_once_it_can_be_written(
    runs, prefect_server, close_database, tmp_path
):
    """Fault 16: the write is retried for some seconds, then reported, and the stages go on or
    nothing is started.
    """
    run = runs.start(TWO_STAGES, [f"train.gate={tmp_path / 'gate'}"])
    wait_for_stage(run, "train")
    api = Api(prefect_server)
    api.running_flow_run_of(run)

    open_again = close_database()
    (tmp_path / "gate").touch()
    state = wait_for_end(run)
    open_again()

    assert state["state"] == "completed"
    until(lambda: api.flow_run_of(run)["state"]["type"] == "COMPLETED", seconds=400)


def test_a_database_that_is_unwritable_when_a_run_begins_costs_seconds_and_the_page(
    runs, close_database, tmp_path
):
    """Fault 16: tried again, then told, and the stages go on."""
    close_database()

    run = runs.start(TWO_STAGES, [f"train.gate={tmp_path / 'gate'}"])
    # Whether the server's health page still answers depends on what its database last did.
    words = ("its database may be locked, read-only or full", "no answer from the Prefect API at")
    until(lambda: any(one in run.log_path.read_text() for one in words), seconds=400)
    (tmp_path / "gate").touch()
    state = wait_for_end(run)

    assert state["state"] == "completed"
    assert state.get("prefect_url") is None
