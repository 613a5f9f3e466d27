from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.find import find_model

t5 = find_model("t5")

MODEL_INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")


@partial(jax.jit, static_argnums=0)
def logits_of(
    config: t5.Config, params: dict[str, Any], batch: dict[str, Any], rngs: Any = None
) -> Any:
    return t5.apply(config, params, *(batch[name] for name in MODEL_INPUTS), rngs=rngs)


# What does not depend on the version is shown on the one with more parts.
gated = pytest.mark.parametrize("config", ["v1.1"], indirect=True)


def mean_loss(
    params: dict[str, Any], config: t5.Config, batch: dict[str, Any], rngs: Any = None
) -> Any:
    labels = jnp.asarray(batch["labels"])
    log_probs = jax.nn.log_softmax(logits_of(config, params, batch, rngs))
    chosen = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * (labels != -100)) / jnp.sum(labels != -100)


loss_and_gradients = jax.jit(jax.value_and_grad(mean_loss), static_argnums=1)


def keys(seed: int, count: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def assert_near(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Compare relative to the largest element, the scale that rounding errors have."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=what)


@pytest.mark.covers("transformers on torch", family="t5")
def test_logits_equal_the_torch_reference(config, params, batch, torch_model):
    """Engine case 53: within 1e-5 of the largest logit, in float32."""
    import torch

    reference = torch_model(config, params)

    with torch.no_grad():
        expected = reference(**{name: torch.tensor(batch[name]) for name in MODEL_INPUTS}).logits

    assert_near(logits_of(config, params, batch), expected.numpy(), 1e-5)


@pytest.mark.slow
@pytest.mark.covers("transformers on torch", family="t5")
def test_gradients_of_every_parameter_equal_the_torch_reference(config, params, batch, torch_model):
    """Engine cases 53 and 15: torch adds both gradients of a tied embedding, and so do we."""
    import torch

    reference = torch_model(config, params)
    names = ("input_ids", "attention_mask", "labels")
    reference(**{name: torch.tensor(batch[name]) for name in names}).loss.backward()
    expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}

    _, gradients = loss_and_gradients(params, config, batch)

    layouts = jax.tree.leaves(t5.tensor_layouts(config))
    leaves = jax.tree.leaves(gradients)
    found = dict(
        tensor
        for layout, leaf in zip(layouts, leaves, strict=True)
        for tensor in layout.split(np.asarray(leaf))
    )
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_near(tensor, expected[name], 1e-5, name)


@gated
def test_a_mask_over_target_tokens_is_that_of_the_torch_reference(
    config, params, batch, torch_model
):
    import torch

    mask = np.ones_like(batch["decoder_input_ids"])
    mask[:, 1] = 0
    reference = torch_model(config, params)
    inputs = {name: torch.tensor(batch[name]) for name in MODEL_INPUTS}

    with torch.no_grad():
        expected = reference(**inputs, decoder_attention_mask=torch.tensor(mask)).logits

    apply = jax.jit(partial(t5.apply, config))
    found = apply(params, *(batch[name] for name in MODEL_INPUTS), mask)
    assert_near(found, expected.numpy(), 1e-5)


@gated
def test_padding_changes_no_row(config, params, make_batch):
    batch = make_batch(source_lengths=(5, 9), target_lengths=(4, 4))
    alone = {name: values[:1] for name, values in batch.items()}
    alone |= {name: alone[name][:, :5] for name in ("input_ids", "attention_mask")}

    together = logits_of(config, params, batch)

    assert_near(together[:1], np.asarray(logits_of(config, params, alone)), 1e-5)


@pytest.mark.slow
@gated
def test_padding_and_ignored_labels_never_give_nan(config, params, batch):
    """Engine case 43: not even a row with no source token and no label at all."""
    batch["attention_mask"][1] = 0
    batch["labels"][1] = -100

    loss, gradients = loss_and_gradients(params, config, batch)

    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_tied_model_has_no_head_of_its_own(config):
    """Engine case 15: what does not exist twice cannot come apart."""
    params = t5.abstract_params(config)

    assert ("lm_head" in params) == (not config.tie_word_embeddings)


@gated
def test_dropout_is_the_same_for_the_same_keys_and_other_for_others(config, params, batch):
    first = logits_of(config, params, batch, keys(0, 3))

    np.testing.assert_array_equal(first, logits_of(config, params, batch, keys(0, 3)))
    assert np.abs(first - logits_of(config, params, batch, keys(1, 3))).max() > 0.1
    assert np.abs(first - logits_of(config, params, batch)).max() > 0.1


@gated
def test_dropout_differs_between_equal_examples(config, params, batch):
    batch = {name: np.repeat(values[:1], 3, axis=0) for name, values in batch.items()}

    logits = logits_of(config, params, batch, keys(0, 3))

    assert np.abs(logits[0] - logits[1]).max() > 0.1
    assert np.abs(logits[1] - logits[2]).max() > 0.1


@gated
def test_dropout_follows_the_example_to_another_place_in_the_batch(config, params, batch):
    order = np.array([2, 0, 1])
    moved = {name: values[order] for name, values in batch.items()}

    logits = logits_of(config, params, batch, keys(0, 3))

    # The same masks; the last bit of a sum may fall differently in another row.
    found = logits_of(config, params, moved, keys(0, 3)[order])
    assert_near(found, np.asarray(logits)[order], 1e-6)


@gated
def test_dropout_needs_one_key_per_example(config, params, batch):
    with pytest.raises(ValueError, match=r"rngs has raw shape \(2, 2\).*\(3, 2\)"):
        logits_of(config, params, batch, keys(0, 2))


@pytest.mark.slow
@gated
def test_bfloat16_is_for_products_and_parameters_stay_float32(config, params, batch):
    narrow = config.updated({"dtype": "bfloat16"})
    inputs = (batch["input_ids"], batch["attention_mask"])

    encoded = jax.eval_shape(lambda: t5.encode(narrow, params, *inputs))
    _, gradients = jax.eval_shape(lambda: loss_and_gradients(params, narrow, batch))

    assert encoded.dtype == jnp.bfloat16
    for tree in (t5.abstract_params(narrow), gradients):
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tree))
    # bfloat16 keeps 8 bits: 0.4% a product.
    loss, expected = (
        jax.jit(mean_loss, static_argnums=1)(params, one, batch) for one in (narrow, config)
    )
    np.testing.assert_allclose(loss, expected, rtol=0.02)


