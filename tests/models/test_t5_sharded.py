from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import generate

t5 = find_model("t5")

# Redco's two rules, written out: what reads the residual is split on its output side, what
# writes it on its input side.
SPLIT_DIM = {
    "embedding": 0, "lm_head": 1, "relative_bias": 1,
    "qkv": 3, "kv": 3, "q": 2, "out": 1, "wi": 3, "wo": 1,
}  # fmt: skip


def two_rules(mesh: jax.sharding.Mesh, params: dict[str, Any]) -> Any:
    def sharding(path: Any, leaf: jax.Array) -> NamedSharding:
        axes = [None] * leaf.ndim
        if path[-1].key in SPLIT_DIM:
            axes[SPLIT_DIM[path[-1].key]] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, params)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["v1.1"], indirect=True)
def test_beam_search_of_a_split_model_gives_the_same_tokens(config, make_params, make_batch):
    config = config.updated({"num_heads": 8, "vocab_size": 64})
    params = make_params(config)
    batch = make_batch((11, 4, 7, 9), (1, 1, 1, 1))
    inputs = [batch[name] for name in ("input_ids", "attention_mask")]
    search = jax.jit(partial(generate, t5, config, max_new_tokens=7, num_beams=3))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    sharded = jax.device_put(params, two_rules(mesh, params))
    spread = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec("data")))

    expected = search(params, *inputs)
    np.testing.assert_array_equal(search(sharded, *spread).tokens, expected.tokens)
