"""How a global batch is cut."""

import numpy as np
import pytest

from redco_flow.engine.data.order import plan_batch
from redco_flow.engine.sharding.mesh import DataProcess

ALONE = DataProcess(0, 1)


@pytest.mark.parametrize(
    ("global_size", "per_device", "shards", "nearest"),
    [(10, 2, 4, "8, 16"), (3, None, 4, "4"), (33, None, 8, "32, 40"), (6, 4, 1, "4, 8")],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_sizes(
    global_size, per_device, shards, nearest
):
    """Engine case 6: the error names the nearest sizes that divide."""
    with pytest.raises(ValueError, match=f"nearest valid values: {nearest}\\.$"):
        plan_batch(global_size, per_device, shards, ALONE)


@pytest.mark.parametrize("size", [0, -8, 2.0, True, "8"])
def test_a_batch_size_that_is_no_positive_whole_number_is_refused(size):
    """Engine case 4: the error comes before any job."""
    with pytest.raises(ValueError, match="must be a positive whole number"):
        plan_batch(size, None, 1, ALONE)
    with pytest.raises(ValueError, match="per_device_batch_size"):
        plan_batch(8, size, 1, ALONE)


def test_every_row_is_in_exactly_one_micro_batch():
    layout = plan_batch(16, 2, 2, ALONE)

    split = layout.split({"x": np.arange(16 * 3).reshape(16, 3), "row": layout.rows})

    assert layout.num_micro == 4
    assert split["x"].shape == (4, 4, 3)
    assert sorted(split["row"].ravel()) == list(range(16))
    assert (split["x"][..., 0] == split["row"] * 3).all()


def test_processes_hold_different_rows_of_the_global_batch():
    first = plan_batch(8, None, 2, DataProcess(0, 2))
    second = plan_batch(8, None, 2, DataProcess(1, 2))

    assert first.rows.tolist() == [0, 1, 2, 3]
    assert second.rows.tolist() == [4, 5, 6, 7]
