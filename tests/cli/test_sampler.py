"""`redco-flow run --sweep … --sampler tpe` as a person uses it."""

import json
import os
import signal

import pytest

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'redco-flow[optuna]'")

from redco_flow.orchestrate.sweep.optuna_sampler import suggest
from redco_flow.spec.sweep_points import Trial, read_space
from tests.cli.conftest import wait_for

pytestmark = pytest.mark.slow

PIPELINE = """\
name: descents
stages:
  train: {{kind: orchestrate_kinds.descent, folder: {folder}}}
"""
SETTING = "loss=loguniform(0.1,10)"
SWEEP = ("run", "descents.yaml", "--sweep", SETTING, "--num-samples", "4", "--sampler", "tpe",
         "--stop-early", "val/loss", "--min-steps", "1", "--reduction-factor", "2",
         "--max-parallel", "1")  # fmt: skip
TOLD = {"completed": "complete", "stopped_early": "pruned"}


def test_a_sweep_is_killed_while_a_point_runs_and_resumed_with_the_points_that_follow(command):
    folder = command.folder
    (folder / "descents.yaml").write_text(PIPELINE.format(folder=folder))
    planned = command(*SWEEP, "--dry-run")
    assert "4 points, at most 1 at a time, by tpe for the lowest train/val/loss" in planned
    assert SETTING in planned
    assert not (folder / "redco-workspace" / "sweeps").exists()

    sweep = command(*SWEEP, "--detach").strip()
    files = folder / "redco-workspace" / "sweeps" / sweep
    wait_for(lambda: list(folder.glob("from-0-*")))
    os.kill(json.loads((files / "lease.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: command.json("status", sweep)["state"] == "interrupted")
    (first,) = command.json("status", sweep)["points"]
    (folder / "go").touch()
    view = json.loads(command("resume", sweep, "--json").splitlines()[-1])

    assert (view["state"], view["num_open"], len(view["points"])) == ("completed", 0, 4)
    assert view["points"][0]["run"] == first["run"]
    assert len(list((folder / "redco-workspace" / "runs").iterdir())) == 4
    assert len(list(folder.glob("from-*"))) == 4  # each point began once, and none went back
    told = [(one["point"], TOLD[one["state"]], *last_value(folder, one)) for one in view["points"]]
    assert [one["metrics"]["train/val/loss"] for one in view["points"]] == [one[2] for one in told]
    for number, (point, *_) in enumerate(told):
        trials = [Trial(*one) for one in told[:number]]
        assert list(suggest(read_space([SETTING]), trials, seed=0, mode="min")) == point
    assert "nothing to resume" in command("resume", sweep, code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep", "reread.resources.cpus_per_host=1,2", "--num-samples", "4"), "one training"),
        (("--until", "numbers", "--num-samples", "4"), "leaves it out"),
        (("--num-samples", "1"), "this sweep has one"),
    ],
)
def test_points_that_could_not_be_compared_are_refused(command, words, said):
    stages = (
        "  numbers: {kind: orchestrate_kinds.numbers}\n  reread: {kind: orchestrate_kinds.reread}\n"
    )
    (command.folder / "descents.yaml").write_text(PIPELINE.format(folder="here") + stages)

    assert said in command(*SWEEP[:4], *SWEEP[6:], *words, "--dry-run", code=2)


def last_value(folder, point):
    """The value that a point's training has logged last, and the step."""
    (log,) = (folder / "redco-workspace" / "runs" / point["run"]).rglob("metrics.jsonl")
    last = json.loads(log.read_text().splitlines()[-1])
    return last["metrics"]["loss"], last["step"]
