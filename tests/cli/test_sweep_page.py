"""A sweep at a real Prefect server: one flow run, with the flow runs of its points below it."""

import json
import os
import signal

import pytest
from orchestrate_api import Api

from tests.cli.conftest import Command, wait_for
from tests.cli.test_sweep import GATED, states, status

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path, prefect_server):
    """A sweep of three points, of which two run and wait for the file `gate`."""
    (tmp_path / "sums.yaml").write_text(GATED.format(folder=tmp_path, gate="gate"))
    command = Command(tmp_path)
    words = ["run", "sums.yaml", "--sweep", "learning_rate=1.0,2.0,3.0", "--max-parallel", "2"]
    return command, command(*words, "--detach").strip()


@pytest.fixture
def api(prefect_server):
    return Api(prefect_server)


def flow_runs(api, name):
    return api.ask("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})


def points_below(api, flow_run):
    """The state of each subflow run and of its task run in the parent, by the name of the point."""
    below = {"parent_flow_run_id": {"any_": [flow_run["id"]]}}
    runs = api.ask("/flow_runs/filter", flow_runs=below)
    of_parent = {"id": {"any_": [flow_run["id"]]}}
    tasks = {one["id"]: one for one in api.ask("/task_runs/filter", flow_runs=of_parent)}
    return {
        one["name"]: (one["state"]["type"], tasks[one["parent_task_run_id"]]["state"]["type"])
        for one in runs
        if one["state"]["type"] != "CRASHED"
    }


def test_a_killed_and_resumed_sweep_has_one_flow_run_with_all_points_below_it(sweep, api):
    command, name = sweep
    [of_sweep] = wait_for(lambda: flow_runs(api, name))
    running = ("RUNNING", "RUNNING")
    wait_for(lambda: list(points_below(api, of_sweep).values()) == [running, running])
    lease = command.folder / "redco-workspace" / "sweeps" / name / "lease.json"

    os.kill(json.loads(lease.read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: status(command, name)["state"] == "interrupted")
    (command.folder / "gate").touch()
    view = command.json("resume", name)

    done = ("COMPLETED", "COMPLETED")
    wait_for(lambda: points_below(api, of_sweep) == {one["run"]: done for one in view["points"]})
    wait_for(lambda: flow_runs(api, name)[0]["state"]["type"] == "COMPLETED")
    [again] = flow_runs(api, name)
    assert again["id"] == of_sweep["id"]
    assert again["state"]["message"] == "3 completed"


def test_cancelling_a_sweep_on_its_page_cancels_running_and_waiting_points(sweep, api):
    command, name = sweep
    [of_sweep] = wait_for(lambda: flow_runs(api, name))

    api.cancel(of_sweep)

    wait_for(lambda: states(status(command, name)) == ["cancelled"] * 3)
    wait_for(lambda: flow_runs(api, name)[0]["state"]["type"] == "CANCELLED")
    assert flow_runs(api, name)[0]["state"]["message"] == "3 cancelled"
