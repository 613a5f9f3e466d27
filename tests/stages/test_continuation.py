"""A training that begins with another's checkpoint, or continues its optimizer, steps and data."""

import logging
import os
import re

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from stage_kinds import preprocess, train

from redco_flow.engine.checkpoint.checkpointer import stored_arrays
from redco_flow.engine.checkpoint.commit import Commit
from redco_flow.engine.continuation import Continuation
from redco_flow.engine.data.packing import PackedExamples
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import CheckpointError
from redco_flow.errors import ConfigError
from redco_flow.orchestrate.pins.aliases import AliasPins
from redco_flow.records import mount_of
from redco_flow.spec.load import InputRef, load_pipeline
from redco_flow.spec.schema import json_schema
from redco_flow.spec.yaml import read_yaml, write_yaml
from redco_flow.stages.artifacts.checkpoint import CHECKPOINT_FOLDER, CheckpointArtifact
from redco_flow.stages.artifacts.tokenizer import WrongTokenizer
from redco_flow.stages.train.continuation import check_steps_left
from redco_flow.stages.train.data import TrainingData
from redco_flow.stages.train.disk_space import bytes_of_checkpoints, free_bytes
from redco_flow.stages.train.scores import CannotTrain
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [(f"{a} {b}", f"{b} {a}") for a in WORDS for b in WORDS]
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48, "resid_pdrop": 0.1}
RECIPE = {"recipe": "language_modeling"}
TOKENIZER = {"train": {"vocab_size": 280, "type": "bpe"}}
# 51 rows: 4 steps an epoch.
SETTINGS = RECIPE | {
    "model": {"family": "gpt2", "config": TINY},
    "global_batch_size": 16,
    "learning_rate": 0.01,
    "log_every_steps": 1,
}
CONSTANT = SETTINGS | {"schedule": {"type": "constant"}}
CONTINUED = {"continue_optimizer": True}


@pytest.fixture(scope="module")
def dataset(shared_bench, write_rows):
    data = {"train": str(write_rows(shared_bench.root / "rows.jsonl", ROWS))}
    lengths = {"max_source_length": 16, "max_target_length": 16}
    data |= {"tokenizer": TOKENIZER, "validation_fraction": 0.2}
    settings = RECIPE | {"data": data} | lengths
    return shared_bench.run(preprocess, settings)["dataset"]


@pytest.fixture(scope="module")
def one_epoch(shared_bench, dataset):
    return train_on(shared_bench, dataset, CONSTANT)


def train_on(bench, dataset, settings, start=None, **context):
    inputs = {"dataset": [dataset]} | ({} if start is None else {"start_from": [start]})
    return bench.run(train, settings, inputs, **context)["checkpoint/last"]


def assert_equal(found, expected):
    """All arrays have the same bits: parameters, moments, step and seed."""
    found, expected = (
        {name: np.asarray(one) for name, one in stored_arrays(a.path / CHECKPOINT_FOLDER).items()}
        for a in (found, expected)
    )
    assert any("/mu/" in name for name in expected)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


PIPELINE = """
name: longer
recipe: language_modeling
model: {family: gpt2}
data: {train: rows.jsonl, tokenizer: {train: {vocab_size: 280}}}
stages:
  preprocess:
  train: {keep: {best: eval_loss, optimizer: last}}
  more: {kind: train, num_epochs: 2, start_from: {checkpoint: train, optimizer: true}}
"""


@pytest.fixture
def load(tmp_path, monkeypatch, write_rows):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "longer.yaml").write_text(PIPELINE)
    return lambda *overrides: load_pipeline(
        tmp_path / "longer.yaml", overrides, looks_into_data=True
    )


