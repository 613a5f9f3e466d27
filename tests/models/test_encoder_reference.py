"""Encoders against transformers on torch: logits, hidden states, gradients, files, config."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@pytest.fixture
def batch(encoder, padded_batch) -> dict[str, np.ndarray]:
    """Rows padded in front, behind and not at all; tokens of three types."""
    mask = padded_batch["attention_mask"]
    return {
        "input_ids": np.where(mask, padded_batch["input_ids"], encoder.config.pad_token_id),
        "attention_mask": mask,
        "token_type_ids": np.random.default_rng(2).integers(0, 3, mask.shape),
    }


def torch_inputs(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(values) for name, values in batch.items()}


def assert_near_at_tokens(found: Any, expected: Any, batch: dict[str, np.ndarray]) -> None:
    is_token = batch["attention_mask"] == 1
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(
        np.asarray(found)[is_token], expected[is_token], rtol=0, atol=tolerance
    )


@pytest.mark.covers("transformers on torch", family="encoder")
def test_logits_equal_the_torch_reference(encoder, batch, torch_reference):
    """Engine case 53: within 1e-5 of the largest logit, float32, either padding."""
    import torch

    with torch.no_grad():
        expected = torch_reference(encoder)(**torch_inputs(batch)).logits.numpy()

    apply = jax.jit(partial(encoder.module.apply, encoder.config))
    assert_near_at_tokens(apply(encoder.params, *(batch[i] for i in INPUTS)), expected, batch)


def test_without_mask_and_types_it_is_the_torch_reference_without_them(encoder, torch_reference):
    import torch

    ids = np.random.default_rng(3).integers(2, 61, (2, 9))
    with torch.no_grad():
        expected = torch_reference(encoder)(torch.tensor(ids)).logits.numpy()

    found = jax.jit(partial(encoder.module.apply, encoder.config))(encoder.params, ids)

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("encoder", ["bert", "roberta", "bert-headless"], indirect=True)
def test_hidden_states_equal_the_torch_reference(encoder, batch, torch_reference):
    import torch

    with torch.no_grad():
        reference = torch_reference(encoder).base_model
        expected = reference(**torch_inputs(batch)).last_hidden_state.numpy()

    encode = jax.jit(partial(encoder.module.encode, encoder.config))
    assert_near_at_tokens(encode(encoder.params, *(batch[i] for i in INPUTS)), expected, batch)


@pytest.mark.parametrize("encoder", ["bert-headless", "roberta-headless"], indirect=True)
def test_pooled_texts_equal_the_torch_reference(encoder, batch, torch_reference):
    """Engine case 53: results equal the reference's; an export equals the original bit by bit."""
    import torch

    with torch.no_grad():
        expected = torch_reference(encoder)(**torch_inputs(batch)).pooler_output.numpy()

    pool = jax.jit(partial(encoder.module.pool, encoder.config))
    found = pool(encoder.params, *(batch[i] for i in INPUTS))
    # Nothing is to be found where padding stands first.
    is_token = batch["attention_mask"][:, 0] == 1
    np.testing.assert_allclose(found[is_token], expected[is_token], rtol=0, atol=1e-5)


@pytest.mark.covers("transformers on torch", family="encoder")
def test_gradients_of_every_parameter_equal_the_torch_reference(
    encoder, batch, torch_reference, assert_same_gradients
):
    """Engine cases 15 and 53: torch adds both gradients of a tied embedding, and so do we."""
    # Where padding stands transformers gives its row of a table no gradient.
    batch["input_ids"] = np.where(batch["attention_mask"], batch["input_ids"], 1)
    is_masked = (batch["attention_mask"] == 1) & (np.arange(11) % 3 == 1)
    labels = np.where(is_masked, np.random.default_rng(4).integers(2, 61, (3, 11)), -100)
    reference = torch_reference(encoder)
    reference(**torch_inputs({**batch, "labels": labels})).loss.backward()

    def mean_loss(params: Any) -> jax.Array:
        logits = encoder.module.apply(encoder.config, params, *(batch[i] for i in INPUTS))
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, np.maximum(labels, 0)[..., None], 2)[..., 0]
        return -jnp.sum(chosen * is_masked) / np.sum(is_masked)

    assert_same_gradients(encoder, mean_loss, reference)


@pytest.mark.parametrize(
    "encoder", ["bert", "roberta", "bert-headless", "roberta-headless"], indirect=True
)
def test_a_checkpoint_of_transformers_is_saved_again_bit_by_bit(encoder, torch_reference, tmp_path):
    """Engine case 53: theirs, ours, theirs; with the pooler that bare models have."""
    torch_reference(encoder).save_pretrained(tmp_path / "theirs")
    module, config = read_model(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", module, config)

    save_pretrained(tmp_path / "again", module, config, ours)

    assert config == encoder.config
    jax.tree.map(np.testing.assert_array_equal, ours, encoder.params)
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    if not config.has_head:
        expected = {f"{config.model_type}.{name}": t for name, t in expected.items()}
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_transformers_reads_an_exported_config_as_the_same_model(encoder, torch_reference):
    """Nothing that shapes the model is left to a default of theirs."""
    theirs = torch_reference(encoder).config.to_dict()

    assert type(encoder.config).from_hugging_face(theirs) == encoder.config
