"""Decoder-only models split over devices by the two rules, written out here by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_flow.models.generation.generate import generate

pytestmark = pytest.mark.slow

# What reads the residual is split on its output side, what writes it on its input side.
SPLIT_DIM = {
    "embedding": 0, "lm_head": 1, "lm_head_bias": 0, "qkv": 3, "qkv_bias": 2, "q": 2, "q_bias": 1,
    "kv": 3, "kv_bias": 2, "out": 1, "wi": 3, "wi_bias": 2, "wo": 1, "q_up": 2, "kv_up": 2,
}  # fmt: skip
EXPERT_DIM = {"wi": 4, "wo": 2}


def split(mesh: jax.sharding.Mesh, params: Any) -> Any:
    def sharding(path: Any, leaf: np.ndarray) -> NamedSharding:
        names = [entry.key for entry in path]
        dim = (EXPERT_DIM if "experts" in names else SPLIT_DIM).get(names[-1])
        axes: list[str | None] = [None] * leaf.ndim
        # Key-value heads fewer than shards stay whole.
        if dim is not None and leaf.shape[dim] % mesh.shape["model"] == 0:
            axes[dim] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, params)


def mesh_of(num_shards: int) -> jax.sharding.Mesh:
    axis_types = (AxisType.Auto,) * 2
    return jax.make_mesh((8 // num_shards, num_shards), ("data", "model"), axis_types=axis_types)


def eight_heads(case: Any) -> Any:
    """The family with eight heads, and two of key-value where it has fewer."""
    if hasattr(case.config, "n_head"):
        return case.changed(vocab_size=64, n_head=8, n_embd=32)
    if not hasattr(case.config, "num_key_value_heads"):
        return case.changed(vocab_size=64, num_attention_heads=8, hidden_size=32)
    return case.changed(vocab_size=64, num_attention_heads=8, head_dim=6)


@pytest.mark.parametrize(
    ("decoder", "num_shards"),
    [
        ("gptj", 8),
        ("qwen2", 8),
        ("qwen3", 4),
        ("qwen3_moe", 4),
        ("olmo2-grouped", 4),
        ("smollm3", 4),
        ("gemma3_text", 4),
        ("gemma2", 4),
        ("gpt_oss", 4),
    ],
    indirect=["decoder"],
)
@pytest.mark.covers("one device", family="decoder", mesh="model")
def test_a_model_split_over_devices_is_the_same_model(decoder, num_shards):
    """Engine cases 12 and 16: also with fewer key-value heads than shards."""
    case = eight_heads(decoder)
    ids = np.random.default_rng(0).integers(2, 64, (8, 7))
    mesh = mesh_of(num_shards)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = jax.jit(partial(case.module.apply, case.config))(
            jax.device_put(case.params, split(mesh, case.params)),
            jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data"))),
        )

    expected = np.asarray(case.apply(ids))
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("decoder", ["deepseek_v3"], indirect=True)
@pytest.mark.covers("one device", family="decoder", mesh="model")
def test_generation_of_a_split_model_gives_the_same_tokens(decoder):
    """Of a latent's cache; `test_segments` has that of keys and values, with beams."""
    case = eight_heads(decoder)
    ids = np.random.default_rng(0).integers(2, 64, (4, 6))
    mask = np.ones_like(ids)
    mask[1, :3], mask[2, 4:] = 0, 0
    mesh = mesh_of(4)
    search = partial(generate, case.module, case.config, max_new_tokens=6)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        sharded = jax.device_put(case.params, split(mesh, case.params))
        spread = jax.device_put((ids, mask), NamedSharding(mesh, PartitionSpec("data")))
        found = jax.jit(search)(sharded, *spread)

    expected = jax.jit(search)(case.params, ids, mask)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