def test_a_pipeline_names_the_checkpoint_and_asks_for_its_optimizer(load, tmp_path):
    pipeline = load()

    stage = pipeline.stages["more"]
    assert stage.settings["continue_optimizer"] is True
    assert stage.inputs["start_from"] == (InputRef("train", "checkpoint/last"),)
    assert "continue_optimizer" not in pipeline.stages["train"].settings
    without = load("stages.more.start_from.optimizer=false", "optimizer=sgd").stages["more"].config
    assert (without.continue_optimizer, without.optimizer) == (False, "sgd")
    (tmp_path / "again.yaml").write_text(write_yaml(pipeline.document))
    assert load_pipeline(tmp_path / "again.yaml").stages == pipeline.stages
    jsonschema.validate(read_yaml(PIPELINE, "").values, json_schema())


def test_the_settings_of_a_checkpoint_that_a_script_makes_are_not_compared_by_the_plan(
    load, tmp_path
):
    (tmp_path / "make.py").write_text("")
    script = "{kind: script, path: make.py, outputs: [checkpoint]}"

    stage = load(f"stages.train={script}").stages["more"]

    assert stage.inputs["start_from"] == (InputRef("train", "checkpoint"),)


def test_an_alias_that_names_nothing_yet_leaves_the_whole_continuation_out(load, tmp_path):
    pipeline = load("stages.more.start_from={checkpoint: '@production', optimizer: true}")

    pinned, [pin] = AliasPins().pinned(pipeline, Workspace.open(tmp_path / "workspace"))

    assert "it is left out" in str(pin)
    without = load("~stages.more.start_from").stages["more"]
    assert pinned.stages["more"] == without
    (tmp_path / "again.yaml").write_text(write_yaml(pinned.document))
    assert load_pipeline(tmp_path / "again.yaml").stages == pinned.stages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("more.optimizer=lion", "continues a training with optimizer adamw, and here it is lion"),
        ("more.optimizer=lion", "longer.yaml:9:"),
        ("train.lora={targets: all-linear}", "has no recorded optimizer state"),
        (
            "more.start_from={checkpoint: train/best/eval_loss, optimizer: true}",
            "stages.more.start_from': the checkpoint has no recorded optimizer state",
        ),
        ("more.lora={targets: all-linear}", "or train without `lora`"),
        (
            "more.start_from={checkpoint: train, step: 3}",
            "or {checkpoint: REFERENCE, optimizer: …}",
        ),
        ("more.start_from={optimizer: true}", "must be one reference"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_anything_is_submitted(load, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(f"stages.{change}")


def test_a_published_checkpoint_without_optimizer_state_is_refused_by_the_plan(load, tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    (tmp_path / "weights").write_text("1")
    made = ArtifactStore(workspace).publish("checkpoint", tmp_path / "weights")
    reference = f"{{checkpoint: '{made.id}', optimizer: true}}"

    with pytest.raises(ConfigError, match="'start_from' of stage 'more': the checkpoint has no"):
        AliasPins().pinned(load(f"stages.more.start_from={reference}"), workspace)


def test_a_training_that_early_stopping_ended_is_continued_with_more_patience_alone(tmp_path):
    stopped = {"early_stopping": {"metric": "eval_loss", "best": 1.0, "num_worse": 2}}
    commit = Commit(step=6, metrics={}, cursor={"step": 6, **stopped}, files={})
    start = Continuation(tmp_path, commit, first_step=0)

    def check(patience):
        stopping = {"early_stopping": {"metric": "eval_loss", "patience": patience}}
        check_steps_left(start, train.Config.from_json(CONSTANT | stopping), total_steps=8)

    with pytest.raises(CannotTrain, match="of step 6, where early_stopping ended its training"):
        check(2)
    check(3)


@pytest.mark.parametrize(
    ("keep", "num_saves", "num_bytes"),
    [
        # A checkpoint has 12 bytes a parameter with AdamW, 4 of them the parameter's own.
        ({}, 1, 12),
        ({}, 9, 3 * 12),
        ({"last": 2, "best": ["eval_loss"]}, 9, 5 * 12),
        ({"last": 2, "best": ["eval_loss"], "optimizer": "last"}, 9, 4 * 12 + 4),
    ],
)
def test_the_bytes_of_all_checkpoints_that_are_kept_at_once(keep, num_saves, num_bytes):
    weights = jax.ShapeDtypeStruct((10, 100), jnp.float32)
    state = {"params": {"w": weights}, "opt_state": [weights, weights]}
    config = train.Config.from_json(CONSTANT | {"keep": keep})

    assert bytes_of_checkpoints(config, state, num_saves) == 1000 * num_bytes


def test_equally_many_rows_of_another_length_are_other_rows():
    lengths = [30, 30, 10, 10]
    config = train.Config.from_json(CONSTANT | {"batching": {"type": "packed"}})

    of_40, of_60 = (
        TrainingData(PackedExamples(lengths, lengths, length), None, list, None, 0.0)
        for length in (40, 60)
    )

    assert of_40.sampler(config).position(1) == of_60.sampler(config).position(1)
    assert of_40.row_settings(config) != of_60.row_settings(config)


@pytest.mark.slow
def test_it_equals_the_uninterrupted_training_bit_for_bit_on_a_mesh(bench, dataset):
    """From the middle of an epoch; parameters and moments are split along fsdp."""
    mesh = CONSTANT | {"fsdp": 2}
    whole = train_on(bench, dataset, mesh | {"num_epochs": 2})
    part = train_on(bench, dataset, mesh | {"max_steps": 3})
    more = mesh | CONTINUED | {"num_epochs": 2, "save_every_steps": 1, "keep": {"last": 4}}

    made = train_on(bench, dataset, more, part, work="more")

    assert bench.start_step() == 3
    assert_equal(made, whole)
    # As after a kill in the middle of the second epoch.
    resumed = train_on(bench, dataset, more, part, work=bench.rewind("more", 6))
    assert bench.start_step() == 6
    assert resumed.id == made.id


@pytest.mark.slow
def test_other_data_begin_at_their_start_and_the_step_is_kept(
    bench, write_rows, dataset, one_epoch, caplog
):
    rows = write_rows(bench.root / "others.jsonl", ROWS[:32])
    tokenizer = str(dataset.path / "tokenizer")
    data = {"train": str(rows), "tokenizer": {"name_or_path": tokenizer}}
    lengths = {"max_source_length": 16, "max_target_length": 16}
    other = bench.run(preprocess, RECIPE | {"data": data} | lengths)["dataset"]
    # The count of skipped steps, which the first training has not, begins at 0.
    settings = CONSTANT | CONTINUED | {"on_nonfinite": "skip"}

    with caplog.at_level(logging.WARNING):
        made = train_on(bench, other, settings, one_epoch)

    assert made.metadata["step"] == 4 + 2  # an epoch of 2 steps
    assert "reading starts at the first batch: other data" in caplog.text
    epochs = [one["epoch"] for one in bench.records() if "loss" in one]
    assert epochs == [0.5, 1.0]
    # The next one continues in the second data, and not in the first.
    again = train_on(bench, other, settings | {"num_epochs": 2}, made)
    whole = train_on(bench, other, settings | {"num_epochs": 2}, one_epoch)
    assert_equal(again, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "lion"}, "continues a training with optimizer adamw, and here it is lion"),
        ({"freeze": "wte"}, "continues a training with freeze null, and here it is wte"),
        ({"num_epochs": 1}, "of step 4, and these settings end at step 4, counted from the first"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_what_to_change(
    bench, dataset, one_epoch, changes, message
):
    with pytest.raises(CannotTrain, match=message):
        train_on(bench, dataset, CONSTANT | CONTINUED | {"num_epochs": 2} | changes, one_epoch)


@pytest.mark.slow
def test_only_the_last_checkpoint_carries_optimizer_state_where_that_is_asked_for(bench, dataset):
    """The schedule is that of the new settings at the step reached."""
    inputs = {"dataset": [dataset]}
    # Nothing is learnt, so that the first step is the best.
    kept = {"keep": {"best": ["eval_loss"], "optimizer": "last"}, "eval": {"every_steps": 1}}
    still = CONSTANT | kept | {"learning_rate": 1e-30, "on_nonfinite": "skip"}

    made = bench.run(train, still, inputs)

    best, last = (made[f"checkpoint/{name}"] for name in ("best/eval_loss", "last"))
    assert (best.metadata["step"], last.metadata["step"]) == (1, 4)
    assert (last.path / CHECKPOINT_FOLDER / "training").is_dir()
    assert not (best.path / CHECKPOINT_FOLDER / "training").exists()
    more = still | CONTINUED | {"num_epochs": 2, "learning_rate": 0.06, "on_nonfinite": "stop"}
    more |= {"schedule": {"type": "linear"}}
    assert train_on(bench, dataset, more, last).metadata["step"] == 8
    rates = {one["step"]: one["learning_rate"] for one in bench.records() if "loss" in one}
    assert rates == pytest.approx({step: 0.06 * (1 - (step - 1) / 8) for step in range(5, 9)})
    with pytest.raises(CannotTrain, match="and not the last one"):
        train_on(bench, dataset, more, best)


@pytest.mark.slow
def test_a_quota_that_cannot_hold_the_checkpoints_is_reported_before_the_training(
    bench, dataset, tmp_path, monkeypatch, caplog
):
    # As `quota` prints it: 1 KiB of the limit of 9 KiB is left.
    table = "Disk quotas for user ann (uid 7):\\n  Filesystem blocks quota limit grace files quota"
    quota = tmp_path / "quota"
    quota.write_text(f"#!/bin/sh\nprintf '{table}\\n  nas:/home 8* 7 9 0 1 0 0 0\\n'\nexit 1\n")
    quota.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    context = bench.context("train", {"dataset": [dataset]})

    with caplog.at_level(logging.WARNING):
        train.run(context, train.Config.from_json(CONSTANT))

    assert free_bytes(tmp_path) == (1024, "by your quota")
    [message] = [one for one in caplog.messages if "checkpoints may need" in one]
    assert f"9.54e-07 GiB are free on {mount_of(context.work_dir)} (by your quota)" in message
    assert context.attempt_dir.read_progress()["warning"] == message


# Adam's step is as large as its rate: no float32 changes by this.
STILL = SETTINGS | {"learning_rate": 1e-30, "seed": 7}


def params_of(artifact):
    checkpoint = CheckpointArtifact(artifact.path)
    return checkpoint.load_params(checkpoint.build_recipe(), Deployer())


@pytest.mark.slow
def test_it_begins_with_the_same_parameters_on_another_mesh_and_below_factors(
    bench, dataset, one_epoch
):
    """Factors begin as a product of zeros, so what is published is the base."""
    changes = {"num_model_shards": 2, "fsdp": 2, "lora": {"rank": 2, "targets": "attention"}}

    made = train_on(bench, dataset, STILL | changes, one_epoch)

    for found, begun in zip(
        *map(jax.tree.leaves, (params_of(made), params_of(one_epoch))), strict=True
    ):
        np.testing.assert_allclose(found, begun, rtol=0, atol=1e-7)
    with pytest.raises(CannotTrain, match="has no recorded optimizer state"):
        train_on(bench, dataset, CONSTANT | CONTINUED, made)


@pytest.mark.slow
def test_a_checkpoint_with_another_tokenizer_is_refused(bench, one_epoch, write_rows):
    rows = write_rows(bench.root / "others.jsonl", [(b.upper(), a) for a, b in ROWS])
    data = {"train": str(rows), "tokenizer": {"train": {"vocab_size": 270, "type": "bpe"}}}
    other = bench.run(preprocess, RECIPE | {"data": data})["dataset"]

    with pytest.raises(WrongTokenizer, match="start_from was trained with tokenizer"):
        train_on(bench, other, STILL, one_epoch)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, CONTINUED | {"num_epochs": 2}], ids=["begun", "continued"])
def test_a_checkpoint_of_another_size_is_refused_with_the_parameters_name(
    bench, dataset, one_epoch, more
):
    wide = STILL | more | {"model": {"family": "gpt2", "config": TINY | {"n_embd": 32}}}

    with pytest.raises(CheckpointError, match="expected"):
        train_on(bench, dataset, wide, one_epoch)
