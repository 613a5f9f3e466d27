"""A whole run on a GPU: every stage, what `status` names, and going on from a checkpoint."""

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.gpu

SMALL = (
    "data.max_examples=4000",
    "train.num_epochs=2",
    "train.save_every_steps=20",
    "model.dtype=bfloat16",
    "predict.num_examples=64",
)


@pytest.fixture
def redco_flow(tmp_path):
    """Start the command line on the GPU, in a folder of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}

    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def answer(process):
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    return out


def test_a_run_names_the_gpu_that_it_computes_on_and_goes_on_after_a_cancel(redco_flow, tmp_path):
    stopped = redco_flow("run", "quickstart.yaml", *SMALL, "--json")
    while not list(tmp_path.glob("**/commit.json")):
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.2)
    answer(redco_flow("cancel", "@last"))
    stopped.communicate()

    result = json.loads(answer(redco_flow("resume", "@last", "--json")))

    stages = json.loads(answer(redco_flow("status", "--json")))["stages"]
    log = answer(redco_flow("logs", "@last"))
    assert result["state"] == "completed"
    assert "NVIDIA" in stages["train"]["devices"]
    assert "NVIDIA" in stages["predict"]["devices"]
    assert "checkpoint restored; training resumes from it" in log
