"""The mesh: which devices share parameters, which processes share rows."""

import jax
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.engine.sharding.mesh import DataProcess, build_mesh, find_data_process


@pytest.mark.parametrize("num_model_shards", [1, 2, 4, 8])
def test_devices_not_sharing_a_model_are_data_parallel(num_model_shards):
    deployer = Deployer(num_model_shards)

    assert deployer.num_model_shards == num_model_shards
    assert deployer.num_data_shards == 8 // num_model_shards
    assert deployer.mesh.axis_names == ("data", "fsdp", "context", "model")


def test_fully_sharded_devices_have_rows_of_their_own():
    deployer = Deployer(2, num_fsdp_shards=2)

    assert dict(deployer.mesh.shape) == {"data": 2, "fsdp": 2, "context": 1, "model": 2}
    assert deployer.num_data_shards == 4


def test_fsdp_shards_that_do_not_divide_what_the_model_leaves_are_refused():
    with pytest.raises(ValueError, match=r"num_fsdp_shards=8 .* 4 data-parallel devices; allowed"):
        Deployer(2, num_fsdp_shards=8)


@pytest.mark.parametrize("num_model_shards", [3, 0, -1, 16])
def test_model_shards_that_do_not_divide_the_devices_are_refused(num_model_shards):
    """Engine case 9."""
    with pytest.raises(ValueError, match=r"8 devices; allowed: 1, 2, 4, 8"):
        Deployer(num_model_shards)


def test_model_shards_of_one_copy_are_neighbours():
    mesh = build_mesh(2, jax.devices()[:4])

    assert [[d.id for d in row] for row in mesh.devices[:, 0, 0]] == [[0, 1], [2, 3]]


def test_processes_that_share_rows_read_the_same_share():
    model_across_two = np.array([[0, 1], [2, 3]])
    two_rows_each = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])

    assert [find_data_process(model_across_two, p) for p in range(4)] == [
        DataProcess(0, 2),
        DataProcess(0, 2),
        DataProcess(1, 2),
        DataProcess(1, 2),
    ]
    assert find_data_process(two_rows_each, 1) == DataProcess(1, 2)


def test_a_process_without_a_fair_share_is_refused():
    with pytest.raises(ValueError, match="do not split the 3 data shards evenly"):
        find_data_process(np.array([[0], [0], [1]]), 0)
    with pytest.raises(ValueError, match="process 7 holds no device"):
        find_data_process(np.array([[0], [1]]), 7)
