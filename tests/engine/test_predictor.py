"""Predictions: every example once, in input order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer, Predictor
from redco_flow.engine.errors import DataError


def collate(examples):
    return {"x": np.array([e["x"] for e in examples], np.float32)}


def numbers(count):
    return [{"x": float(i)} for i in range(count)]


def double(params, batch, rngs):
    return {"twice": params["w"] * batch["x"], "pair": jnp.stack([batch["x"]] * 2, axis=1)}


def predictor_of(deployer=None, pred_fn=double, batch_size=8, **options):
    deployer = deployer or Deployer()
    return Predictor(
        deployer, collate_fn=collate, pred_fn=pred_fn, batch_size=batch_size, **options
    )


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("num_model_shards", [1, 8])
def test_predictions_come_in_input_order_without_padding(count, num_model_shards):
    """Engine cases 26 and 28: every example is trained on and evaluated once; predictions come in
    input order, without padding.
    """
    deployer, params = Deployer(num_model_shards), {"w": np.float32(2)}
    rules = deployer.get_sharding_rules(params, double, collate(numbers(2)), None)
    predictor = predictor_of(deployer, sharding_rules=rules)

    found = predictor.predict(numbers(count), params)

    assert [p["twice"] for p in found] == [2 * i for i in range(count)]
    assert [p["pair"].tolist() for p in found] == [[i, i] for i in range(count)]


def test_output_fn_sees_real_rows_only_and_its_results_are_returned():
    seen = []

    def outputs(batch):
        seen.append(len(batch["twice"]))
        return [f"{value:.0f}" for value in batch["twice"]]

    found = predictor_of(output_fn=outputs).predict(numbers(11), {"w": np.float32(2)})

    assert found == [str(2 * i) for i in range(11)]
    assert seen == [8, 3]


def test_progress_ends_at_the_number_of_examples():
    calls = []

    predictor_of().predict(
        numbers(19), {"w": np.float32(1)}, on_progress=lambda *call: calls.append(call)
    )

    assert calls == [(8, 19), (16, 19), (19, 19)]


def test_predicting_nothing_gives_nothing():
    assert predictor_of().predict([], {"w": np.float32(1)}) == []


def test_random_predictions_depend_on_the_place_in_the_input_only():
    def draw(params, batch, rngs):
        return jax.vmap(jax.random.uniform)(rngs)

    params = {"w": np.float32(1)}
    small = predictor_of(Deployer(devices=jax.devices()[:1]), draw, 3, seed=4)
    spread = Deployer(2)
    rules = spread.get_sharding_rules(params, lambda params: params["w"])
    large = predictor_of(spread, draw, 16, seed=4, sharding_rules=rules)

    found = small.predict(numbers(10), params)

    np.testing.assert_array_equal(found, large.predict(numbers(10), params))
    assert len(set(map(float, found))) == 10


def test_predicting_twice_compiles_once():
    """Engine case 45: a step compiles once for each shape."""
    traces = []

    def traced(params, batch, rngs):
        traces.append(1)
        return batch["x"]

    predictor = predictor_of(pred_fn=traced)
    for _ in range(2):
        predictor.predict(numbers(9), {"w": np.float32(1)})

    assert len(traces) == 1


@pytest.mark.parametrize("num_model_shards", [1, 8])
def test_a_bound_predictor_predicts_the_same_and_compiles_once_for_any_number(num_model_shards):
    """Engine case 45: a step compiles once, however few rows there are."""
    traces = []

    def traced(params, batch, rngs):
        traces.append(1)
        return {"twice": params["w"] * batch["x"], "noise": jax.vmap(jax.random.uniform)(rngs)}

    deployer, params = Deployer(num_model_shards), {"w": np.float32(2)}
    rules = deployer.get_sharding_rules(params, lambda params: params["w"])
    predictor = predictor_of(deployer, traced, sharding_rules=rules)
    act = predictor.bind(params)

    for count in (3, 1, 8, 19):
        found = act(collate(numbers(count)), seed=7)
        expected = predictor.predict(numbers(count), params, seed=7)
        np.testing.assert_array_equal(found["twice"], 2 * np.arange(count))
        np.testing.assert_array_equal(found["noise"], [one["noise"] for one in expected])
    assert len(traces) == 1


def test_a_seed_of_its_own_gives_other_random_predictions():
    def draw(params, batch, rngs):
        return jax.vmap(jax.random.uniform)(rngs)

    act = predictor_of(pred_fn=draw, seed=4).bind({"w": np.float32(1)})
    batch = collate(numbers(5))

    np.testing.assert_array_equal(act(batch), act(batch, seed=4))
    assert set(map(float, act(batch))).isdisjoint(map(float, act(batch, seed=5)))


@pytest.mark.parametrize("batch", [{}, {"x": np.zeros(0)}, {"x": np.zeros(3), "y": np.zeros(2)}])
def test_a_batch_of_no_rows_or_of_different_numbers_is_refused(batch):
    act = predictor_of().bind({"w": np.float32(1)})

    with pytest.raises(ValueError, match="need one number of rows, at least 1"):
        act(batch)


def test_sharded_parameters_predict_as_whole_ones():
    def through(params, batch, rngs):
        return jnp.tanh(batch["x"][:, None] * jnp.ones(16) @ params["up"]) @ params["down"]

    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(16, 32)).astype(np.float32),
        "down": rng.normal(size=(32, 16)).astype(np.float32),
    }
    deployer = Deployer(4)
    rules = deployer.get_sharding_rules(params, through, collate(numbers(2)), None)
    assert rules.replicated_bytes == 0

    found = predictor_of(deployer, through, sharding_rules=rules).predict(numbers(3), params)

    x = np.arange(3.0)[:, None]
    expected = np.tanh(x * params["up"].sum(axis=0)) @ params["down"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_batch_size_that_the_devices_cannot_split_is_refused():
    """Engine case 6: the error names the nearest sizes that divide."""
    with pytest.raises(ValueError, match=r"batch_size=12 .*nearest valid values: 8, 16"):
        predictor_of(batch_size=12)


@pytest.mark.parametrize("size", [0, -8, 8.0])
def test_a_batch_size_that_is_no_positive_whole_number_is_refused(size):
    """Engine case 4: the error comes before any job."""
    with pytest.raises(ValueError, match=r"batch_size=.* must be a positive whole number"):
        predictor_of(batch_size=size)


def test_another_number_of_outputs_than_rows_is_refused():
    params = {"w": np.float32(1)}

    with pytest.raises(ValueError, match="output_fn gave 1 predictions for 3 rows"):
        predictor_of(output_fn=lambda batch: ["only one"]).predict(numbers(3), params)
    with pytest.raises(ValueError, match=r"shape \(\); its leading dim must be the batch's, 8"):
        predictor_of(pred_fn=lambda p, batch, r: batch["x"].sum()).predict(numbers(3), params)


def test_rows_that_cannot_be_collated_are_named():
    examples = [*numbers(9), {"y": 1.0}]

    with pytest.raises(DataError, match=r"\[9\]"):
        predictor_of().predict(examples, {"w": np.float32(1)})
