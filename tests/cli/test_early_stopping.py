"""`redco-flow run --sweep … --stop-early METRIC` as a person uses it."""

import json
import os
import signal

import pytest

from tests.cli.conftest import wait_for

pytestmark = pytest.mark.slow

PIPELINE = """\
name: descents
stages:
  train: {{kind: orchestrate_kinds.descent, folder: {folder}}}
  reread: {{kind: orchestrate_kinds.reread}}
"""
SWEEP = ("run", "descents.yaml", "--sweep", "loss=1.0,3.0,0.5")
EARLY = ("--stop-early", "val/loss", "--min-steps", "1", "--reduction-factor", "2")


@pytest.fixture
def descents(command):
    """Trainings one after the other: the first continues, the second does not, the third does."""
    (command.folder / "descents.yaml").write_text(PIPELINE.format(folder=command.folder))
    for name in ("go-1.0", "go-0.5", "hold"):
        (command.folder / name).touch()
    return command


def test_a_point_that_is_not_among_the_best_is_stopped_once_and_can_be_continued(descents):
    folder = descents.folder
    sweep = descents(*SWEEP, *EARLY, "--max-parallel", "1", "--detach").strip()
    files = folder / "redco-workspace" / "sweeps" / sweep

    # The process is killed after the decision, and the training ends without it.
    wait_for((folder / "stopping").exists)
    os.kill(json.loads((files / "lease.json").read_text())["pid"], signal.SIGKILL)
    (folder / "hold").unlink()
    view = json.loads(descents("resume", sweep, "--json").splitlines()[-1])

    states = [point["state"] for point in view["points"]]
    assert states == ["completed", "stopped_early", "completed"]
    assert view["state"] == "completed"
    stopped = view["points"][1]
    why = "stopped early at step 1: val/loss 3 is not among the best 1 of 2 at rung 0 (cutoff 1)"
    assert stopped["message"] == why
    text = descents("status", sweep)
    assert "2 of 3 points completed, 1 stopped early" in text
    assert why in text
    assert why in (files / "report.html").read_text(encoding="utf-8")
    stages = descents.json("status", stopped["run"])["stages"]
    assert {name: stage["state"] for name, stage in stages.items()} == {
        "train": "stopped_early", "reread": "skipped",
    }  # fmt: skip
    lines = (files / "early_stopping.jsonl").read_text().splitlines()
    judged = [(one["run"], one["rung"]) for one in map(json.loads, lines)]
    assert len(judged) == len(set(judged)) == 7  # rungs at 1, 2 and 4 steps
    assert "nothing to resume" in descents("resume", sweep, code=2)

    (folder / "go-3.0").touch()
    continued = descents.json("resume", stopped["run"])

    assert continued["state"] == "completed"
    assert continued["metrics"]["reread/reread"] == 4
    assert (folder / "from-0-3.0").exists()
    assert (folder / "from-1-3.0").exists()


def test_early_stopping_is_refused_without_its_options_and_without_a_sweep(descents):
    assert "needs --min-steps N" in descents(*SWEEP, "--stop-early", "val/loss", code=2)
    assert "--min-steps is for --stop-early" in descents(*SWEEP, "--min-steps", "1", code=2)
    assert "--stop-early is for a sweep" in descents("run", "descents.yaml", *EARLY, code=2)
    assert not list((descents.folder / "redco-workspace" / "runs").glob("*"))
