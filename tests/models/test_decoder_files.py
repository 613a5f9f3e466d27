"""Checkpoints of decoder-only models as they have been published over the years."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained
from redco_flow.models.hub.tensors import TensorFiles, named_tensors


@pytest.fixture
def checkpoint(decoder, tmp_path):
    save_pretrained(tmp_path, *decoder)
    return tmp_path


def change_tensors(directory: Any, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def assert_loads_as(directory: Any, params: Any, shardings: Any = None) -> None:
    module, config = read_model(directory)
    found = load_pretrained(directory, module, config, shardings)
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_a_bare_gpt2_with_its_masks_is_read(checkpoint, decoder):
    def publish_as_of_old(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for layer in range(3)}
        return bare | masks

    change_tensors(checkpoint, publish_as_of_old)

    assert_loads_as(checkpoint, decoder.params)


@pytest.mark.parametrize("decoder", ["opt", "opt-350m"], indirect=True)
def test_an_opt_without_its_outer_name_is_read(checkpoint, decoder):
    change_tensors(
        checkpoint,
        lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()},
    )

    assert_loads_as(checkpoint, decoder.params)


@pytest.mark.parametrize("decoder", ["llama3"], indirect=True)
def test_angles_that_were_stored_are_read_over(checkpoint, decoder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(checkpoint, lambda tensors: {**tensors, name: np.ones(6, np.float32)})

    assert_loads_as(checkpoint, decoder.params)


@pytest.mark.parametrize("decoder", ["gpt2", "llama", "opt"], indirect=True)
def test_a_tied_head_stored_beside_the_embedding_is_read_over(checkpoint, decoder):
    """Engine case 15, tied embeddings: they stay tied after sharding, saving and loading."""
    embedding = np.asarray(decoder.params["embedding"])
    change_tensors(checkpoint, lambda tensors: {**tensors, "lm_head.weight": embedding.copy()})

    assert read_model(checkpoint)[1] == decoder.config
    assert_loads_as(checkpoint, decoder.params)


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_a_head_unlike_the_embedding_unties_a_config_that_says_tied(checkpoint, decoder):
    head = np.asarray(decoder.params["embedding"]) + 1
    change_tensors(checkpoint, lambda tensors: {**tensors, "lm_head.weight": head})

    assert_loads_as(checkpoint, {**decoder.params, "lm_head": head.T})


@pytest.mark.parametrize("decoder", ["gpt2", "llama3", "mixtral"], indirect=True)
def test_each_device_gets_its_shard(checkpoint, decoder):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split_dims = {"qkv": 3, "kv": 3, "q": 2, "out": 1, "wo": -2, "wi": -1}

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes = [None] * leaf.ndim
        if path[-1].key in split_dims:
            axes[split_dims[path[-1].key]] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = jax.tree_util.tree_map_with_path(sharding, decoder.params)

    assert_loads_as(checkpoint, decoder.params, shardings)


@pytest.mark.parametrize("decoder", ["gpt_oss"], indirect=True)
def test_experts_of_four_bits_are_read_as_the_torch_reference_does(decoder, tmp_path):
    """Every number of four bits is one of bfloat16, so they are equal to the bit; parts too."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    case = decoder.changed(intermediate_size=64)
    save_pretrained(tmp_path, *case)
    rng = np.random.default_rng(0)
    expected = {}

    def pack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
            num_experts, num_columns, num_rows = tensors.pop(name).shape
            shape = (num_experts, num_rows, num_columns // 32)
            blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
            scales = rng.integers(117, 131, shape, np.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            unpacked = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
            expected[name] = unpacked.float().numpy()
        return tensors

    change_tensors(tmp_path, pack)
    module, config = read_model(tmp_path)
    params = load_pretrained(tmp_path, module, config)

    found = dict(named_tensors(module.tensor_layouts(config), params))
    assert len(expected) == 6
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    name, block = "model.layers.1.mlp.experts.down_proj", (slice(1, 3), slice(5, 33), slice(2, 9))
    with TensorFiles(tmp_path) as files:
        np.testing.assert_array_equal(files.read(name, block), expected[name][block])
