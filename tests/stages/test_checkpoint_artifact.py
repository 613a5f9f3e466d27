"""A published checkpoint is whole by itself, whatever becomes of the training it came from."""

import jax.numpy as jnp

from redco_flow.engine.checkpoint import Checkpointer, restore_params
from redco_flow.records import digest_file
from redco_flow.stages.checkpoint_artifact import (
    CHECKPOINT_FOLDER,
    RecipeRecord,
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
