"""Experts on several devices: the same numbers, and one reduction each way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from redco_flow.engine.sharding.mesh import MESH_AXES
from redco_flow.models.feed_forward.experts import MixtureOfExperts
from redco_flow.models.layer_config import MixtureConfig
from tests.engine.traffic import read_collectives

BATCH, LENGTH, WIDTH, EXPERTS, UNITS = 8, 40, 24, 4, 16
BATCH_AXES = ("data", "fsdp")


class Case:
    """A mixture's output and gradients, on one device or spread over a mesh."""

    def __init__(self, batch: int = BATCH, length: int = LENGTH, units: int = UNITS) -> None:
        self.module = MixtureOfExperts(MixtureConfig(EXPERTS, 2, units, "silu"), WIDTH, 0.3, 0.3)
        self.x, self.cotangent = jax.random.normal(jax.random.key(0), (2, batch, length, WIDTH))
        self.params = jax.jit(self.module.init)(jax.random.key(1), self.x)["params"]

    def run(self, params: Any, x: jax.Array) -> Any:
        def mix(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            outer, _ = self.module.apply({"params": params}, x)
            return outer, jnp.sum(outer * self.cotangent)

        outer = mix(params, x)[0]
        return outer, jax.grad(lambda *args: mix(*args)[1], argnums=(0, 1))(params, x)

    def spread(self, mesh: jax.sharding.Mesh) -> tuple[Any, jax.Array]:
        """Lay operands out as the two rules and the batch do; whole where it does not come out."""
        sizes = dict(mesh.shape)
        model = "model" if self.params["wo"].shape[1] % sizes["model"] == 0 else None
        specs = {"router": P(), "wi": P(None, None, None, model), "wo": P(None, model)}
        rows, context = sizes["data"] * sizes["fsdp"], sizes["context"]
        of_x = P(
            BATCH_AXES if self.x.shape[0] % rows == 0 else None,
            "context" if self.x.shape[1] % context == 0 else None,
        )
        params = {
            name: jax.device_put(leaf, NamedSharding(mesh, specs[name]))
            for name, leaf in self.params.items()
        }
        return params, jax.device_put(self.x, NamedSharding(mesh, of_x))


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def assert_near(found: Any, expected: Any) -> None:
    """Compare relative to the largest element, the scale that rounding errors have."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ((1, 2, 2, 2), {}),
        # Few tokens, as in decoding, and units that do not come out even: each model shard
        # computes all of them.
        ((2, 1, 1, 4), {"length": 1, "units": 10}),
        # Neither rows nor tokens come out even.
        ((2, 1, 4, 1), {"batch": 3, "length": 50}),
    ],
    ids=["fsdp and context", "few tokens, uneven units", "uneven tokens"],
)
def test_experts_on_several_devices_are_the_same_with_the_same_gradients(sizes, dims):
    """Engine case 12, losses and gradients on any mesh: they equal those of one device."""
    case, mesh = Case(**dims), mesh_of(*sizes)
    expected = jax.jit(case.run)(case.params, case.x)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = jax.jit(case.run)(*case.spread(mesh))

    jax.tree.map(assert_near, found, expected)


@pytest.mark.slow
def test_a_mixture_reduces_one_activation_each_way_and_moves_no_kernel():
    """Engine case 17: over the model shards; the router's logits have a gradient to add, too."""
    case, mesh = Case(), mesh_of(1, 1, 1, 4)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        hlo = jax.jit(case.run).lower(*case.spread(mesh)).compile().as_text()

    found = [one for one in read_collectives(hlo) if one.group_size > 1]
    floats = sum(one.num_bytes * one.count for one in found) / 4
    assert {one.kind for one in found} == {"all-reduce"}
    assert floats == BATCH * LENGTH * (2 * WIDTH + EXPERTS)


def test_tokens_are_sorted_where_they_are_and_data_shards_add_up_gradients_alone():
    case, mesh = Case(), mesh_of(4, 1, 1, 2)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        hlo = jax.jit(case.run).lower(*case.spread(mesh)).compile().as_text()

    found: Counter[tuple[str, int]] = Counter()
    for one in read_collectives(hlo):
        found[one.kind, one.group_size] += one.num_bytes * one.count // 4
    kernels = 3 * EXPERTS * WIDTH * UNITS // 2
    rows = BATCH // 4 * LENGTH
    assert found == {
        ("all-reduce", 2): rows * (2 * WIDTH + EXPERTS),
        ("all-reduce", 4): kernels + WIDTH * EXPERTS,
    }
