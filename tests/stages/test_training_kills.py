"""A trainer that is killed again and again, at random moments: what it ends with and tells."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import jax
import numpy as np
import pytest
from stage_kinds import preprocess

from redco_flow.engine.deployer import Deployer
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact

# Some seconds each; 20 over 306 steps were seen to hold too.
NUM_KILLS = 1
NUM_EPOCHS = 2
NUM_STEPS = 9 * NUM_EPOCHS
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [(f"{a} {b} {c}", f"{c} {b} {a}") for a in WORDS[:4] for b in WORDS for c in WORDS[:3]]
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.1}
RECIPE = {"recipe": "language_modeling"}
SETTINGS = RECIPE | {
    "model": {"family": "gpt2", "config": TINY},
    "num_epochs": NUM_EPOCHS,
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "keep": {"last": 1, "best": ["eval_loss"]},
    "eval": {"num_examples": 8},
    "save_every_steps": 4,
    "log_every_steps": 1,
}

SCRIPT = """
# Fork a trainer and kill it when it has logged some steps, again and again; then let one finish.
# The same in another folder, without kills and without a disk of the node.
import json, os, random, signal, sys, time, traceback
from pathlib import Path
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.run import run
from redco_flow.launch.call import JobStaging
from redco_flow.runtime.context import InputArtifact, StageContext
from redco_flow.runtime.staging import staged
from redco_flow.tracking.attempt import AttemptDirectory
import redco_flow.recipes.language_modeling.run  # what each trainer imports is imported once
from transformers import AutoTokenizer, PreTrainedTokenizerFast

root, num_kills = Path(sys.argv[1]), int(sys.argv[2])
settings, dataset = map(json.loads, sys.argv[3:])
chance = random.Random(num_kills)

def run_attempt(folder, directory):
    context = StageContext(
        run="run",
        stage="train",
        fingerprint="f" * 64,
        inputs={"dataset": (InputArtifact(**dataset | {"path": Path(dataset["path"])}),)},
        work_dir=folder / "work",
        attempt_dir=AttemptDirectory(directory),
    )
    disk = folder / "disk"
    staging = JobStaging(str(disk), inputs=True, checkpoints=True) if disk.is_dir() else None
    with staged(context, staging):
        run(context, Config.from_json(settings))

def start(folder, number):
    directory = folder / "attempts" / str(number)
    directory.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        try:
            run_attempt(folder, directory)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child, directory / "metrics.jsonl"

def num_records(path):
    return path.read_bytes().count(b'"training"') if path.exists() else 0

def finish(folder, number):
    last, _ = start(folder, number)
    assert os.waitstatus_to_exitcode(os.waitpid(last, 0)[1]) == 0

(root / "killed" / "disk").mkdir(parents=True)
for number in range(1, num_kills + 1):
    child, metrics = start(root / "killed", number)
    num_steps = 1 + chance.randrange(6)
    while num_records(metrics) < num_steps:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
finish(root / "killed", num_kills + 1)
finish(root / "whole", 1)
"""


def train_and_kill(bench, write_rows):
    """Train in a folder with kills and in one without; return both."""
    path = write_rows(bench.root / "rows.jsonl", ROWS)
    data = {
        "train": str(path),
        "tokenizer": {"train": {"vocab_size": 290, "type": "bpe"}},
        "validation_fraction": 0.25,
    }
    lengths = {"max_source_length": 8, "max_target_length": 8}
    dataset = bench.run(preprocess, RECIPE | {"data": data, **lengths})["dataset"]
    given = {"id": dataset.id, "kind": dataset.kind, "path": str(dataset.path)}
    arguments = [json.dumps(SETTINGS), json.dumps({**given, "manifest": dict(dataset.manifest)})]
    one_device = re.sub("(device_count)=8", r"\1=1", os.environ["XLA_FLAGS"])
    environment = os.environ | {"XLA_FLAGS": one_device}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, bench.root, str(NUM_KILLS), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return bench.root / "whole", bench.root / "killed"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_trainer_killed_at_random_steps_ends_bitwise_as_one_that_never_was(bench, write_rows):
    """Fault 1: training resumes exactly from its last checkpoint; no step is repeated or missing in
    the metrics. Nothing of it is on the node's disk alone.
    """
    whole, killed = train_and_kill(bench, write_rows)

    expected, found = parameters_of(whole), parameters_of(killed)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    attempts = [steps_of(killed, number) for number in range(1, NUM_KILLS + 2)]
    for steps in attempts:  # no step twice, none left out
        assert list(steps) == list(range(min(steps), max(steps) + 1))
    for before, after in pairwise(attempts):  # each goes on from a save, and repeats what was lost
        assert min(before) <= min(after) <= max(before) + 1
    told = {step: loss for steps in attempts for step, loss in steps.items()}
    assert told == steps_of(whole, 1)
    assert list(told) == list(range(1, NUM_STEPS + 1))
    assert list((killed / "disk").iterdir()) == []


def steps_of(folder, number):
    """Loss by step, in the order in which an attempt logged them."""
    lines = (folder / "attempts" / str(number) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "training"]
    steps = {record["step"]: record["loss"] for record in records}
    assert len(steps) == len(records)
    return steps


def parameters_of(folder):
    """The last checkpoint's arrays by path."""
    checkpoint = CheckpointArtifact(folder / "work/outputs/checkpoint-last")
    params = checkpoint.load_params(checkpoint.build_recipe(), Deployer())
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)
    }
