"""Checkpoints of encoders as they have been published over the years, and vectors of texts."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redco_flow.models.generation.generate import generate
from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained

one_family = pytest.mark.parametrize("encoder", ["bert"], indirect=True)


@pytest.fixture
def checkpoint(encoder, tmp_path):
    save_pretrained(tmp_path, *encoder)
    return tmp_path


def change_tensors(directory: Any, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def assert_loads_as(directory: Any, params: Any) -> None:
    found = load_pretrained(directory, *read_model(directory))
    jax.tree.map(np.testing.assert_array_equal, found, params)


@one_family
def test_norms_called_gamma_and_beta_and_the_other_heads_are_read_over(checkpoint, encoder):
    def publish_as_of_old(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for ours, old in new.items():
            tensors = {name.replace(ours, old): tensor for name, tensor in tensors.items()}
        head = {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"]}
        return tensors | head | {"cls.seq_relationship.weight": np.ones((2, 24), np.float32)}

    change_tensors(checkpoint, publish_as_of_old)

    assert_loads_as(checkpoint, encoder.params)


def test_a_bare_encoder_is_a_model_without_a_head(checkpoint, encoder):
    def keep_bare(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outer = f"{encoder.config.model_type}."
        kept = {name: t for name, t in tensors.items() if name.startswith(outer)}
        return {name.removeprefix(outer): tensor for name, tensor in kept.items()}

    change_tensors(checkpoint, keep_bare)

    bare = {name: value for name, value in encoder.params.items() if name != "head"}
    assert_loads_as(checkpoint, bare)
    module, config = read_model(checkpoint)
    ids = np.ones((1, 3), np.int32)
    assert module.encode(config, bare, ids).shape == (1, 3, 24)
    with pytest.raises(ValueError, match="published without a head for masked tokens"):
        module.apply(config, bare, ids)


@pytest.mark.parametrize("encoder", ["bert-headless"], indirect=True)
def test_a_model_without_a_head_says_so_in_its_file(checkpoint, encoder):
    values = json.loads((checkpoint / "config.json").read_text())

    assert values["architectures"] == ["BertModel"]
    assert_loads_as(checkpoint, encoder.params)


@pytest.mark.parametrize("encoder", ["bert-pooled"], indirect=True)
def test_a_pooler_is_read_and_written_beside_a_head(checkpoint, encoder):
    assert "bert.pooler.dense.weight" in load_file(checkpoint / "model.safetensors")
    assert_loads_as(checkpoint, encoder.params)


@pytest.mark.parametrize("encoder", ["bert-pooled"], indirect=True)
def test_a_checkpoint_without_a_pooler_is_a_model_without_one(checkpoint, encoder):
    def without_pooler(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: tensor for name, tensor in tensors.items() if "pooler" not in name}

    change_tensors(checkpoint, without_pooler)

    bare = {name: value for name, value in encoder.params.items() if name != "pooler"}
    assert_loads_as(checkpoint, bare)
    module, config = read_model(checkpoint)
    with pytest.raises(ValueError, match="without a pooler: take the mean over a text"):
        module.pool(config, bare, np.ones((1, 3), np.int32))


@one_family
def test_an_encoder_that_is_asked_for_texts_refuses(encoder):
    ids = np.ones((1, 3), np.int32)

    with pytest.raises(ValueError, match="bert does not generate"):
        generate(*encoder, ids, ids, max_new_tokens=2)


@one_family
def test_a_longer_text_than_the_positions_reach_is_refused(encoder):
    with pytest.raises(ValueError, match="21 tokens long; the model has learned positions for 20"):
        encoder.module.encode(encoder.config, encoder.params, np.ones((1, 21), np.int32))
