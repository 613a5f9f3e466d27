"""What a plan says of shards and batches is what the engine says of the same devices."""

from __future__ import annotations

import itertools

import jax
import pytest

from redco_flow.engine.data.order import plan_batch
from redco_flow.engine.sharding.mesh import DataProcess, build_mesh
from redco_flow.stages.device_layout import layout_problems
from redco_flow.stages.train.config import Config

SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("num_devices", [1, 3, 4, 6, 8])
def test_a_plan_refuses_the_layouts_that_the_engine_refuses(num_devices):
    """The engine's mesh and batch layout are the oracle, for all combinations of sizes."""
    devices = jax.devices()[:num_devices]
    assert len(devices) == num_devices
    for model, context, fsdp, rows in itertools.product(SIZES, SIZES, SIZES, (None, 2)):
        config = Config.model_construct(
            num_model_shards=model,
            num_context_shards=context,
            fsdp=fsdp,
            global_batch_size=24,
            per_device_batch_size=rows,
        )
        try:
            mesh = build_mesh(model, devices, num_fsdp_shards=fsdp, num_context_shards=context)
            plan_batch(24, rows, mesh.shape["data"] * mesh.shape["fsdp"], DataProcess(0, 1))
            is_refused = False
        except ValueError:
            is_refused = True

        found = list(layout_problems(config, num_devices, batch="global_batch_size"))

        assert bool(found) == is_refused, (model, context, fsdp, rows, found)
