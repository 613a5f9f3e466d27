"""What every decoder-only family does, whatever computes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# What does not depend on the family is shown on one with many parts.
one_family = pytest.mark.parametrize("decoder", ["llama3"], indirect=True)
with_dropout = pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
# Learned positions, partial and whole rotary ones, windows in all, some and no layers.
POSITIONS = ("gpt2", "gemma2", "gptj", "opt")
by_positions = pytest.mark.parametrize(
    "decoder",
    [*POSITIONS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in POSITIONS[2:])],
    indirect=True,
)
# Biases and tied heads; sinks and experts.
by_parts = pytest.mark.parametrize(
    "decoder", ["gpt2", pytest.param("gpt_oss", marks=pytest.mark.slow)], indirect=True
)


def logits_of(case: Any, *inputs: Any, **named: Any) -> np.ndarray:
    return np.asarray(case.apply(*inputs, **named))


def keys(seed: int, count: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare relative to the largest element, the scale that rounding errors have."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@by_positions
def test_padding_on_either_side_changes_no_row(decoder):
    rng = np.random.default_rng(0)
    row = rng.integers(2, 61, (1, 7))
    alone = logits_of(decoder, row)

    for before, after in ((4, 0), (0, 4)):
        around = ((0, 0), (before, after))
        padded = np.pad(row, around, constant_values=60)
        mask = np.pad(np.ones_like(row), around)
        found = logits_of(decoder, padded, mask)
        assert_near(found[:, before : before + 7], alone)


@by_positions
def test_packed_documents_give_the_logits_of_each_alone(decoder):
    """Engine case 34: token for token."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 61, (1, length)) for length in (5, 1, 7)]
    packed = np.concatenate([*documents, np.zeros((1, 3), int)], axis=1)
    segment_ids = np.repeat([1, 2, 3, 0], [5, 1, 7, 3])[None]

    found = logits_of(decoder, packed, segment_ids=segment_ids)

    expected = np.concatenate([logits_of(decoder, document) for document in documents], axis=1)
    assert_near(found[:, :13], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "are_unstacked"),
    [*((name, True) for name in ("gpt2", "mistral")), ("gemma2", False)],
    indirect=["decoder"],
)
def test_decoding_token_by_token_gives_the_logits_of_the_whole(
    decoder, padded_batch, are_unstacked
):
    """With a prompt padded in front, one padded behind and one not at all."""
    module, config, params = decoder
    if are_unstacked:
        params = module.decoding_params(config, params)
        assert isinstance(params["layers"], tuple)
    prompt = {name: padded_batch[name][:, :6].copy() for name in ("input_ids", "attention_mask")}
    prompt["attention_mask"][1, 4:] = 0
    lengths = prompt["attention_mask"].sum(axis=1)
    follows = np.random.default_rng(2).integers(2, 61, (3, 5))
    step = jax.jit(module.decode_step, static_argnums=0)
    prefill = jax.jit(partial(module.prefill, config, num_beams=1, max_length=6))

    cache = prefill(params, *prompt.values())
    tokens, found = cache.source.last_token[:, None], []
    for position in range(6):
        logits, cache = step(config, params, cache, tokens, position)
        found.append(np.asarray(logits[:, 0]))
        tokens = follows[:, position : position + 1]

    for row in range(3):
        is_token = prompt["attention_mask"][row] == 1
        whole = np.concatenate([prompt["input_ids"][row][is_token], follows[row]])
        expected = logits_of(decoder, whole[None])[0, lengths[row] - 1 :]
        assert_near(np.stack(found)[:, row], expected)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["gptj", "gpt_oss"], indirect=True)
def test_decoding_reads_kernels_in_the_products_dtype_and_gives_the_same(decoder, padded_batch):
    module, _, params = decoder
    config = decoder.config.updated({"dtype": "bfloat16"})
    cast = module.decoding_params(config, params)

    # Else XLA for CPUs keeps more than bfloat16's bits.
    @partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def first_logits(params: Any) -> jax.Array:
        prompt = (padded_batch["input_ids"], padded_batch["attention_mask"])
        cache = module.prefill(config, params, *prompt, num_beams=1, max_length=2)
        tokens = cache.source.last_token[:, None]
        return module.decode_step(config, params, cache, tokens, 0)[0]

    np.testing.assert_array_equal(first_logits(cast), first_logits(params))
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(cast)
        if leaf.dtype == jnp.float32
    }
    assert {name.rpartition("/")[2] for name in names if "norm" not in name} == {
        "gptj": {"lm_head_bias"},
        "gpt_oss": {"sinks", "router_bias"},
    }[config.model_type]


