"""Encoders split over devices by the two rules, written out by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

pytestmark = pytest.mark.slow

# What reads the residual is split on its output side, what writes it on its input side.
SPLIT_DIM = {
    "embedding": 0, "vocabulary_bias": 0, "qkv": 3, "qkv_bias": 2, "q": 2,
    "q_bias": 1, "kv": 3, "kv_bias": 2, "out": 1, "wi": 3, "wi_bias": 2, "wo": 1,
}  # fmt: skip


def on_four_shards(case: Any, function: Any, *inputs: Any) -> Any:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def sharding(path: Any, leaf: jax.Array) -> NamedSharding:
        axes: list[str | None] = [None] * leaf.ndim
        if path[-1].key in SPLIT_DIM:
            axes[SPLIT_DIM[path[-1].key]] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shardings = jax.tree_util.tree_map_with_path(sharding, case.params)
        spread = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec("data")))
        return jax.jit(function)(jax.device_put(case.params, shardings), *spread)


def assert_near(found: Any, expected: Any) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.covers("one device", family="encoder", mesh="model")
def test_an_encoder_split_over_devices_is_the_same_model(encoder):
    case = encoder.changed(vocab_size=64)
    ids = np.random.default_rng(0).integers(2, 64, (4, 9))
    apply = partial(case.module.apply, case.config)

    found = on_four_shards(case, apply, ids)

    assert_near(found, np.asarray(jax.jit(apply)(case.params, ids)))
