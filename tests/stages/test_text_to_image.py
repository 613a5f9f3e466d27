"""text_to_image through its stages: pictures of captions, over shards and after a stop."""

import jax
import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.metrics import read_metrics
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.context import Stopped

SIZES = {"image_size": 8, "patch_size": 4, "width": 32, "num_layers": 2, "num_heads": 2}
RECIPE = {"recipe": "text_to_image", "settings": SIZES | {"num_sampling_steps": 10}}
DATA = {"dataset": "python:halves", "validation_fraction": 0.2, "test_fraction": 0.2}
TRAIN = RECIPE | {
    "num_epochs": 32,
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "schedule": {"type": "cosine", "warmup_steps": 20},
    "eval": {"every_epochs": 16, "metrics": ["image_retrieval"]},
    "keep": {"best": ["image_retrieval"]},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(shared_bench):
    return shared_bench.run(preprocess, RECIPE | {"data": DATA})["dataset"]


def test_pictures_show_their_captions_and_the_mean_image_shows_one(shared_bench, dataset):
    checkpoints = shared_bench.run(train, TRAIN, {"dataset": [dataset]})
    best = checkpoints["checkpoint/best/image_retrieval"]
    inputs = {"dataset": [dataset], "checkpoint": [best]}
    predictions = shared_bench.run(predict, RECIPE, inputs)["predictions"]
    found = shared_bench.run(
        evaluate, {"metrics": ["image_retrieval"]}, {"predictions": [predictions]}
    )

    summary, _ = read_metrics(found["metrics"].path)
    lines, record = read_predictions(predictions.path)

    assert summary.metrics["image_retrieval"] > 75
    assert summary.baselines["mean_image"]["metrics"]["image_retrieval"] < 50
    assert record.target == "image"
    assert np.shape(lines[0].prediction) == np.shape(lines[0].references[0]) == (8, 8)
    assert set(lines[0].row) == {"caption"}


def test_two_model_shards_and_a_stop_in_the_middle_change_nothing(
    shared_bench, dataset, stop_at_look
):
    short = RECIPE | {"num_epochs": 6, "global_batch_size": 8, "optimizer": "sgd"}
    inputs = {"dataset": [dataset]}
    context = shared_bench.context("train", inputs, work="stopped")
    context.stop = stop_at_look(10)

    whole = shared_bench.run(train, short, inputs)["checkpoint/last"]
    with pytest.raises(Stopped):
        train.run(context, train.Config.from_json(short | {"num_model_shards": 2}))
    again = shared_bench.run(train, short | {"num_model_shards": 2}, inputs, work="stopped")
    started = [record for record in shared_bench.records() if "start_step" in record]

    assert started[0]["start_step"] > 0
    one, two = map(params_of, (whole, again["checkpoint/last"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, two)


def params_of(checkpoint):
    artifact = CheckpointArtifact(checkpoint.path)
    return artifact.load_params(artifact.build_recipe(), Deployer(devices=jax.devices()[:1]))
