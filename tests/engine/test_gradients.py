"""The gradient of a mean over a whole global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.step import Sums, clip, global_norm, mean_gradients

DIM = 5


def token_data(num_rows=8, length=7):
    """Linear regression per token, with very unequal numbers of counted tokens per row."""
    rng = np.random.default_rng(1)
    counts = np.array([7, 0, 1, 3, 7, 2, 0, 1])[:num_rows]
    return {
        "x": rng.normal(size=(num_rows, length, DIM)).astype(np.float32),
        "y": rng.normal(size=(num_rows, length)).astype(np.float32),
        "counted": (np.arange(length) < counts[:, None]).astype(np.float32),
    }


def sums(w, batch):
    errors = (batch["x"] @ w - batch["y"]) ** 2 * batch["counted"]
    return Sums(jnp.sum(errors), jnp.sum(batch["counted"]), {"bias": jnp.sum(batch["y"])})


def numpy_gradient(w, batch):
    """d/dw of the mean over all counted tokens, float64, one token at a time."""
    gradient, total, weight = np.zeros(DIM), 0.0, 0.0
    x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
    for row, token in np.ndindex(y.shape):
        if batch["counted"][row, token]:
            error = x[row, token] @ w - y[row, token]
            gradient += 2 * error * x[row, token]
            total += error**2
            weight += 1
    return gradient / weight, total, weight


def split(batch, num_micro):
    return {name: x.reshape(num_micro, -1, *x.shape[1:]) for name, x in batch.items()}


@pytest.mark.parametrize("num_micro", [1, 2, 4, 8])
def test_accumulation_gives_the_mean_over_tokens_and_not_a_mean_of_means(num_micro):
    """Engine cases 35 and 37: with 8 micro-batches two of them have no token at all."""
    batch = token_data()
    w = np.linspace(-1, 1, DIM)

    gradient, (total, weight, measures) = mean_gradients(
        sums, jnp.asarray(w, jnp.float32), split(batch, num_micro)
    )

    expected, expected_total, expected_weight = numpy_gradient(w, batch)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    np.testing.assert_allclose(total, expected_total, rtol=1e-6)
    assert weight == expected_weight
    np.testing.assert_allclose(measures["bias"], np.sum(batch["y"]), rtol=1e-5)


def test_a_batch_without_any_token_has_a_zero_gradient():
    """Engine case 37: the loss is finite, and the batch contributes nothing."""
    batch = token_data() | {"counted": np.zeros((8, 7), np.float32)}

    gradient, (total, weight, _) = mean_gradients(sums, jnp.ones(DIM), split(batch, 4))

    np.testing.assert_array_equal(gradient, np.zeros(DIM))
    assert total == weight == 0


def test_gradients_of_bfloat16_parameters_are_accumulated_in_float32():
    """Engine case 41: parameters and sums stay in float32."""

    def linear(w, batch):
        return Sums(jnp.sum(w.astype(jnp.float32) * batch), jnp.float32(1))

    # 1 + 512 × 2^-10: bfloat16 would stay at 1.
    batch = np.concatenate([[1.0], np.full(512, 2.0**-10)]).astype(np.float32)

    gradient, _ = mean_gradients(linear, jnp.bfloat16(1), batch.reshape(-1, 1))

    assert gradient.dtype == jnp.float32
    assert gradient == np.float32(1.5) / np.float32(513)


def test_the_global_norm_of_sharded_gradients_gathers_none():
    """Engine case 40: gradients are clipped after accumulation, by the global norm, without
    all-gathering a gradient.
    """
    deployer = Deployer(4)
    rng = np.random.default_rng(0)
    host = {
        "up": rng.normal(size=(16, 32)).astype(np.float32),
        "down": rng.normal(size=(32, 16)).astype(np.float32),
        "norm": rng.normal(size=16).astype(np.float32),
    }
    rules = deployer.get_sharding_rules(
        host, lambda p, x: x + jnp.tanh(x * p["norm"] @ p["up"]) @ p["down"], np.ones((2, 16))
    )
    gradients = deployer.shard_params(host, rules)

    compiled = jax.jit(global_norm).lower(gradients).compile()

    expected = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in host.values()))
    np.testing.assert_allclose(compiled(gradients), expected, rtol=1e-6)
    assert "all-gather" not in compiled.as_text()


def test_clipping_shortens_long_gradients_and_leaves_short_ones():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}

    clipped = clip(gradients, global_norm(gradients), 2.5)
    kept = clip(gradients, global_norm(gradients), 5.5)

    np.testing.assert_allclose(clipped["a"], [1.5, 0])
    np.testing.assert_allclose(clipped["b"], 2)
    assert kept["b"] == 4


def test_clipping_gradients_in_bfloat16_rounds_them_once():
    gradients = jnp.linspace(1, 2, 64).astype(jnp.bfloat16)

    clipped = clip(gradients, jnp.array(3.0, jnp.float32), 1.0)

    np.testing.assert_array_equal(clipped, (gradients.astype(np.float32) / 3).astype(jnp.bfloat16))
