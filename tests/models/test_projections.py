from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from redco_flow.models.projections import (
    SplitKernel,
    merge_together,
    num_groups_held,
    num_model_shards,
    project_together,
)


def traced_for(num_shards: int):
    mesh = AbstractMesh((2, num_shards), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.sharding.use_abstract_mesh(mesh)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_without_a_mesh_there_is_one_shard():
    assert num_model_shards() == 1


def test_the_mesh_that_is_traced_for_says_how_many_shards_there_are():
    with traced_for(4):
        assert num_model_shards() == 4


def test_a_mesh_without_a_model_axis_has_one_shard():
    with jax.sharding.use_abstract_mesh(AbstractMesh((8,), ("data",))):
        assert num_model_shards() == 1


# 3 shards divide neither kernel: then each is a product of its own.
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_kernels_projected_together_give_what_each_gives_alone(num_shards):
    x, query, both = draw(2, 5, 6), draw(6, 8, 3), draw(6, 2, 4, 3)

    with traced_for(num_shards):
        found = project_together(x, [SplitKernel(query, 1), SplitKernel(both, 2)])

    expected = [np.einsum("btd,dhk->bthk", x, query), np.einsum("btd,dchk->btchk", x, both)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_products_merged_together_give_the_sum_of_each_alone(num_shards):
    heads, out, inner, wo = draw(2, 5, 4, 3), draw(4, 3, 6), draw(2, 5, 8), draw(8, 6)

    with traced_for(num_shards):
        found = merge_together([(heads, out), (inner, wo)])

    expected = np.einsum("bthk,hkd->btd", heads, out) + inner @ wo
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_over_several_shards_there_is_one_product():
    x, kernels = draw(2, 5, 6), [SplitKernel(draw(6, 8, 3), 1), SplitKernel(draw(6, 2, 4, 3), 2)]

    def num_products(num_shards: int) -> int:
        with traced_for(num_shards):
            jaxpr = jax.make_jaxpr(lambda x: project_together(x, kernels))(x)
        return str(jaxpr).count("dot_general[")

    assert (num_products(1), num_products(4)) == (2, 1)


@pytest.mark.parametrize(
    ("num_groups", "num_heads", "num_shards", "held"),
    [(4, 8, 2, 4), (2, 8, 4, 4), (1, 8, 8, 8), (3, 6, 2, 6), (2, 6, 4, 2)],
)
def test_groups_are_repeated_until_the_shards_can_split_them(
    num_groups, num_heads, num_shards, held
):
    """Engine case 16; the last cannot come out even and stays as it is."""
    with traced_for(num_shards):
        assert num_groups_held(num_groups, num_heads) == held
