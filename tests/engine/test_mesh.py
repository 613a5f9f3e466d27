"""The mesh: which devices share parameters, which processes share rows."""

import logging

import jax
import numpy as np
import pytest
from jax.experimental import topologies

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
    """Engine case 9: the error says which number must divide which."""
    with pytest.raises(ValueError, match=r"8 devices; allowed: 1, 2, 4, 8"):
        Deployer(num_model_shards)


def test_model_shards_of_one_copy_are_neighbours():
    mesh = build_mesh(2, jax.devices()[:4])

    assert [[d.id for d in row] for row in mesh.devices[:, 0, 0]] == [[0, 1], [2, 3]]


@pytest.fixture
def torus(monkeypatch):
    """64 chips of a v5p slice, 4 x 4 x 4."""
    pytest.importorskip("libtpu", reason="pip install libtpu")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc("v5p:4x4x4", platform="tpu").devices


def links_between_neighbours(devices, axis):
    """How many links of the torus lie between two that follow each other along an axis, in mean."""
    places = np.array([device.coords for device in devices.flat]).reshape(*devices.shape, 3)
    along = np.moveaxis(places, axis, 0)
    apart = np.abs(along - np.roll(along, 1, axis=0))
    return np.minimum(apart, 4 - apart).sum(-1).mean()


def test_axes_that_are_no_product_of_a_toruss_own_are_laid_along_its_links(torus):
    """8 x 8 on 4 x 4 x 4."""
    with pytest.raises(NotImplementedError):
        jax.make_mesh((8, 8), ("fsdp", "model"), devices=torus)

    mesh = build_mesh(8, torus, num_fsdp_shards=8)

    assert mesh.devices.shape == (1, 8, 1, 8)
    assert {device.id for device in mesh.devices.flat} == {device.id for device in torus}
    in_order = np.array(torus).reshape(mesh.devices.shape)
    assert links_between_neighbours(mesh.devices, 1) < links_between_neighbours(in_order, 1)
    assert links_between_neighbours(mesh.devices, 3) <= links_between_neighbours(in_order, 3)


def test_every_shape_fits_a_torus(torus):
    powers = (1, 2, 4, 8, 16, 32, 64)

    for num_model, num_fsdp in ((m, f) for m in powers for f in powers if m * f <= 64):
        shape = build_mesh(num_model, torus, num_fsdp_shards=num_fsdp).devices.shape

        assert shape == (64 // num_model // num_fsdp, num_fsdp, 1, num_model)


def test_devices_that_are_no_whole_slice_are_taken_in_their_order(torus, caplog):
    caplog.set_level(logging.INFO)

    mesh = build_mesh(2, torus[:6], num_fsdp_shards=3)

    assert list(mesh.devices.flat) == list(torus[:6])
    assert mesh.devices.shape == (1, 3, 1, 2)
    assert "the mesh 1 x 3 x 1 x 2 takes TPU v5 devices in their own order" in caplog.text


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
