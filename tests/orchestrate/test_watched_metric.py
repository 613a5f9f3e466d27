"""Which metric `--stop-early` means, and what is refused before a sweep starts."""

import pytest

from redco_flow.errors import UsageError
from redco_flow.orchestrate.sweep.watched_metric import read_early_stopping

DESCENT = """
name: descents
stages:
  train: {kind: orchestrate_kinds.descent, folder: here}
  reread: {kind: orchestrate_kinds.reread}
"""
SCRIPT = """
name: script
stages:
  fit: {kind: script, path: examples/script.py}
"""
TRAINING = """
name: training
data:
  train: rows.jsonl
  source_key: source
  target_key: target
  tokenizer: {train: {type: character}}
stages:
  preprocess: {kind: preprocess}
  train: {kind: train, eval: {metrics: [bleu]}}
"""


@pytest.fixture
def choose(runs, monkeypatch):
    monkeypatch.chdir(runs.folder)
    (runs.folder / "examples").mkdir()
    (runs.folder / "examples" / "script.py").write_text("")
    (runs.folder / "rows.jsonl").write_text('{"source": "a", "target": "b"}\n')

    def choose(pipeline, text, points, *, mode=None, min_steps=1):
        pipelines = [runs.load(pipeline, [point]) for point in points]
        options = {"mode": mode, "min_steps": min_steps, "reduction_factor": 3}
        return read_early_stopping(text, pipelines, runs.workspace, **options)

    return choose


LOSSES = ("loss=1.0", "loss=2.0")
RATES = ("train.learning_rate=1e-3", "train.learning_rate=1e-4")
ARGUMENTS = ("fit.arguments.a=1", "fit.arguments.a=2")


@pytest.mark.parametrize(
    ("pipeline", "text", "points", "found"),
    [
        (DESCENT, "val/loss", LOSSES, ("train", "val/loss", "min")),
        (DESCENT, "train/val/loss", LOSSES, ("train", "val/loss", "min")),
        (TRAINING, "val/eval_loss", RATES, ("train", "val/eval_loss", "min")),
        (TRAINING, "train/val/bleu", RATES, ("train", "val/bleu", "max")),
    ],
)
def test_stage_and_direction_follow_from_the_metric(choose, pipeline, text, points, found):
    chosen = choose(pipeline, text, points)

    assert (chosen.stage, chosen.metric, chosen.mode) == found


def test_the_direction_of_a_scripts_metric_is_asked_for(choose):
    with pytest.raises(UsageError, match="--mode min or --mode max"):
        choose(SCRIPT, "reward", ARGUMENTS)

    assert choose(SCRIPT, "reward", ARGUMENTS, mode="max").mode == "max"


@pytest.mark.parametrize(
    ("text", "points", "options", "said"),
    [
        ("val/los", LOSSES, {}, "did you mean 'val/loss'?"),
        ("reread/total", LOSSES, {}, "It logs: val/loss."),
        ("val/loss", LOSSES, {"mode": "max"}, "leave out --mode max"),
        ("val/loss", LOSSES, {"min_steps": 0}, "needs --min-steps N"),
        ("val/loss", LOSSES[:1], {}, "this sweep has one"),
        ("val/loss", ("reread.resources.cpus_per_host=1", "loss=1.0"), {}, "share one training"),
    ],
)
def test_what_cannot_be_compared_is_refused(choose, text, points, options, said):
    with pytest.raises(UsageError) as error:
        choose(DESCENT, text, points, **options)

    assert said in str(error.value)
