"""The order of the rows: exact, without repetition, the same from any starting point."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redco_flow.engine.data.length_buckets import permuted
from redco_flow.engine.data.order import BatchSampler, epoch_order
from redco_flow.engine.errors import DataError


@given(
    num_examples=st.integers(1, 3000),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
)
def test_every_epoch_order_is_a_permutation(num_examples, seed, epoch):
    """Engine case 25: the ranks together read the dataset once an epoch."""
    order = epoch_order(num_examples, seed, epoch)

    np.testing.assert_array_equal(np.sort(order), np.arange(num_examples))


def test_epochs_and_seeds_have_different_orders_and_each_is_reproduced():
    """Engine case 29: the order differs between epochs and agrees between ranks."""
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in range(5) for epoch in range(5)]

    assert len(set(orders)) == 25
    assert orders == [tuple(epoch_order(100, s, e)) for s in range(5) for e in range(5)]


def test_the_order_is_the_same_on_every_version():
    """A changed order would silently break every resume: these numbers must never change."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == [8, 6, 3, 5, 4, 7, 2, 0, 1, 9]
    assert permuted(np.arange(3), 10**12, seed=7, epoch=2).tolist() == [
        989649470104,
        492005977525,
        81097416746,
    ]


def test_all_orders_of_few_examples_are_about_equally_likely():
    num_orders, num_seeds = 24, 480

    counts = np.unique(
        [epoch_order(4, s, 0) for s in range(num_seeds)], axis=0, return_counts=True
    )[1]

    # Chi-square with 23 degrees of freedom exceeds 49.7 with probability 0.001.
    expected = num_seeds / num_orders
    assert len(counts) == num_orders
    assert np.sum((counts - expected) ** 2 / expected) < 49.7


def test_neighbours_in_the_data_are_not_neighbours_in_the_order():
    order = epoch_order(20_000, seed=1, epoch=0)

    # Standard error of a correlation over 20,000 random pairs: 0.007.
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("num_examples", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_example_has_mask_one_exactly_once_per_epoch(num_examples, seed):
    """Engine case 26: every example is trained on and evaluated once."""
    plan = BatchSampler(num_examples, global_batch_size=8, seed=seed)

    for epoch in range(3):
        seen = []
        for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            rows, mask = plan.rows(step)
            assert rows.shape == mask.shape == (8,)
            assert plan.epoch(step) == epoch
            seen.extend(rows[mask == 1])
        assert sorted(seen) == list(range(num_examples))


def test_a_step_is_found_without_building_the_order_of_all_rows():
    """Engine case 30. A table of 10**15 rows would need 8 PB."""
    plan = BatchSampler(10**15, global_batch_size=4, seed=0)

    rows, mask = plan.rows(3 * 10**14)

    assert len(set(rows.tolist())) == 4
    assert mask.all()


def test_a_cursor_of_the_same_plan_gives_its_step():
    """Engine case 30: training goes on with the next batch."""
    plan = BatchSampler(100, 8, seed=3)

    assert plan.step_at(plan.position(17)) == 17


def test_a_cursor_of_another_plan_is_refused_with_every_differing_key():
    """Engine case 8, of the data's order."""
    cursor = BatchSampler(100, 8, seed=3).position(17)

    with pytest.raises(DataError) as caught:
        BatchSampler(90, 4, seed=3).step_at(cursor)

    assert "num_examples: checkpoint 100, now 90" in str(caught.value)
    assert "global_batch_size: checkpoint 8, now 4" in str(caught.value)
    assert "seed" not in str(caught.value).partition("Resume")[0]


def test_a_cursor_without_a_step_is_refused():
    with pytest.raises(DataError, match="step None"):
        BatchSampler(100, 8, seed=3).step_at({})


@pytest.mark.parametrize(
    ("num_examples", "size", "name"), [(0, 8, "num_examples"), (8, 0, "global_batch_size")]
)
def test_a_plan_without_rows_is_refused(num_examples, size, name):
    with pytest.raises(DataError, match=f"{name} is 0"):
        BatchSampler(num_examples, size, seed=0)
