"""The verb drill on this machine: a real training, really killed."""

import json
import os

import pytest

from redco_flow.launch.processes import FAULTS

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.slow
def test_a_killed_training_is_reported_as_survived_bitwise(command, compile_cache):
    # The drill's own flags replace the tests', whose cheap compiling is enough here too.
    profile = {"executor": "local", "environment": {"XLA_FLAGS": os.environ["XLA_FLAGS"]}}
    (command.folder / "cheap.yaml").write_text(json.dumps(profile))

    (kill,) = command.json("drill", "-p", "cheap.yaml", "--fault", "kill", timeout=1400)

    assert (kill["fault"], kill["survived"]) == ("kill", True)
    assert kill["how"] == "a new attempt after: failed"
    (log,) = command.folder.glob("redco-workspace/drills/*/kill/runs/*/stages/train/attempts/2")
    assert log.is_dir()


def test_an_unknown_fault_is_refused_before_anything_runs(command):
    said = command("drill", "--fault", "flood", code=2)

    assert "no such fault: flood; known: preempt, kill, stall, timeout." in said
    assert not list(command.folder.glob("redco-workspace/drills/*/*"))


def test_the_recipe_knows_every_fault():
    assert list(FAULTS) == ["preempt", "kill", "stall", "timeout"]