@pytest.mark.parametrize("decoder", ["gpt_oss"], indirect=True)
def test_a_row_of_padding_alone_never_gives_nan(decoder, padded_batch):
    """Engine case 43: the loss is never NaN."""
    ids, mask = padded_batch["input_ids"], padded_batch["attention_mask"].copy()
    mask[1] = 0

    @jax.jit
    def loss(params: Any) -> jax.Array:
        logits = decoder.module.apply(decoder.config, params, ids, mask)
        return jnp.sum(jax.nn.log_softmax(logits)[..., 0] * mask)

    value, gradients = jax.value_and_grad(loss)(decoder.params)

    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@one_family
def test_no_token_sees_the_future(decoder, padded_batch):
    ids = padded_batch["input_ids"]
    changed = ids.copy()
    changed[:, 6:] = 5

    np.testing.assert_array_equal(
        logits_of(decoder, ids)[:, :6], logits_of(decoder, changed)[:, :6]
    )


@pytest.mark.parametrize("decoder", ["mistral"], indirect=True)
def test_a_window_hides_what_lies_further_back_in_every_layer(decoder, padded_batch):
    ids = padded_batch["input_ids"]
    changed = ids.copy()
    changed[:, 0] = 5

    found, expected = logits_of(decoder, changed), logits_of(decoder, ids)

    # Three layers of windows of 4 pass on what stands up to 9 tokens back.
    assert np.abs(found[:, :10] - expected[:, :10]).max(axis=(0, 2)).all()
    np.testing.assert_array_equal(found[:, 10], expected[:, 10])


@pytest.mark.slow
@with_dropout
def test_dropout_belongs_to_the_example_and_its_key(decoder, padded_batch):
    """Engine case 42: each example has its own mask, which is the same after resuming."""
    ids, order = padded_batch["input_ids"], np.array([2, 0, 1])

    first = logits_of(decoder, ids, rngs=keys(0, 3))

    np.testing.assert_array_equal(first, logits_of(decoder, ids, rngs=keys(0, 3)))
    assert_near(logits_of(decoder, ids[order], rngs=keys(0, 3)[order]), first[order], 1e-6)
    equal = logits_of(decoder, np.repeat(ids[:1], 3, axis=0), rngs=keys(0, 3))
    assert np.abs(equal[0] - equal[1]).max() > 0.1
    assert np.abs(first - logits_of(decoder, ids)).max() > 0.1


@pytest.mark.parametrize("decoder", ["gemma2", "mixtral"], indirect=True)
def test_bfloat16_is_for_products_and_parameters_stay_float32(decoder, padded_batch):
    """Engine case 41: parameters and sums stay in float32."""
    module, config, params = decoder
    narrow = config.updated({"dtype": "bfloat16"})
    ids = padded_batch["input_ids"]

    logits = jax.jit(partial(module.apply, narrow))(params, ids)
    sizes = {"num_beams": 1, "max_length": 2}
    cache = jax.eval_shape(lambda: module.prefill(narrow, params, ids, np.ones_like(ids), **sizes))

    assert (logits.dtype, cache.heads.blocks[0][0].dtype) == (jnp.float32, jnp.bfloat16)
    shapes = module.abstract_params(narrow)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))
    # 8 bits: 0.4% a product, through three layers.
    expected = logits_of(decoder, ids)
    assert np.abs(logits - expected).mean() < 0.03 * np.abs(expected).mean()


@by_parts
def test_fresh_parameters_are_those_of_the_seed_with_the_familys_deviation(decoder):
    module, config, _ = decoder

    params = module.init_params(config, jax.random.key(3))

    again = module.init_params(config, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    np.testing.assert_allclose(np.std(params["embedding"]), 0.02, rtol=0.1)
    out = params["layers"]["attention"]["out"]
    assert np.abs(out[0] - out[1]).max() > 0.001
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), module.abstract_params(config))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == shapes