@pytest.mark.slow
@gated
def test_equal_seeds_give_equal_parameters_with_the_reference_deviations(config):
    wide = config.updated({"d_model": 64, "d_kv": 16, "d_ff": 128, "vocab_size": 500})

    params = t5.init_params(wide, jax.random.key(3))

    again = t5.init_params(wide, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    attention = params["encoder"]["layers"]["attention"]
    np.testing.assert_allclose(np.std(attention["qkv"][:, :, 0]), (64 * 16) ** -0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(attention["qkv"][:, :, 1]), 64**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(params["embedding"]), 1.0, rtol=0.05)
    assert np.abs(attention["qkv"][0] - attention["qkv"][1]).max() > 0.01


@pytest.mark.slow
@gated
@pytest.mark.parametrize("are_unstacked", [True, False], ids=["layers unstacked", "layers stacked"])
def test_decoding_token_by_token_gives_the_logits_of_the_whole_target(
    config, params, batch, are_unstacked
):
    expected = np.asarray(logits_of(config, params, batch))
    if are_unstacked:
        params = t5.decoding_params(config, params)
        assert isinstance(params["decoder"]["layers"], tuple)
    ids, mask, targets = (batch[name] for name in MODEL_INPUTS)

    @jax.jit
    def fresh_cache(params: Any) -> Any:
        encoded = t5.encode(config, params, ids, mask)
        return t5.init_cache(
            config, params, encoded, mask, num_beams=1, max_length=targets.shape[1]
        )

    cache = fresh_cache(params)
    step = jax.jit(t5.decode_step, static_argnums=0)

    for position in range(targets.shape[1]):
        logits, cache = step(config, params, cache, targets[:, position : position + 1], position)

        assert_near(logits[:, 0], expected[:, position], 1e-5, f"position {position}")
