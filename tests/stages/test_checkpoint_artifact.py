"""A published checkpoint is whole by itself, whatever becomes of the training it came from."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from redco_flow.engine.checkpoint.checkpointer import (
    Checkpointer,
    parameter_digests,
    restore_params,
)
from redco_flow.engine.checkpoint.commit import TRAINING
from redco_flow.records import digest_file
from redco_flow.runtime.context import Output, StageOutputs
from redco_flow.stages.artifacts.checkpoint import (
    CHECKPOINT_FOLDER,
    RecipeRecord,
    checkpoint_identity,
    write_checkpoint_artifact,
)

RECORD = RecipeRecord(
    recipe="text_to_text",
    model={},
    source_length=8,
    target_length=8,
    tokenizer_digest="t" * 64,
    step=1,
    metrics={},
    data="d" * 64,
    config="c" * 64,
)


def state_at(step):
    return {"params": {"w": jnp.full((4, 4), float(step))}, "step": jnp.int32(step)}


def save(checkpointer, step):
    checkpointer.save(step, state_at(step), cursor={"step": step})
    checkpointer.wait()


def test_retention_takes_nothing_from_a_checkpoint_that_an_artifact_is_made_of(tmp_path):
    """Engine case 50: the training goes on, and deletes the step that was published."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with Checkpointer(tmp_path / "checkpoints", keep_last=1) as checkpointer:
        save(checkpointer, 1)
        digests = write_checkpoint_artifact(
            tmp_path / "artifact",
            checkpointer.step_directory(1),
            tmp_path / "tokenizer",
            RECORD,
        )
        for step in (2, 3):
            save(checkpointer, step)
        assert checkpointer.steps() == [3]

    found = restore_params(tmp_path / "artifact" / CHECKPOINT_FOLDER, state_at(0)["params"])

    assert found["w"].tolist() == [[1.0] * 4] * 4
    assert {name: digest_file(tmp_path / "artifact" / name) for name in digests} == digests


def publish(bench, name, params, tokenizer="{}", record=RECORD, moment=1.0):
    """Save parameters and publish them, in a directory of this name."""
    folder = bench.root / name
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(
            1, {"params": params, "moment": jnp.full(3, moment)}, cursor={"name": name}
        )
        checkpointer.wait()
        step_directory = checkpointer.step_directory(1)
    digests = write_checkpoint_artifact(
        folder / "artifact", step_directory, folder / "tokenizer", record
    )
    state = parameter_digests(step_directory, TRAINING)
    identity = checkpoint_identity(digests, parameter_digests(step_directory), state)
    outputs = StageOutputs({"checkpoint": Output("checkpoint", folder / "artifact", {}, digests)})
    return (
        bench.store.publish("checkpoint", folder / "artifact", digests=digests, identity=identity),
        bench.publish(outputs)["checkpoint"],
    )


@pytest.mark.slow
def test_a_checkpoints_id_follows_its_arrays_recipe_and_tokenizer_whatever_its_files(bench):
    params = {"w": jnp.arange(16.0).reshape(4, 4), "b": jnp.zeros(4)}
    first, first_by_files = publish(bench, "first", params)

    again, again_by_files = publish(bench, "again", params)

    assert first_by_files.id != again_by_files.id
    assert again.id == first.id
    others = [
        publish(bench, "value", params | {"b": jnp.zeros(4).at[2].set(-0.0)}),
        publish(bench, "dtype", params | {"b": jnp.zeros(4, jnp.int32)}),
        publish(bench, "shape", params | {"b": jnp.zeros((2, 2))}),
        publish(bench, "name", {"w": params["w"], "c": params["b"]}),
        publish(bench, "tokenizer", params, tokenizer="{ }"),
        publish(bench, "recipe", params, record=replace(RECORD, step=2)),
        publish(bench, "optimizer", params, moment=2.0),
    ]
    assert len({first.id, *(by_identity.id for by_identity, _ in others)}) == 8
