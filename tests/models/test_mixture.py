"""A mixture of experts against the sum over all experts, in which those not chosen weigh zero."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.engine.sharding.mesh import equations
from redco_flow.models.feed_forward import grouped_product
from redco_flow.models.feed_forward.experts import choose_experts, mix_experts
from redco_flow.models.layer_config import MixtureConfig

EXPERTS, CHOSEN, WIDTH, UNITS = 8, 2, 12, 20
CONFIG = MixtureConfig(EXPERTS, CHOSEN, UNITS, "silu")
# What is added to the experts' logits: an expert with none, and two with all.
ROUTING = {"mixed": {}, "an expert with none": {3: -50.0}, "two with all": {1: 50.0, 6: 60.0}}


def draw(num_tokens: int, favours: dict[int, float] | None = None) -> tuple[jax.Array, ...]:
    """Tokens, their router logits and the experts' kernels."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num_tokens, EXPERTS))
    for expert, favour in (favours or {}).items():
        logits[:, expert] += favour
    shapes = [(num_tokens, WIDTH), (EXPERTS, WIDTH, 2, UNITS), (EXPERTS, UNITS, WIDTH)]
    x, wi, wo = (rng.normal(size=shape) for shape in shapes)
    return tuple(jnp.asarray(array, jnp.float32) for array in (x, logits, wi, wo))


def mix_all(x: Any, router_logits: Any, wi: Any, wo: Any) -> Any:
    """Compute every expert for every token."""
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    least = jnp.sort(probabilities, axis=-1)[:, -CHOSEN][:, None]
    kept = jnp.where(probabilities >= least, probabilities, 0)
    gate, up = jnp.moveaxis(jnp.einsum("nd,edgf->negf", x, wi), 2, 0)
    inner = jax.nn.silu(gate) * up * (kept / jnp.sum(kept, axis=-1, keepdims=True))[..., None]
    return jnp.einsum("nef,efd->nd", inner, wo)


def assert_near(found: Any, expected: Any) -> None:
    """Compare relative to the largest element, the scale that rounding errors have."""
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_the_chosen_experts_share_all_weight_by_their_probability():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]], np.float32))

    experts, weights = choose_experts(MixtureConfig(4, 2, UNITS, "silu"), logits)

    np.testing.assert_array_equal(experts, [[1, 3], [0, 2]])
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7], [0.7 / 0.85, 0.15 / 0.85]], rtol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "favours"),
    [(1, {}), *((300, favours) for favours in ROUTING.values())],
    ids=["one token", *ROUTING],
)
def test_tokens_and_all_gradients_are_those_of_computing_every_expert(num_tokens, favours):
    operands = draw(num_tokens, favours)
    cotangent = np.random.default_rng(1).normal(size=(num_tokens, WIDTH)).astype(np.float32)

    def with_gradients(function: Any) -> Any:
        outer, pull_back = jax.vjp(function, *operands)
        return outer, pull_back(jnp.asarray(cotangent))

    found = jax.jit(partial(with_gradients, partial(mix_experts, CONFIG)))()

    jax.tree.map(assert_near, found, jax.jit(partial(with_gradients, mix_all))())


def test_a_token_does_not_depend_on_those_beside_it():
    x, logits, *kernels = draw(200)
    others = draw(200, {2: 9.0})

    together = jax.jit(partial(mix_experts, CONFIG))(
        jnp.concatenate([others[0], x]), jnp.concatenate([others[1], logits]), *kernels
    )

    alone = jax.jit(partial(mix_experts, CONFIG))(x, logits, *kernels)
    assert_near(together[200:], alone)


def test_two_of_eight_experts_multiply_less_than_two_fifths_of_all_rows(monkeypatch):
    num_tokens, rows = 512, []
    product = grouped_product.product

    def counted(x: Any, kernels: Any) -> Any:
        jax.debug.callback(lambda: rows.append(len(x)))
        return product(x, kernels)

    monkeypatch.setattr(grouped_product, "product", counted)
    run = jax.jit(partial(mix_experts, CONFIG))

    jax.block_until_ready(run(*draw(num_tokens)))
    jax.effects_barrier()

    # By two kernels each; without experts, every token is multiplied by all of them.
    assert 2 * CHOSEN * num_tokens <= sum(rows) < 0.4 * 2 * EXPERTS * num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["mixtral"], indirect=True)
def test_recomputing_layers_changes_no_gradient_and_dots_computes_no_product_twice(decoder):
    # More tokens than are multiplied by every expert.
    ids = np.random.default_rng(1).integers(2, 61, (3, 24))

    def gradient_of(config: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = decoder.module.apply(config, params, ids)
            return jnp.mean(jnp.square(logits))

        return jax.grad(loss)

    def num_loops(gradient: Any) -> int:
        traced = equations(jax.make_jaxpr(gradient)(decoder.params).jaxpr)
        return sum(equation.primitive.name == "while" for equation in traced)

    keeping, dots, full = (
        gradient_of(decoder.config.updated({"remat": remat})) for remat in ("none", "dots", "full")
    )

    jax.tree.map(assert_near, jax.jit(dots)(decoder.params), jax.jit(keeping)(decoder.params))
    assert num_loops(dots) == num_loops(keeping)
    assert num_loops(full) == num_loops(keeping) + 1
