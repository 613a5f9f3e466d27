"""What is killed goes on: the command line as a person uses it, real processes, `kill -9`."""

import json
import random
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Command, wait_for

pytestmark = pytest.mark.slow

PIPELINE = """\
name: survival
recipe: text_to_text
model: {family: t5, config: {d_model: 64, d_kv: 16, num_heads: 4, d_ff: 128, num_layers: 1}}
data:
  dataset: rows.jsonl
  source_key: source
  target_key: target
  validation_fraction: 0.1
  tokenizer: {train: {vocab_size: 270, type: bpe}}
stages:
  preprocess: {max_source_length: 24, max_target_length: 24}
  train:
    num_epochs: 2
    global_batch_size: 8
    learning_rate: 1e-3
    dropout_rate: 0.1
    save_every_steps: 10
    eval: {num_examples: 8}
"""


@pytest.mark.covers("a pipeline", family="t5", recipe="text_to_text", executor="local")
def test_a_trainer_killed_in_mid_epoch_resumes_from_its_checkpoint(tmp_path, compile_cache):
    """Fault 1, as a person meets it."""
    interrupted = _folder_with_pipeline(tmp_path)

    process = interrupted.start("run", "survival.yaml", "--json")
    attempt = _attempt(interrupted)
    _wait_for_commit(interrupted)
    _worker(_read(attempt / "job.json")["supervisor"]["pid"]).kill()
    out, _ = process.communicate(timeout=400)

    failed = json.loads(out)
    resumed = interrupted.json("resume", failed["run"])

    assert process.returncode == 1
    assert resumed["state"] == "completed"
    assert resumed["stages"]["preprocess"]["state"] == "completed"
    before, after = _steps(attempt), _steps(attempt.parent / "2")
    assert before[-1] < 90  # of all steps: it was killed at work
    assert after[0] > 10  # it began where the killed one had saved


def _folder_with_pipeline(folder: Path) -> Command:
    draw = random.Random(0)
    words = ["red", "blue", "old", "new", "tall", "small", "house", "tree", "bird", "stone"]
    rows = []
    for _ in range(400):
        source = " ".join(draw.choices(words, k=8))
        rows.append({"source": source, "target": " ".join(reversed(source.split()))})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "survival.yaml").write_text(PIPELINE)
    return Command(folder)


def _attempt(command: Command) -> Path:
    """The training's first attempt, once it has a job."""
    pattern = "redco-workspace/runs/*/stages/train/attempts/1/job.json"
    return wait_for(lambda: next(command.folder.glob(pattern), None)).parent


def _worker(supervisor: int) -> psutil.Process:
    """The process that trains; the one that measures the machine is beside it."""
    children = psutil.Process(supervisor).children()
    (worker,) = (one for one in children if "redco_flow.worker" in one.cmdline())
    return worker


def _wait_for_commit(command: Command) -> None:
    wait_for(
        lambda: next(command.folder.glob("redco-workspace/work/*/checkpoints/*/commit.json"), None)
    )


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


def _steps(attempt: Path) -> list[int]:
    """The steps that an attempt logged."""
    records = map(json.loads, (attempt / "metrics.jsonl").read_text().splitlines())
    return [record["step"] for record in records if "loss" in record]
