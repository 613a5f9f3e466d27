"""text_to_image through its stages, from rows to a score beside its baseline."""

import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.tracking.metrics_artifact import read_metrics

SIZES = {"image_size": 8, "patch_size": 4, "width": 32, "num_layers": 1, "num_heads": 2}
RECIPE = {"recipe": "text_to_image", "settings": SIZES | {"num_sampling_steps": 10}}
DATA = {"dataset": "python:halves", "validation_fraction": 0.05, "test_fraction": 0.05}
TRAIN = RECIPE | {
    "num_epochs": 4,
    "global_batch_size": 16,
    "learning_rate": 0.01,
    "schedule": {"type": "cosine", "warmup_steps": 10},
    "eval": {"every_epochs": 4},
    "keep": {"best": ["eval_loss"]},
    "num_model_shards": 2,
}
EVALUATE = {"metrics": ["image_retrieval"]}

pytestmark = pytest.mark.slow


def test_pictures_show_their_captions(bench):
    """Trained over two model shards."""
    dataset = bench.run(preprocess, RECIPE | {"data": DATA})["dataset"]

    checkpoints = bench.run(train, TRAIN, {"dataset": [dataset]})
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/best/eval_loss"]]}
    predictions = bench.run(predict, {"recipe": "text_to_image"}, inputs)["predictions"]
    found = bench.run(evaluate, EVALUATE, {"predictions": [predictions]})["metrics"]
    summary, _ = read_metrics(found.path)
    lines, record = read_predictions(predictions.path)

    assert summary.metrics["image_retrieval"] > 75
    assert summary.baselines["mean_image"]["metrics"]["image_retrieval"] <= 50
    assert record.target == "image"
    assert np.shape(lines[0].prediction) == np.shape(lines[0].references[0]) == (8, 8)
    assert set(lines[0].row) == {"caption"}
