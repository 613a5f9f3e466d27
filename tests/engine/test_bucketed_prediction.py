"""Prediction in buckets of like length: what comes out is what comes out of one width."""

from functools import partial

import jax
import numpy as np
import pytest

from redco_flow import Deployer, Predictor
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.errors import DataError

LENGTHS = np.random.default_rng(0).integers(1, 40, 45)
EXAMPLES = [np.arange(1, length + 1, dtype=np.float32) for length in LENGTHS]
PARAMS = {"w": np.float32(2)}


def collate(rows, width):
    return {"x": np.stack([np.pad(row, (0, width - len(row))) for row in rows])}


def bucketing_of(lengths=LENGTHS, num_buckets=3):
    buckets = choose_buckets(np.asarray(lengths)[:, None], num_buckets)
    return Bucketing(buckets, tuple(partial(collate, width=width) for (width,) in buckets.widths))


def predictor_of(pred_fn, batch_size=4, num_devices=1):
    return Predictor(
        Deployer(devices=jax.devices()[:num_devices]),
        collate_fn=partial(collate, width=40),
        pred_fn=pred_fn,
        batch_size=batch_size,
        seed=3,
    )


def sums_and_draws(params, batch, rngs):
    return {"sum": params["w"] * batch["x"].sum(axis=1), "drawn": jax.vmap(jax.random.bits)(rngs)}


@pytest.mark.parametrize("num_examples", [1, 8, 45])
def test_predictions_come_in_input_order_and_draw_as_without_buckets(num_examples):
    """Engine cases 26 and 28: every example is trained on and evaluated once; predictions come in
    input order, without padding.
    """
    examples, lengths = EXAMPLES[:num_examples], LENGTHS[:num_examples]
    predictor = predictor_of(sums_and_draws, 8, num_devices=8)

    found = predictor.predict(examples, PARAMS, bucketing=bucketing_of(lengths))

    # Sums of small whole numbers are exact in any order.
    assert [p["sum"] for p in found] == [2 * row.sum() for row in examples]
    plain = predictor.predict(examples, PARAMS)
    assert [p["drawn"] for p in found] == [p["drawn"] for p in plain]


def test_each_width_is_compiled_once_over_several_predictions():
    """Engine case 45: a step compiles once for each shape."""
    widths = []

    def traced(params, batch, rngs):
        widths.append(batch["x"].shape[1])
        return batch["x"].sum(axis=1)

    predictor = predictor_of(traced)
    for _ in range(2):
        predictor.predict(EXAMPLES, PARAMS, bucketing=bucketing_of())

    assert widths == sorted({width for (width,) in bucketing_of().buckets.widths}, reverse=True)
    assert len(widths) == 3


def test_one_long_example_among_short_ones_makes_one_batch_wide():
    lengths = [3] * 30 + [40] + [5] * 30
    num_positions = []

    def counted(rows, width):
        num_positions.append(len(rows) * width)
        return collate(rows, width)

    buckets = choose_buckets(np.array(lengths)[:, None], 2)
    collate_fns = tuple(partial(counted, width=width) for (width,) in buckets.widths)
    examples = [np.ones(length, np.float32) for length in lengths]

    found = predictor_of(sums_and_draws).predict(
        examples, PARAMS, bucketing=Bucketing(buckets, collate_fns)
    )

    assert [p["sum"] for p in found] == [2 * length for length in lengths]
    # Sixteen batches of four, as without buckets; all but one of them 8 wide.
    assert num_positions == [4 * 40] + [4 * 8] * 15


def test_progress_counts_examples_and_ends_with_all_of_them():
    calls = []

    predictor_of(sums_and_draws, 8).predict(
        EXAMPLES,
        PARAMS,
        bucketing=bucketing_of(),
        on_progress=lambda *call: calls.append(call),
    )

    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (45, 45)
    assert len(calls) == 6


def test_buckets_of_other_examples_are_refused():
    with pytest.raises(DataError, match="the buckets hold 45 examples, the data 44"):
        predictor_of(sums_and_draws).predict(EXAMPLES[1:], PARAMS, bucketing=bucketing_of())
