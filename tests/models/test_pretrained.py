from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import (
    load_pretrained,
    read_model,
    save_pretrained,
)
from redco_flow.models.hub.tensors import CheckpointMismatch, save_params

t5 = find_model("t5")

Q_NAME = "encoder.block.1.layer.0.SelfAttention.q.weight"


@pytest.fixture
def checkpoint(config: t5.Config, params: dict[str, Any], tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    save_pretrained(directory, t5, config, params)
    return directory


def change_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load(directory: Path, shardings: Any = None) -> Any:
    model, config = read_model(directory)
    return load_pretrained(directory, model, config, shardings)


def assert_equal_trees(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_saved_is_loaded_bit_by_bit(checkpoint, config, params):
    """Engine case 53: results equal the reference's; an export equals the original bit by bit."""
    model, found_config = read_model(checkpoint)

    assert (model, found_config) == (t5, config)
    assert_equal_trees(load(checkpoint), params)


def test_a_checkpoint_of_transformers_is_saved_again_bit_by_bit(
    config, params, torch_model, tmp_path
):
    """Engine case 53: theirs, ours, theirs."""
    torch_model(config, params).save_pretrained(tmp_path / "theirs")
    model, found_config = read_model(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", model, found_config)

    save_pretrained(tmp_path / "again", model, found_config, ours)

    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert_equal_trees(found, expected)


def test_tied_embeddings_are_stored_once_and_stay_tied(checkpoint, config):
    """Engine case 15, tied embeddings: they stay tied after sharding, saving and loading."""
    tensors = load_file(checkpoint / "model.safetensors")

    assert ("lm_head.weight" in tensors) == (not config.tie_word_embeddings)
    assert read_model(checkpoint)[1].tie_word_embeddings == config.tie_word_embeddings


def test_a_head_unlike_the_embedding_unties_a_config_that_says_tied(checkpoint, config, params):
    """transformers 5 writes `tie_word_embeddings: true` into every T5's config."""
    values = json.loads((checkpoint / "config.json").read_text())
    values |= {"tie_word_embeddings": True, "scale_decoder_outputs": config.scale_decoder_outputs}
    (checkpoint / "config.json").write_text(json.dumps(values))

    assert read_model(checkpoint)[1] == config
    assert_equal_trees(load(checkpoint), params)


def test_copies_of_the_embedding_under_its_other_names_are_read_over(checkpoint, config, params):
    def publish_as_of_old(tensors: dict[str, np.ndarray]) -> None:
        embedding = tensors.pop("shared.weight")
        tensors["encoder.embed_tokens.weight"] = embedding
        tensors["decoder.embed_tokens.weight"] = embedding.copy()
        unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        tensors[unused] = np.zeros((8, 4), np.float32)
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = embedding.copy()

    change_tensors(checkpoint, publish_as_of_old)

    assert_equal_trees(load(checkpoint), params)


def test_each_device_gets_its_shard(checkpoint, params):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split_dims = {"qkv": 3, "kv": 3, "q": 2, "out": 1, "wi": 3, "wo": 1}

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes = [None] * leaf.ndim
        if path[-1].key in split_dims:
            axes[split_dims[path[-1].key]] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = jax.tree_util.tree_map_with_path(sharding, params)

    found = load(checkpoint, shardings)

    assert_equal_trees(found, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == shardings
    qkv = found["encoder"]["layers"]["attention"]["qkv"]
    assert qkv.addressable_shards[0].data.shape == (3, 16, 3, 1, 6)


def test_a_large_model_is_saved_in_files_with_an_index(config, params, torch_model, tmp_path):
    torch_model(config, params)  # the reference's own copy is not needed, its directory is
    directory = tmp_path / "torch"
    save_params(directory, t5.tensor_layouts(config), params, max_file_bytes=20_000)
    import transformers

    assert not (directory / "model.safetensors").exists()
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert_equal_trees(load(directory), params)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(directory)
    np.testing.assert_array_equal(theirs.shared.weight.detach(), params["embedding"])


def test_saving_again_leaves_no_file_of_the_last_time(checkpoint, config, params):
    layouts = t5.tensor_layouts(config)
    save_params(checkpoint, layouts, params, max_file_bytes=20_000)

    save_params(checkpoint, layouts, params)

    assert sorted(p.name for p in checkpoint.iterdir()) == ["config.json", "model.safetensors"]


def test_half_precision_tensors_become_float32_parameters(checkpoint, params):
    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    change_tensors(checkpoint, narrow)

    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    assert_equal_trees(load(checkpoint), rounded)


def test_every_missing_unexpected_and_misshaped_tensor_is_named(checkpoint):
    def damage(tensors: dict[str, np.ndarray]) -> None:
        del tensors[Q_NAME], tensors["decoder.final_layer_norm.weight"]
        tensors["adapter.weight"] = np.zeros(3, np.float32)
        tensors["shared.weight"] = tensors["shared.weight"][:, :15]

    change_tensors(checkpoint, damage)

    with pytest.raises(CheckpointMismatch) as raised:
        load(checkpoint)

    message = str(raised.value)
    assert str(checkpoint) in message
    assert "2 missing: decoder.final_layer_norm.weight, " + Q_NAME in message
    assert "1 of another shape: shared.weight is (61, 15), expected (61, 16)" in message
    assert "1 not of this model: adapter.weight" in message


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "null", '{"weight_map": {"a": 5}}', '{"weight_map": {"a": []}}', '{"weight', ""],
)
def test_a_malformed_index_is_refused_by_its_name(checkpoint, content):
    """Fault 47: the error names the file; the process never dies of a signal."""
    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(content)

    with pytest.raises(CheckpointMismatch, match=rf"{index}: (not an index of|not a JSON record)"):
        load(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        "{",
        '"t5"',
        "[" * 100_000,
        '{"model_type": []}',
        '{"model_type": "t5", "d_model": []}',
    ],
    ids=lambda text: text[:20],
)
def test_a_malformed_config_is_refused_by_its_name(checkpoint, content):
    """Fault 47: the error names the file; the process never dies of a signal."""
    (checkpoint / "config.json").write_text(content)

    with pytest.raises(ValueError, match=rf"{checkpoint / 'config.json'}: not a "):
        read_model(checkpoint)


def test_a_cut_off_file_is_refused_by_its_name(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors: not a readable safetensors"):
        load(checkpoint)


def test_integers_are_no_parameters(checkpoint):
    change_tensors(checkpoint, lambda t: t.update({Q_NAME: t[Q_NAME].astype(np.int8)}))

    with pytest.raises(CheckpointMismatch, match=f"{Q_NAME} is I8"):
        load(checkpoint)


def test_a_directory_without_safetensors_says_what_would_be_read(checkpoint):
    model, config = read_model(checkpoint)
    (checkpoint / "model.safetensors").unlink()

    with pytest.raises(CheckpointMismatch, match=r"neither model\.safetensors nor"):
        load_pretrained(checkpoint, model, config)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "../model.safetensors"])
def test_an_index_may_only_name_files_beside_it(checkpoint, name):
    shutil.move(checkpoint / "model.safetensors", checkpoint.parent)
    index = {"weight_map": {"shared.weight": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(
        CheckpointMismatch, match=r"names files that are not (there|in its directory)"
    ):
        load(checkpoint)


def test_overrides_replace_values_of_the_file(checkpoint):
    _, config = read_model(checkpoint, overrides={"dropout_rate": 0.3}, dtype="bfloat16")

    assert (config.dropout_rate, config.dtype) == (0.3, "bfloat16")


def test_a_model_type_without_a_family_is_refused_with_those_known(checkpoint):
    (checkpoint / "config.json").write_text('{"model_type": "phi"}')

    with pytest.raises(ValueError, match=r"'phi'; did you mean 'phi3'\? Known: t5"):
        read_model(checkpoint)
