"""Losses that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.loss import cross_entropy, per_example_loss


def numpy_cross_entropy(logits, labels, smoothing=0.0, z_loss=0.0):
    """Sum and count per example in float64, one label at a time."""
    totals, counts = np.zeros(len(labels)), np.zeros(len(labels))
    for b, t in np.ndindex(labels.shape):
        if labels[b, t] < 0:
            continue
        row = logits[b, t].astype(np.float64)
        log_z = row.max() + np.log(np.sum(np.exp(row - row.max())))
        log_p = row - log_z
        totals[b] += z_loss * log_z**2
        totals[b] -= (1 - smoothing) * log_p[labels[b, t]] + smoothing * log_p.mean()
        counts[b] += 1
    return totals, counts


def some_logits(shape=(3, 5, 11)):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, shape[-1], shape[:-1])
    labels[0, 2:] = -100
    labels[2] = -100
    labels[2, 0] = -1  # no class, and not the ignored label
    return rng.normal(0, 4, shape).astype(np.float32), labels


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.1)])
def test_cross_entropy_is_that_of_a_float64_loop(smoothing, z_loss):
    logits, labels = some_logits()

    totals, weights = cross_entropy(logits, labels, label_smoothing=smoothing, z_loss=z_loss)

    expected_totals, expected_weights = numpy_cross_entropy(logits, labels, smoothing, z_loss)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-6)
    np.testing.assert_array_equal(weights, expected_weights)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.1)])
def test_the_gradient_is_that_of_the_formula_differentiated_term_by_term(smoothing, z_loss):
    logits, labels = some_logits()

    def formula(x):
        log_z = jax.nn.logsumexp(x, axis=-1)
        log_p = x - log_z[..., None]
        picked = jnp.take_along_axis(log_p, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        likelihood = (1 - smoothing) * picked + smoothing * log_p.mean(-1)
        return jnp.sum((z_loss * log_z**2 - likelihood) * (labels >= 0))

    def ours(x):
        return cross_entropy(x, labels, label_smoothing=smoothing, z_loss=z_loss)[0].sum()

    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(formula))(logits.astype(np.float64))

    np.testing.assert_allclose(jax.jit(jax.grad(ours))(logits), expected, rtol=1e-5, atol=1e-6)


def test_ignored_labels_and_padding_give_neither_nan_nor_gradient():
    """Engine case 43: the loss is never NaN."""
    logits, labels = some_logits()
    logits[1, 0] = 1e30

    totals, weights = cross_entropy(logits, labels)
    gradient = jax.grad(lambda x: cross_entropy(x, labels)[0].sum())(logits)

    assert np.isfinite(totals).all()
    assert np.isfinite(gradient).all()
    assert totals[2] == weights[2] == 0
    assert (np.asarray(gradient)[labels < 0] == 0).all()
    assert (np.asarray(gradient)[0, 0] != 0).any()


def test_cross_entropy_of_bfloat16_logits_is_summed_in_float32():
    logits = jnp.zeros((1, 4096, 8), jnp.bfloat16)

    totals, weights = cross_entropy(logits, jnp.zeros((1, 4096), jnp.int32))

    # bfloat16 has 8 bits: a sum of 4096 equal terms would be off by far more.
    np.testing.assert_allclose(totals, [4096 * np.log(8)], rtol=1e-6)
    assert weights == 4096


def test_cross_entropy_over_a_sharded_vocabulary_never_gathers_the_logits():
    deployer = Deployer(8)
    logits, labels = some_logits((4, 6, 64))
    sharded = jax.device_put(logits, deployer.named_sharding(None, None, "model"))

    def loss(x):
        return cross_entropy(x, labels, z_loss=0.1)[0].sum()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(sharded).compile()
    value, gradient = compiled(sharded)

    expected = numpy_cross_entropy(logits, labels, z_loss=0.1)[0].sum()
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(loss))(logits), rtol=1e-5, atol=1e-6)
    assert "all-reduce" in compiled.as_text()
    assert "all-gather" not in compiled.as_text()


def batch_of(count):
    return {"x": jnp.arange(count, dtype=jnp.float32)}


def test_a_scalar_loss_is_the_loss_of_equally_weighted_examples():
    def mean_square(params, batch, rngs, is_training):
        return jnp.mean((batch["x"] - params) ** 2)

    totals, weights, _ = per_example_loss(
        mean_square, 1.0, batch_of(4), jax.random.split(jax.random.key(0), 4), is_training=True
    )

    np.testing.assert_array_equal(totals, [1, 0, 1, 4])
    np.testing.assert_array_equal(weights, np.ones(4))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (jnp.zeros(2), r"a scalar loss of shape \(2,\), expected \(\)"),
        ((jnp.zeros(()), jnp.zeros(3)), r"totals of shape \(\), expected \(3,\)"),
        ((jnp.zeros(3), jnp.zeros((3, 2))), r"weights of shape \(3, 2\), expected \(3,\)"),
        ((jnp.zeros(3),) * 4, "returned 4 values"),
        ((jnp.zeros(3),) * 3, "third value of type ArrayImpl"),
        ((jnp.zeros(3), jnp.zeros(3), {"x": 0.0}), r"x of shape \(\), expected \(3,\)"),
        ((jnp.zeros(3), jnp.zeros(3), {"loss": jnp.zeros(3)}), "a measure 'loss'"),
    ],
)
def test_a_loss_of_another_shape_is_refused(result, message):
    keys = jax.random.split(jax.random.key(0), 3)

    with pytest.raises(ValueError, match=message):
        per_example_loss(lambda *_: result, None, batch_of(3), keys, is_training=False)
