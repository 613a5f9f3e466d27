"""An encoder of images with a decoder of texts against transformers on torch, and over devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from redco_flow import Deployer
from redco_flow.models.generation.generate import generate
from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained

one = pytest.mark.parametrize("captioner", ["vision_encoder_decoder"], indirect=True)
MASK = np.ones((3, 10), np.int32)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 12, 12, 2)).astype(np.float32)


@pytest.fixture
def targets() -> np.ndarray:
    return np.random.default_rng(2).integers(2, 61, (3, 7))


def in_torch(images: np.ndarray) -> Any:
    import torch

    return torch.tensor(images.transpose(0, 3, 1, 2))


def assert_near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.covers("transformers on torch", family="captioner")
def test_the_logits_of_captions_equal_the_torch_reference(
    captioner, images, targets, torch_reference
):
    """Engine case 53: within 1e-5 of the largest logit, float32; of one width and of two."""
    import torch

    with torch.no_grad():
        reference = torch_reference(captioner)
        inputs = {"pixel_values": in_torch(images), "decoder_input_ids": torch.tensor(targets)}
        expected = reference(**inputs).logits.numpy()

    apply = jax.jit(partial(captioner.module.apply, captioner.config))
    assert_near(apply(captioner.params, images, MASK, targets), expected)


@one
@pytest.mark.covers("transformers on torch", family="captioner")
def test_captions_are_those_that_transformers_generates(captioner, images, torch_reference):
    import torch

    reference = torch_reference(captioner)
    with torch.no_grad():
        expected = reference.generate(
            in_torch(images), max_new_tokens=6, num_beams=3, do_sample=False
        )

    search = partial(generate, *captioner[:2], max_new_tokens=6, num_beams=3)
    found = np.asarray(jax.jit(search)(captioner.params, images, MASK).tokens)

    # Theirs begin with the start token, and are as long as the longest of them.
    np.testing.assert_array_equal(found[:, : expected.shape[1] - 1], expected.numpy()[:, 1:])


def test_a_checkpoint_of_a_captioner_is_saved_again_bit_by_bit(
    captioner, torch_reference, tmp_path
):
    """Engine case 53: theirs, ours, theirs; but for the vector of an image, which is not read."""
    torch_reference(captioner).save_pretrained(tmp_path / "theirs")
    module, config = read_model(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", module, config)

    save_pretrained(tmp_path / "again", module, config, ours)

    assert config.core == captioner.config.core
    jax.tree.map(np.testing.assert_array_equal, ours, captioner.params)
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    expected = {name: t for name, t in expected.items() if "pooler" not in name}
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@one
def test_a_parts_config_is_changed_by_its_own_keys(captioner):
    changed = captioner.config.updated(
        {"decoder": {"n_layer": 1}, "encoder": {"patch_size": 6}, "dropout_rate": 0.5}
    )

    assert changed.decoder.n_layer == 1
    assert changed.decoder.n_embd == captioner.config.decoder.n_embd
    assert changed.decoder.attn_pdrop == changed.encoder.hidden_dropout_prob == 0.5
    assert changed.core.encoder.num_patches == 4
    with pytest.raises(ValueError, match="gpt2 config has no key 'n_layers'; did you mean"):
        captioner.config.updated({"decoder": {"n_layers": 1}})
    with pytest.raises(ValueError, match=r"eos_token_id is 61; it must be in \[0, 61\)"):
        captioner.config.updated({"eos_token_id": 61})


@one
@pytest.mark.covers("one device", family="captioner", mesh="model")
@pytest.mark.slow
def test_a_captioner_split_over_devices_is_the_same_model(captioner, images, targets):
    """Engine case 12: cross-attention's heads too; within 1e-5 of the largest logit, float32."""
    images, targets, mask = (np.concatenate([x, x[:1]]) for x in (images, targets, MASK))
    case = captioner.changed(decoder={"vocab_size": 62})
    apply = partial(case.module.apply, case.config)
    deployer = Deployer(2, devices=jax.devices()[:4], matmul_precision="highest")
    rules = deployer.get_sharding_rules(case.params, apply, images, mask, targets)

    def with_gradients(params: Any, *batch: Any) -> Any:
        logits, pull_back = jax.vjp(lambda params: apply(params, *batch), params)
        return logits, pull_back(jax.numpy.sin(logits))[0]

    found = deployer.jit(with_gradients)(
        deployer.shard_params(case.params, rules),
        *map(deployer.put_rows, (images, mask, targets)),
    )

    expected = jax.jit(with_gradients)(case.params, images, mask, targets)
    jax.tree.map(assert_near, found, jax.tree.map(np.asarray, expected))
    split = {p.path: [*p.spec].index("model") for p in rules.parameters if any(p.spec)}
    cross = {path: dim for path, dim in split.items() if "cross_attention" in path}
    assert cross == {
        f"decoder/layers/cross_attention/{name}": dim
        for name, dim in (("q", 2), ("q_bias", 1), ("kv", 3), ("kv_bias", 2), ("out", 1))
    }
    assert split["embedding"] == 0
    assert split["encoder/encoder/layers/attention/qkv"] == 3
