"""Encoders of images against transformers on torch, from and to its files, and over devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from redco_flow import Deployer
from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained

classifier = pytest.mark.parametrize("image_encoder", ["vit"], indirect=True)
# What reads the residual is split on its output side, what writes it on its input side.
SPLIT_DIM = {
    "encoder/layers/attention/qkv": 3, "encoder/layers/attention/qkv_bias": 2,
    "encoder/layers/attention/out": 1, "encoder/layers/mlp/wi": 3,
    "encoder/layers/mlp/wi_bias": 2, "encoder/layers/mlp/wo": 1,
    "classifier/kernel": 1, "classifier/bias": 0,
}  # fmt: skip
pooled = pytest.mark.parametrize("image_encoder", ["vit-pooled"], indirect=True)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 12, 12, 2)).astype(np.float32)


def in_torch(images: np.ndarray) -> Any:
    import torch

    return torch.tensor(images.transpose(0, 3, 1, 2))


def assert_near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def mean_loss_of(case: Any, labels: np.ndarray) -> Any:
    def mean_loss(params: Any, images: jax.Array) -> jax.Array:
        logits = case.module.apply(case.config, params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return mean_loss


@classifier
@pytest.mark.covers("transformers on torch", family="image_encoder")
def test_the_logits_of_classes_equal_the_torch_reference(image_encoder, images, torch_reference):
    """Engine case 53: within 1e-5 of the largest logit, float32."""
    import torch

    with torch.no_grad():
        expected = torch_reference(image_encoder)(in_torch(images)).logits.numpy()

    apply = jax.jit(partial(image_encoder.module.apply, image_encoder.config))
    assert_near(apply(image_encoder.params, images), expected)


@pooled
@pytest.mark.covers("transformers on torch", family="image_encoder")
def test_hidden_states_and_vectors_of_images_equal_the_torch_reference(
    image_encoder, images, torch_reference
):
    """Engine case 53: the bare model, whose queries, keys and values have no bias here."""
    import torch

    with torch.no_grad():
        expected = torch_reference(image_encoder)(in_torch(images))

    module, config, params = image_encoder
    encode, pool = (jax.jit(partial(one, config)) for one in (module.encode, module.pool))
    assert_near(encode(params, images), expected.last_hidden_state.numpy())
    assert_near(pool(params, images), expected.pooler_output.numpy())


@classifier
@pytest.mark.covers("transformers on torch", family="image_encoder")
def test_gradients_of_every_parameter_of_images_equal_the_torch_reference(
    image_encoder, images, torch_reference, tmp_path
):
    """Engine case 53: those of the patches' kernel, the class token and the positions too."""
    import torch

    labels = np.array([0, 3, 4])
    reference = torch_reference(image_encoder)
    reference(in_torch(images), labels=torch.tensor(labels)).loss.backward()
    # Saved, torch's gradients have the names of the files.
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    reference.save_pretrained(tmp_path / "gradients")
    expected = load_pretrained(tmp_path / "gradients", image_encoder.module, image_encoder.config)

    found = jax.jit(jax.grad(mean_loss_of(image_encoder, labels)))(image_encoder.params, images)

    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    leaves, structure = jax.tree_util.tree_flatten_with_path(found)
    for (path, leaf), wanted in zip(leaves, structure.flatten_up_to(expected), strict=True):
        # A bias of keys shifts every score alike, and has no gradient at all.
        tolerance = 1e-5 * max(np.abs(wanted).max(), 1e-3 * largest)
        np.testing.assert_allclose(leaf, wanted, rtol=0, atol=tolerance, err_msg=str(path))


def test_a_checkpoint_of_an_image_encoder_is_saved_again_bit_by_bit(
    image_encoder, torch_reference, tmp_path
):
    """Engine case 53: theirs, ours, theirs, under the names that transformers publishes."""
    torch_reference(image_encoder).save_pretrained(tmp_path / "theirs")
    module, config = read_model(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", module, config)

    save_pretrained(tmp_path / "again", module, config, ours)

    assert config.core == image_encoder.config.core
    jax.tree.map(np.testing.assert_array_equal, ours, image_encoder.params)
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@classifier
def test_an_image_encoder_without_its_classifier_is_the_bare_model(image_encoder, images, tmp_path):
    save_pretrained(tmp_path, *image_encoder)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name: t for name, t in tensors.items() if "classifier" not in name}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})

    module, config = read_model(tmp_path)

    params = load_pretrained(tmp_path, module, config)
    assert jax.eval_shape(partial(module.encode, config), params, images).shape == (3, 10, 24)
    with pytest.raises(ValueError, match="published without a classifier"):
        jax.eval_shape(partial(module.apply, config), params, images)
    with pytest.raises(ValueError, match="published without a pooler"):
        jax.eval_shape(partial(module.pool, config), params, images)


@classifier
def test_images_of_another_shape_than_the_models_are_told(image_encoder, images):
    apply = partial(image_encoder.module.apply, image_encoder.config, image_encoder.params)

    with pytest.raises(ValueError, match=r"images are \(12, 8, 2\); the model reads \(12, 12, 2\)"):
        apply(images[:, :, :8])
    with pytest.raises(ValueError, match="patch_size is 5; it must divide image_size, 12"):
        image_encoder.config.updated({"patch_size": 5})


@classifier
def test_dropout_of_an_image_encoder_follows_each_examples_key(image_encoder, images):
    case = image_encoder.changed(hidden_dropout_prob=0.5)
    keys = jax.random.split(jax.random.key(0), 3)
    apply = jax.jit(partial(case.module.apply, case.config))

    found = apply(case.params, images, rngs=keys)

    np.testing.assert_allclose(apply(case.params, images[1:], rngs=keys[1:]), found[1:], atol=1e-5)
    assert np.abs(found - apply(case.params, images)).max() > 0.01


@classifier
@pytest.mark.covers("one device", family="image_encoder", mesh="model")
@pytest.mark.slow
def test_the_two_rules_split_an_image_encoder_and_change_no_gradient(image_encoder, images):
    """Engine case 12: heads and units are split; 1e-5 of the largest gradient, float32."""
    case, labels = image_encoder.changed(num_labels=6), np.array([0, 3, 4, 1])
    images = np.concatenate([images, images[:1]])
    step = jax.value_and_grad(mean_loss_of(case, labels))
    deployer = Deployer(2, devices=jax.devices()[:4], matmul_precision="highest")
    rules = deployer.get_sharding_rules(case.params, mean_loss_of(case, labels), images)

    loss, gradients = deployer.jit(step)(
        deployer.shard_params(case.params, rules), deployer.put_rows(images)
    )

    split = {p.path: [*p.spec].index("model") for p in rules.parameters if any(p.spec)}
    assert split == SPLIT_DIM
    expected_loss, expected = jax.jit(step)(case.params, images)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest),
        gradients,
        expected,
    )
