"""Deleting by the verbs, in a workspace of real runs."""

import json
import shutil

import pytest

from redco_flow.cli.main import run_command
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import list_runs
from redco_flow.tracking.workspace import Workspace

from .conftest import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def here(command, capsys):
    """A verb in this process: what it prints."""

    def run_verb(*words, code=0):
        assert run_command([*words, "-w", str(command.folder / "redco-workspace")]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out + printed.err

    return run_verb


def test_deleted_bytes_are_reported_and_made_again_with_the_same_id(finished, command, here):
    shutil.copytree(finished[0].folder, command.folder, dirs_exist_ok=True)
    made = finished[1]["stages"]["total"]["artifacts"]["checkpoint"]

    assert "nothing was deleted: give one" in here("gc")
    planned, deleted = (
        json.loads(here("rm", "@last", "--json", *more)) for more in (["--dry-run"], [])
    )

    assert {**deleted, "problems": planned["problems"]} == planned
    assert "work that no other run has, and logs: deleted 20" in here("status")
    assert f"artifact checkpoint {made[:12]}  deleted 20" in here("why", made)
    assert "total: completed, no log (deleted 20" in here("logs")
    assert "completed (deleted)" in here("ls", "--size")
    assert "0 of 0 artifacts are whole" in here("verify")
    error = here("export", "total", str(command.folder / "out"), code=1)
    assert f"checkpoint {made[:12]} was deleted 20" in error
    assert "`redco-flow run sums.yaml --json`" in error
    assert "dataset deleted 20" in command("plan", "sums.yaml")
    assert command.json("run", "sums.yaml")["stages"]["total"]["artifacts"]["checkpoint"] == made
    assert "3 of 3 artifacts are whole" in here("verify")


def test_a_running_run_is_not_deleted(command, here):
    gate = command.folder / "gate"
    process = command.start("run", "sums.yaml", f"numbers.gate={gate}", "--json")
    workspace = Workspace(command.folder / "redco-workspace")
    (run,) = wait_for(lambda: [one for one in list_runs(workspace) if find_holder(one)])

    refused = here("rm", "@last", code=2)
    here("gc", "--keep-last", "0", "--older-than", "1s", "--unreferenced")

    assert f"run {run.id} is driven by process" in refused
    gate.touch()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert json.loads(out.splitlines()[-1])["state"] == "completed"
