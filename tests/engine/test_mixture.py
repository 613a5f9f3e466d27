"""Rows drawn by weight: shares, order, and that a step's rows follow from its number alone."""

import numpy as np
import pytest

from redco_flow.engine.data.order import BatchSampler, Mixture, Part
from redco_flow.engine.errors import DataError

BLOCK = 4096


def part(name, start, num_rows, weight):
    return Part(name, start, num_rows, num_rows, weight)


MIXTURE = Mixture([part("large", 0, 9000, 1.0), part("small", 9000, 100, 3.0)])


def drawn(mixture, num_positions, seed=0):
    return mixture.rows(np.arange(num_positions), seed)


def test_each_block_has_as_many_rows_of_a_part_as_its_weight_says():
    is_small = drawn(MIXTURE, 3 * BLOCK) >= 9000

    assert is_small.reshape(3, BLOCK).sum(axis=1).tolist() == [3072, 3072, 3072]


def test_within_a_block_parts_follow_each_other_at_random():
    is_small = drawn(MIXTURE, BLOCK) >= 9000

    # Of independent draws: 3/4 in every hundred, with a deviation of 4.3.
    shares = is_small[:4000].reshape(40, 100).sum(axis=1)
    assert 60 < shares.min() < 75 < shares.max() < 90


def test_a_part_is_used_up_before_a_row_of_it_comes_again():
    rows = drawn(MIXTURE, 12 * BLOCK)
    small, large = rows[rows >= 9000], rows[rows < 9000]

    # 368 passes over the small part, and the large one is used up once. A block's own rows of a
    # part stand in an order of their own, so a pass begins within the block that ends another.
    counts = np.bincount(small - 9000)
    assert len(counts) == 100
    assert counts.max() - counts.min() <= 1
    assert np.bincount(large, minlength=9000).max() == 2
    assert (np.bincount(large, minlength=9000) > 0).all()


def test_weights_that_do_not_divide_a_block_are_met_as_closely_as_can_be():
    mixture = Mixture([part(str(i), 10 * i, 10, weight) for i, weight in enumerate((1, 1, 1))])

    counts = np.bincount(drawn(mixture, BLOCK) // 10)

    assert sorted(counts.tolist()) == [1365, 1365, 1366]


def test_any_positions_can_be_asked_for_in_any_order():
    far = 10**12 + np.arange(50)

    found = MIXTURE.rows(far, 7)

    assert found.tolist() == [int(MIXTURE.rows(far[i : i + 1], 7)[0]) for i in range(50)]


def test_seeds_differ_and_each_is_the_same_on_every_version():
    assert drawn(MIXTURE, 6).tolist() == [9083, 1714, 4588, 9077, 2658, 9072]
    assert drawn(MIXTURE, 200, 1).tolist() != drawn(MIXTURE, 200, 0).tolist()


def test_the_batches_of_a_mixture_are_full_and_have_a_cursor_of_their_own():
    sampler = BatchSampler(9100, 16, 0, order=MIXTURE)

    rows, mask = sampler.rows(5)

    assert sampler.steps_per_epoch == 569
    assert rows.tolist() == drawn(MIXTURE, 96)[80:].tolist()
    assert mask.tolist() == [1.0] * 16
    assert sampler.step_at(sampler.position(5)) == 5
    other = Mixture([part("large", 0, 9000, 1.0), part("small", 9000, 100, 2.0)])
    with pytest.raises(DataError, match="order: checkpoint"):
        BatchSampler(9100, 16, 0, order=other).step_at(sampler.position(5))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "has no parts"),
        ([part("a", 0, 0, 1.0)], "'a' has no rows"),
        ([part("a", 0, 5, 1.0), part("b", 5, 5, 1e-6)], "'b' has 1e-06 of the weight"),
    ],
)
def test_a_part_of_which_nothing_would_be_drawn_is_refused(parts, message):
    with pytest.raises(DataError, match=message):
        Mixture(parts)


def test_an_order_goes_with_a_seed_and_without_buckets():
    with pytest.raises(DataError, match="an order with a seed"):
        BatchSampler(9100, 16, None, order=MIXTURE)
