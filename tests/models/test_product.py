"""Products with their own backward pass against what differentiation makes of plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models.projections import product, wide_product

rng = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("lead", "contracted", "given"),
    [
        ((2, 3), (8,), (32,)),
        ((2, 3), (32,), (8,)),
        ((5,), (8,), (3, 4, 2)),
        ((2, 3), (4, 6), (8,)),
        ((2, 3), (4, 2), (8, 3)),
    ],
    ids=["widens", "narrows", "to heads", "from heads", "heads to heads"],
)
def test_values_and_gradients_are_those_of_the_plain_product(lead, contracted, given):
    x, kernel, direction = (
        draw(*lead, *contracted),
        draw(*contracted, *given),
        draw(*lead, *given),
    )
    num_contracted = len(contracted)

    def gradients(multiply):
        return jax.value_and_grad(
            lambda x, kernel: jnp.sum(multiply(x, kernel, num_contracted) * direction), (0, 1)
        )(x, kernel)

    for ours, plain in zip(
        jax.tree.leaves(gradients(product)), jax.tree.leaves(gradients(jnp.tensordot)), strict=True
    ):
        assert ours.shape == plain.shape
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_wide_product_is_float32_and_its_gradients_are_computed_in_the_inputs_dtype():
    x, kernel = draw(2, 3, 8, dtype=jnp.bfloat16), draw(8, 5, dtype=jnp.bfloat16)

    result, pull_back = jax.vjp(wide_product, x, kernel)
    to_x, to_kernel = pull_back(jnp.ones_like(result))

    assert result.dtype == jnp.float32
    np.testing.assert_allclose(
        result, jnp.tensordot(x.astype(jnp.float32), kernel.astype(jnp.float32), 1), rtol=1e-5
    )
    assert (to_x.dtype, to_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16)
    text = jax.jit(jax.grad(lambda x: wide_product(x, kernel).sum())).lower(x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("f32" not in line for line in products)
