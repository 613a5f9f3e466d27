"""Batches of like length: little padding, every example once, positions that are arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow import Deployer, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.data.batches import TrainBatches
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.data.order import BatchSampler
from redco_flow.engine.errors import DataError

LENGTHS = np.random.default_rng(0).integers(1, 60, 45)


def column(lengths):
    return np.asarray(lengths)[:, None]


def plan_of(lengths, batch_size, num_buckets=3, seed=4):
    buckets = choose_buckets(column(lengths), num_buckets)
    return BatchSampler(len(lengths), batch_size, seed, buckets)


def rows_of(plan, step):
    rows, mask = plan.rows(step)
    return rows[mask > 0].tolist()


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([4, None]),
)
def test_every_example_stands_once_in_an_epoch_in_a_batch_that_it_fits(
    lengths, size, num, epoch, seed
):
    """Engine cases 25 and 26: the ranks together read the dataset once an epoch; every example is
    trained on and evaluated once.
    """
    plan = plan_of(lengths, size, num, seed)

    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)

    assert sorted(row for step in steps for row in rows_of(plan, step)) == list(range(len(lengths)))
    for step in steps:
        (width,) = plan.buckets.widths[plan.bucket(step)]
        assert all(lengths[row] <= width for row in rows_of(plan, step))


def test_an_epoch_has_as_many_batches_as_without_buckets_and_one_that_is_not_full():
    plan = plan_of(LENGTHS, 8)

    sizes = [len(rows_of(plan, step)) for step in range(plan.steps_per_epoch)]

    assert plan.steps_per_epoch == BatchSampler(45, 8, 4).steps_per_epoch == 6
    assert sorted(sizes) == [5, 8, 8, 8, 8, 8]


def test_epochs_and_seeds_differ_in_order_and_the_same_ones_agree():
    """Engine case 29: the order differs between epochs and agrees between ranks."""
    plan, again, other = plan_of(LENGTHS, 4), plan_of(LENGTHS, 4), plan_of(LENGTHS, 4, seed=5)
    first, second = range(12), range(12, 24)

    order = [rows_of(plan, step) for step in first]

    assert order == [rows_of(again, step) for step in first]
    assert order != [rows_of(other, step) for step in first]
    assert order != [rows_of(plan, step) for step in second]
    assert [plan.bucket(step) for step in first] != [plan.bucket(step) for step in second]


def by_trying(lengths, num_buckets):
    """The fewest positions that any choice of widths leaves, by trying all."""
    from itertools import combinations

    sizes = -(-np.asarray(lengths) // 8) * 8
    levels = sorted(set(sizes.tolist()))
    costs = []
    for count in range(min(num_buckets, len(levels))):
        for chosen in combinations(levels[:-1], count):
            ends = np.array([*chosen, levels[-1]])
            costs.append(int(ends[np.searchsorted(ends, sizes)].sum()))
    return min(costs)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30), st.integers(1, 4))
def test_the_buckets_leave_as_little_padding_as_any(lengths, num_buckets):
    buckets = choose_buckets(column(lengths), num_buckets)

    positions = [
        len(part) * width for part, (width,) in zip(buckets.members, buckets.widths, strict=True)
    ]

    assert len(buckets.widths) <= num_buckets
    assert sum(positions) == by_trying(lengths, num_buckets)


def test_no_bucket_is_narrower_in_any_dim_than_one_before_it():
    lengths = np.array([[30, 2], [3, 28], [20, 20], [4, 4], [40, 3]])

    buckets = choose_buckets(lengths, 3)

    widths = np.array(buckets.widths)
    assert (np.diff(widths, axis=0) >= 0).all()
    assert widths[-1].tolist() == [40, 32]


def test_without_a_seed_rows_keep_their_order_and_the_widest_batches_come_first():
    lengths = [8, 30, 8, 16, 8, 8, 16, 8]
    plan = plan_of(lengths, 2, seed=None)

    found = [(plan.bucket(step), rows_of(plan, step)) for step in range(4)]

    # The last of the five shortest fills no batch, nor in the next bucket: it goes up twice.
    assert found == [(2, [1, 7]), (1, [3, 6]), (0, [4, 5]), (0, [0, 2])]


def test_buckets_of_other_data_are_refused():
    buckets = choose_buckets(column([3, 9]), 2)

    with pytest.raises(DataError, match="the buckets hold 2 examples, the data 3"):
        BatchSampler(3, 2, 0, buckets)


def test_a_checkpoint_of_other_buckets_is_refused():
    position = plan_of(LENGTHS, 8).position(3)

    assert plan_of(LENGTHS, 8).step_at(position) == 3
    for other in (plan_of(LENGTHS, 8, num_buckets=2), BatchSampler(45, 8, 4)):
        with pytest.raises(DataError, match=r"does not fit this training .*buckets"):
            other.step_at(position)


def example(length):
    return np.arange(1, length + 1, dtype=np.float32)


def collate(examples, width):
    rows = np.zeros((len(examples), width), np.float32)
    for row, values in zip(rows, examples, strict=True):
        row[: len(values)] = values
    return {"x": rows}


def bucketing_of(lengths, num_buckets=3):
    buckets = choose_buckets(column(lengths), num_buckets)
    return Bucketing(buckets, tuple(partial(collate, width=width) for (width,) in buckets.widths))


EXAMPLES = [example(length) for length in LENGTHS]


def test_two_processes_read_the_halves_of_one_order_in_one_width():
    """Engine cases 25 and 31: the ranks together read the dataset once an epoch; the order of
    examples is the same.
    """
    options = {"global_batch_size": 8, "seed": 1, "bucketing": bucketing_of(LENGTHS)}

    def read(index, count):
        parts = {"process_index": index, "num_processes": count, "stop_step": 6}
        batches = iter(TrainBatches(EXAMPLES, collate, **options, **parts))
        with batches:
            return list(batches)

    whole, halves = read(0, 1), [read(0, 2), read(1, 2)]

    for one, *two in zip(whole, *halves, strict=True):
        assert np.concatenate([half.rows for half in two]).tolist() == one.rows.tolist()
        assert {half.arrays["x"].shape[1] for half in two} == {one.arrays["x"].shape[1]}


def trainer_of():
    def loss(params, batch, rngs, is_training):
        noise = jax.vmap(jax.random.normal)(rngs)
        errors = (params["a"] * batch["x"].sum(axis=1) / 100 + params["b"] - 1 + 0.1 * noise) ** 2
        return errors, jnp.ones_like(errors)

    return Trainer(
        Deployer(devices=jax.devices()[:2]),
        collate_fn=partial(collate, width=64),
        loss_fn=loss,
        params={"a": jnp.ones(()), "b": jnp.zeros(())},
        optimizer=optax.adamw(1e-2),
        global_batch_size=8,
        seed=2,
    )


@pytest.mark.slow
def test_a_training_in_buckets_compiles_once_per_bucket_and_resumes_in_mid_epoch_bitwise(tmp_path):
    """Engine cases 30 and 45: training goes on with the next batch; a step compiles once for each
    shape.
    """
    bucketing = bucketing_of(LENGTHS)
    whole = trainer_of()
    whole.fit(EXAMPLES, num_epochs=2, bucketing=bucketing)
    polls = iter([False, False, False, True])

    with Checkpointer(tmp_path) as checkpointer:
        options = {"num_epochs": 2, "checkpointer": checkpointer}
        with pytest.raises(ValueError, match="stopped on request after 4 steps"):
            trainer_of().fit(
                EXAMPLES, bucketing=bucketing, should_stop=lambda: next(polls), **options
            )
        resumed = trainer_of()
        resumed.fit(EXAMPLES, bucketing=bucketing_of(LENGTHS), **options)

    assert whole.plan.train_step._cache_size() == len(bucketing.buckets.widths) == 3
    for one, two in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(one, two)
