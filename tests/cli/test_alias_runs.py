"""Runs that take a promoted checkpoint, and runs that promote one."""

import json

import pytest

from redco_flow.cli.main import run_command
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import PIPELINE

pytestmark = pytest.mark.slow

READING = """\
name: reading
stages:
  reread: {kind: orchestrate_kinds.reread, checkpoint: "@sums/production"}
"""
PROMOTING = PIPELINE.replace("sums", "adding") + "  promote: {alias: best}\n"


@pytest.fixture
def say(finished, capsys, monkeypatch):
    """Run a verb in this process, beside the runs; return what it prints."""
    command, _ = finished
    monkeypatch.chdir(command.folder)

    def say(*words):
        assert run_command(words) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return say


def test_a_run_takes_the_checkpoint_that_is_promoted_then_and_says_by_which_alias(finished, say):
    command, first = finished
    second = command.json("run", "sums.yaml", "learning_rate=3.0")
    (command.folder / "reading.yaml").write_text(READING)
    one = first["stages"]["total"]["artifacts"]["checkpoint"]

    say("promote", f"{first['run']}/total", "--as", "production")
    done = command.json("run", "reading.yaml")

    assert done["metrics"]["reread"] == first["metrics"]["total"]
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
    assert f"checkpoint {one[:12]} (@sums/production)" in say("status", first["run"])


def test_a_pipeline_ends_with_a_promotion_and_one_that_is_refused_is_no_failure(finished, say):
    command, _ = finished
    (command.folder / "adding.yaml").write_text(PROMOTING)
    aliases = AliasStore(Workspace(command.folder / "redco-workspace"))

    done = command.json("run", "adding.yaml")
    better = 'stages.promote.conditions=["total > best"]'
    refused = command.json("run", "adding.yaml", "learning_rate=4.0", better)

    [event] = aliases.get("@adding/best").history
    assert event.checkpoint == done["stages"]["total"]["artifacts"]["checkpoint"]
    assert event.reason == f"by stage promote of run {done['run']}"
    assert f"@adding/best names checkpoint {event.checkpoint[:12]}" in say("status", done["run"])
    assert refused["state"] == "completed"
    assert "not promoted: the checkpoint" in say("status", refused["run"])
    assert "has no score 'total' (it was never evaluated)" in say("status", refused["run"])
