from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.attention.bias import row_biases
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.layer_config import AttentionConfig
from redco_flow.models.projections import merge_together, project_together
from redco_flow.models.transformer.blocks import Attention, activate


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def attention_in_loops(query: Any, key: Any, value: Any, visible: np.ndarray) -> np.ndarray:
    """Softmax attention by definition; heads 0 and 1 share group 0, heads 2 and 3 group 1."""
    found = np.zeros(query.shape)
    for row, at, head in np.ndindex(*query.shape[:3]):
        group = head * key.shape[2] // query.shape[2]
        scores = np.asarray(key[row, :, group] @ query[row, at, head], np.float64) * 6**-0.5
        weights = np.where(visible[row, at], np.exp(scores), 0)
        found[row, at, head] = weights / weights.sum() @ np.asarray(value[row, :, group])
    return found


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_grouped_attention_is_softmax_attention_by_definition(is_causal, window):
    config = AttentionConfig(4, 2, 6, 6**-0.5, is_causal=is_causal)
    query, key, value = draw(2, 5, 4, 6), draw(2, 5, 2, 6), draw(2, 5, 2, 6) + 1
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    visible = np.broadcast_to(mask[:, None, :] == 1, (2, 5, 5))
    back = np.arange(5)[:, None] - np.arange(5)
    visible = visible & (back >= 0) if is_causal else visible
    # Row 1's last query would see nothing but padding.
    visible = visible & (back < window) if window else visible

    found = attend_grouped(config, query, key, value, row_biases(mask, None), window=window)

    is_some = visible.any(axis=2)
    expected = attention_in_loops(query, key, value, visible | ~is_some[:, :, None])
    np.testing.assert_allclose(np.asarray(found)[is_some], expected[is_some], atol=1e-5)


def test_the_scale_of_scores_is_not_rounded_to_bfloat16():
    """That of Gemma 2 27B, 1 / 12, would be 0.2% larger, and so would all scores."""
    config = AttentionConfig(1, 1, 1, 1 / 12, is_causal=False)
    query = jnp.linspace(8, 16, 1000).reshape(1, -1, 1, 1).astype(jnp.bfloat16)
    value = jnp.array([1.0, 0.0]).reshape(1, 2, 1, 1)

    found = attend_grouped(config, query, value.astype(jnp.bfloat16), value)

    expected = 1 / (1 + np.exp(-np.asarray(query, np.float64) / 12))
    # Queries times the scale are rounded, up as often as down; 0.2% would be 4e-4.
    assert abs(np.mean(found - expected)) < 1e-4


EXACT: dict[str, Callable[[float], float]] = {
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_new": lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("activation", EXACT)
def test_an_activation_in_bfloat16_is_the_exact_one_rounded(activation):
    x = jnp.linspace(-3, 6, 2000).astype(jnp.bfloat16)

    found = jax.jit(activate, static_argnums=1)(x[None], activation)

    expected = [EXACT[activation](float(one)) for one in x]
    # Half of the last of 8 bits; float32's own errors are far smaller.
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1.01 * 2**-8)


@pytest.mark.parametrize("activation", EXACT)
def test_gates_gradients_in_bfloat16_are_the_exact_ones_but_for_a_few_roundings(activation):
    x = jnp.linspace(-4, 4, 2000).astype(jnp.bfloat16)
    gates = jnp.stack([x, jnp.ones_like(x)])

    found = jax.jit(jax.grad(lambda gates: activate(gates, activation).sum()))(gates)

    step, exact = 1e-5, EXACT[activation]
    points = np.asarray(x, np.float64)
    slopes = [(exact(one + step) - exact(one - step)) / (2 * step) for one in points]
    expected = np.array([slopes, [exact(one) for one in points]])
    # A rounding is half of the last of 8 bits, 2**-8 of what is near 1; tanh's chain has most.
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert np.all(error <= 5 * 2**-8 * np.maximum(1.0, np.abs(expected)))


class CrossAttention(nn.Module):
    """Cross-attention as a layer puts it together."""

    @nn.compact
    def __call__(self, hidden: jax.Array, source: jax.Array) -> jax.Array:
        config = AttentionConfig(4, 4, 6, 6**-0.5, is_causal=False, is_cross=True)
        attention = Attention(config, 16, 0.3, 0.3, name="attention")
        query_kernel, source_kernel = attention.kernels()
        (query,) = project_together(hidden, [query_kernel])
        (both,) = project_together(source, [source_kernel])
        heads = attend_grouped(config, *attention.heads([query, both], None, None))
        return merge_together([(heads, attention.out)])


def test_attention_may_be_over_another_sequence():
    hidden, source = draw(2, 3, 16), draw(2, 5, 16)
    found, variables = CrossAttention().init_with_output(jax.random.key(0), hidden, source)

    kernels = {name: np.asarray(k) for name, k in variables["params"]["attention"].items()}
    query = np.einsum("btd,dhk->bthk", hidden, kernels["q"])
    key, value = np.einsum("bsd,dchk->cbshk", source, kernels["kv"])
    heads = attention_in_loops(query, key, value, np.ones((2, 3, 5), bool))
    expected = np.einsum("bthk,hkd->btd", heads, kernels["out"])
    np.testing.assert_allclose(found, expected, atol=1e-5)
