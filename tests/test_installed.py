"""The package as installed, from a directory that is no checkout."""

import json
import os
import re
import subprocess
import sys

import pytest

SMALL = (
    "data.max_examples=300",
    "train.num_epochs=1",
    "train.eval.num_examples=8",
    "predict.num_examples=16",
)


@pytest.mark.slow
def test_the_bundled_quickstart_runs_from_any_directory(tmp_path):
    words = [sys.executable, "-m", "redco_flow.cli.main"]
    environment = {**os.environ, "REDCO_FLOW_HOME": str(tmp_path / "home")}

    def redco_flow(*more):
        done = subprocess.run(
            [*words, *more], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        result = json.loads(redco_flow("run", "quickstart.yaml", *SMALL, "--json"))
        why = redco_flow("why", "exact_match")
        status = json.loads(redco_flow("status", "--json"))
        log = redco_flow("logs", "@last")
    finally:
        redco_flow("ui", "--stop")

    assert result["state"] == "completed"
    assert list(result["stages"]) == ["preprocess", "train", "predict", "evaluate"]
    assert 0.0 <= result["metrics"]["exact_match"] <= 1.0
    assert "checkpoint" in why
    assert "data " in why
    assert status["report"] is not None
    assert status["stages"]["train"]["devices"] == "cpu"
    for line in ("step 1/", "val/eval_loss", "checkpoint committed"):
        assert line in log
    # How many of the rows are test data depends on the Python, whose library the rows are made of.
    assert re.search(r"(?m)^predict \| predicted (\d+)/\1 rows", log)
