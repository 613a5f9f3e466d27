"""A training that begins with the parameters of another one's checkpoint."""

import jax
import numpy as np
import pytest
from stage_kinds import preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import CheckpointError
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.tokenizer import WrongTokenizer

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [(f"{a} {b}", f"{b} {a}") for a in WORDS for b in WORDS]
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48}
RECIPE = {"recipe": "language_modeling"}
SETTINGS = RECIPE | {
    "model": {"family": "gpt2", "config": TINY},
    "num_epochs": 1,
    "global_batch_size": 16,
    "learning_rate": 0.01,
}
# Adam's step is as large as its rate: no float32 changes by this.
STILL = SETTINGS | {"learning_rate": 1e-30, "seed": 7}


def make_dataset(bench, path, vocab_size=280):
    tokenizer = {"train": {"vocab_size": vocab_size, "type": "bpe"}}
    data = {"train": str(path), "tokenizer": tokenizer, "validation_fraction": 0.2}
    lengths = {"max_source_length": 16, "max_target_length": 16}
    return bench.run(preprocess, RECIPE | {"data": data} | lengths)["dataset"]


@pytest.fixture(scope="module")
def week(shared_bench, write_rows):
    """A week's data, and the checkpoint that was trained on it."""
    dataset = make_dataset(shared_bench, write_rows(shared_bench.root / "rows.jsonl", ROWS))
    made = shared_bench.run(train, SETTINGS, {"dataset": [dataset]})
    return dataset, made["checkpoint/last"]


def params_of(artifact):
    checkpoint = CheckpointArtifact(artifact.path)
    return checkpoint.load_params(checkpoint.build_recipe(), Deployer())


def test_it_begins_with_the_same_bits_on_another_mesh(bench, week):
    dataset, checkpoint = week
    inputs = {"dataset": [dataset], "start_from": [checkpoint]}
    layout = {"num_model_shards": 2, "fsdp": 2}

    made = bench.run(train, STILL | layout, inputs)["checkpoint/last"]

    for found, begun in zip(
        *map(jax.tree.leaves, (params_of(made), params_of(checkpoint))), strict=True
    ):
        np.testing.assert_array_equal(found, begun)


def test_low_rank_factors_are_trained_beside_it(bench, week):
    dataset, checkpoint = week
    inputs = {"dataset": [dataset], "start_from": [checkpoint]}

    made = bench.run(train, STILL | {"lora": {"rank": 2, "targets": "attention"}}, inputs)[
        "checkpoint/last"
    ]

    # Factors begin as a product of zeros, so what is published is the base.
    for found, begun in zip(
        *map(jax.tree.leaves, (params_of(made), params_of(checkpoint))), strict=True
    ):
        np.testing.assert_allclose(found, begun, atol=1e-7)


def test_a_checkpoint_with_another_tokenizer_is_refused(bench, week, write_rows):
    rows = write_rows(bench.root / "others.jsonl", [(b.upper(), a) for a, b in ROWS])
    other = make_dataset(bench, rows, vocab_size=270)

    with pytest.raises(WrongTokenizer, match="start_from was trained with tokenizer"):
        bench.run(train, STILL, {"dataset": [other], "start_from": [week[1]]})


def test_a_checkpoint_of_another_size_is_refused_with_the_parameters_name(bench, week):
    dataset, checkpoint = week
    wide = STILL | {"model": {"family": "gpt2", "config": TINY | {"n_embd": 32}}}

    with pytest.raises(CheckpointError, match="expected"):
        bench.run(train, wide, {"dataset": [dataset], "start_from": [checkpoint]})
