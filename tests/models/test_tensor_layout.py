from __future__ import annotations

import numpy as np
import pytest

from redco_flow.models.hub.layouts import TensorLayout

QKV = TensorLayout(
    "layer model part heads head_dim",
    "(heads head_dim) model",
    "block.{layer}.{part}.weight",
    {"part": ("q", "k", "v")},
)
SHAPE = (2, 5, 3, 4, 6)


def stored_tensors(parameter: np.ndarray) -> dict[str, np.ndarray]:
    """What the layout says, in loops."""
    return {
        f"block.{layer}.{name}.weight": parameter[layer, :, part].reshape(5, 24).T
        for layer in range(2)
        for part, name in enumerate("qkv")
    }


@pytest.fixture
def parameter() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE)


def test_a_parameter_splits_into_its_tensors(parameter):
    found = dict(QKV.split(parameter))

    expected = stored_tensors(parameter)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name])
        assert tensor.flags.c_contiguous


@pytest.mark.parametrize(
    "block",
    [
        np.s_[:, :, :, :, :],
        np.s_[1:2, :, :, 2:4, :],
        np.s_[:, 3:5, 0:1, 1:2, 2:5],
        np.s_[0:1, 0:1, 2:3, 0:1, 0:1],
    ],
)
def test_any_block_is_assembled_from_the_tensors(parameter, block):
    tensors = stored_tensors(parameter)

    found = QKV.read_block(SHAPE, block, lambda name, part: tensors[name][part])

    np.testing.assert_array_equal(found, parameter[block])


def test_a_block_reads_only_what_it_covers(parameter):
    tensors = stored_tensors(parameter)
    num_read = 0

    def read(name: str, part: tuple[slice, ...]) -> np.ndarray:
        nonlocal num_read
        num_read += tensors[name][part].size
        return tensors[name][part]

    one_head = np.s_[0:2, 0:5, 0:3, 1:2, 0:6]
    QKV.read_block(SHAPE, one_head, read)

    assert num_read == parameter[one_head].size


FUSED = TensorLayout("model part heads", "model (part heads)", "block.c_attn.weight")


def test_a_block_of_a_fused_tensor_reads_only_what_it_covers(parameter):
    fused = parameter[0].reshape(5, 3, 24)
    tensor = fused.reshape(5, 72)
    num_read = 0

    def read(name: str, part: tuple[slice, ...]) -> np.ndarray:
        nonlocal num_read
        num_read += tensor[part].size
        return tensor[part]

    block = np.s_[1:4, 0:3, 6:12]
    found = FUSED.read_block(fused.shape, block, read)

    np.testing.assert_array_equal(found, fused[block])
    assert num_read == fused[block].size


def test_every_name_of_a_stacked_tensor_is_known():
    layout = TensorLayout("layer model", "model", "model.{layer}.norm", aliases=("{layer}.norm",))

    assert layout.names((3,)) == ("model.3.norm", "3.norm")
