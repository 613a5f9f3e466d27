"""Runs that promote a checkpoint, and runs that take a promoted one."""

import json

import pytest

from redco_flow.cli.main import run_command
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import PIPELINE, Command

pytestmark = pytest.mark.slow

PROMOTING = PIPELINE + "  promote: {alias: best}\n"
IF_BETTER = 'stages.promote.conditions=["total > best"]'
READING = """\
name: reading
stages:
  reread: {kind: orchestrate_kinds.reread, checkpoint: "@sums/production"}
"""


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A command, a run that promotes its checkpoint, and one that asks whether to."""
    folder = tmp_path_factory.mktemp("promoting")
    (folder / "sums.yaml").write_text(PROMOTING)
    command = Command(folder)
    first = command.json("run", "sums.yaml")
    return command, first, command.json("run", "sums.yaml", "learning_rate=3.0", IF_BETTER)


@pytest.fixture
def say(two_runs, capsys, monkeypatch):
    """Run a verb in this process, beside the runs; return what it prints."""
    monkeypatch.chdir(two_runs[0].folder)

    def say(*words):
        assert run_command(words) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return say


def test_a_pipeline_ends_with_a_promotion_and_one_that_is_refused_is_no_failure(two_runs, say):
    command, first, second = two_runs

    [event] = AliasStore(Workspace(command.folder / "redco-workspace")).get("@sums/best").history

    assert event.checkpoint == first["stages"]["total"]["artifacts"]["checkpoint"]
    assert event.reason == f"by stage promote of run {first['run']}"
    assert f"@sums/best names checkpoint {event.checkpoint[:12]}" in say("status", first["run"])
    assert second["state"] == "completed"
    assert "not promoted: the checkpoint" in say("status", second["run"])
    assert "has no score 'total' (it was never evaluated)" in say("status", second["run"])


def test_a_run_takes_the_checkpoint_that_is_promoted_then_and_says_by_which_alias(two_runs, say):
    command, first, second = two_runs
    (command.folder / "reading.yaml").write_text(READING)
    one = first["stages"]["total"]["artifacts"]["checkpoint"]

    say("promote", f"{first['run']}/total", "--as", "production")
    done = command.json("run", "reading.yaml")

    assert done["metrics"]["reread/reread"] == first["metrics"]["total"]
    run = RunDirectory(command.folder / "redco-workspace" / "runs" / done["run"])
    assert f"@sums/production@{one}" in run.resolved_path.read_text()
    [pin] = json.loads(run.plan_path.read_text())["aliases"]
    assert (pin["alias"], pin["checkpoint"]) == ("@sums/production", one)
    [taken] = run.attempt("reread", 1).read_call()["inputs"]["checkpoint"]
    assert (taken["stage"], taken["id"]) == ("@sums/production", one)
    assert f"@sums/production is checkpoint {one[:12]}" in say("plan", "reading.yaml")

    def action():
        return json.loads(say("plan", "reading.yaml", "--json"))["stages"]["reread"]["action"]

    assert action() == "reuse"
    say("promote", f"{second['run']}/total", "--as", "production")
    assert action() == "run"
    assert "is @sums/production: promoted by" in say("why", "@production")
    say("rollback", "@sums/production")
    assert action() == "reuse"
    assert f"checkpoint {one[:12]} (@sums/best, @sums/production)" in say("status", first["run"])
