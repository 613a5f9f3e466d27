"""Training in rounds: examples that are collected with the parameters so far."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Rounds, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.errors import CheckpointError, DataError, TrainingStopped

WIDTH = 3
NUM_EXAMPLES = 6  # two batches: the second one is partial
STEPS_PER_ROUND = 4


def collate(examples):
    return {"x": np.stack(examples).astype(np.float32)}


def loss(params, batch, rngs, is_training):
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(rngs)
    return jnp.sum((batch["x"] + 0.1 * noise - params["mean"]) ** 2, axis=1), jnp.ones(len(rngs))


def trainer():
    return Trainer(
        Deployer(devices=jax.devices()[:1]),
        collate_fn=collate,
        loss_fn=loss,
        params={"mean": np.zeros(WIDTH)},
        optimizer=optax.adam(optax.linear_schedule(0.1, 0.0, 12)),
        global_batch_size=4,
        seed=3,
    )


def points(number):
    return list(np.random.default_rng(number).normal(size=(NUM_EXAMPLES, WIDTH)))


class Collected:
    """Points around the parameters; the carry sums up what the rounds saw."""

    def __init__(self):
        self.numbers = []

    def __call__(self, params, number, carry):
        self.numbers.append(number)
        seen = np.asarray(params["mean"])
        carry = {"sum": carry["sum"] + seen, "count": carry["count"] + 1}
        return [point + 0.5 * seen + carry["sum"] for point in points(number)], carry


def rounds(collect=None, **options):
    carry = {"sum": np.zeros(WIDTH, np.float32), "count": np.int32(0)}
    options = {"num_examples": NUM_EXAMPLES, "epochs_per_round": 2, "carry": carry} | options
    return Rounds(collect or Collected(), **options)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rounds_of_the_same_examples_are_epochs_on_them():
    """Orders, random keys and learning rates go on; six epochs, bit for bit."""
    plain, in_rounds = trainer(), trainer()
    plain.fit(points(0), num_epochs=6)

    def collect(params, number, carry):
        return points(0), carry

    result = in_rounds.fit(rounds(collect, carry=None), num_epochs=6)

    assert result.step == 3 * STEPS_PER_ROUND
    assert_same(in_rounds.state, plain.state)


def test_a_round_is_collected_with_the_parameters_and_the_carry_of_the_one_before():
    whole, by_hand = trainer(), trainer()
    whole.fit(rounds(), num_epochs=6)

    collect, carry = Collected(), rounds().carry
    for number in range(3):
        examples, carry = collect(by_hand.state["params"], number, carry)
        by_hand.fit(examples, num_epochs=2 * (number + 1))

    assert carry["count"] == 3
    assert_same(whole.state, by_hand.state)


class Killed(Exception):
    pass


def test_a_training_killed_within_a_round_goes_on_from_the_rounds_beginning(tmp_path):
    whole = trainer()
    whole.fit(rounds(), num_epochs=6)

    asked = []

    def killed():
        asked.append(1)
        if len(asked) == STEPS_PER_ROUND + 2:
            raise Killed
        return False

    with Checkpointer(tmp_path) as checkpointer, pytest.raises(Killed):
        trainer().fit(rounds(), num_epochs=6, checkpointer=checkpointer, should_stop=killed)
    resumed, collect = trainer(), Collected()
    with Checkpointer(tmp_path) as checkpointer:
        result = resumed.fit(rounds(collect), num_epochs=6, checkpointer=checkpointer)

    assert result.start_step == STEPS_PER_ROUND
    assert collect.numbers == [1, 2]
    assert_same(resumed.state, whole.state)


def test_a_stop_waits_for_the_rounds_end_and_its_training_goes_on_there(tmp_path):
    """JAX's sync point says "stop" once, so the request has to be remembered."""
    whole = trainer()
    whole.fit(rounds(), num_epochs=6)

    asked = []

    def once():
        asked.append(1)
        return len(asked) == 1

    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TrainingStopped) as caught:
            trainer().fit(rounds(), num_epochs=6, checkpointer=checkpointer, should_stop=once)
        resumed = trainer()
        resumed.fit(rounds(), num_epochs=6, checkpointer=checkpointer)
        assert checkpointer.steps() == [3 * STEPS_PER_ROUND]

    assert caught.value.step == STEPS_PER_ROUND
    assert_same(resumed.state, whole.state)


def test_a_carry_is_restored_into_one_of_its_shape_alone(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        trainer().fit(rounds(), num_epochs=2, checkpointer=checkpointer)
        other = rounds(carry={"sum": np.zeros(WIDTH + 1, np.float32), "count": np.int32(0)})

        with pytest.raises(CheckpointError, match=r"carry/sum: expected float32\[4\], found"):
            trainer().fit(other, num_epochs=4, checkpointer=checkpointer)


def test_metrics_are_told_at_each_rounds_end_and_saved_with_it(tmp_path):
    steps = []

    def evaluate(params, step):
        steps.append(step)
        return {"norm": np.linalg.norm(params["mean"])}

    with Checkpointer(tmp_path, keep_last=9) as checkpointer:
        trainer().fit(rounds(), num_epochs=6, eval_fn=evaluate, checkpointer=checkpointer)

        assert steps == checkpointer.steps() == [4, 8, 12]
        assert all("norm" in checkpointer.commit(step).metrics for step in steps)


@pytest.mark.parametrize(
    ("collect", "said"),
    [
        (lambda params, number, carry: (points(0)[:5], carry), "5 examples, num_examples is 6"),
        (lambda params, number, carry: (points(0), None), "a carry of None, Rounds was given"),
        (
            lambda params, number, carry: (points(0), {**carry, "sum": np.zeros(WIDTH)}),
            r"float64\[3\].*float32\[3\]",
        ),
    ],
)
def test_what_a_round_gives_must_be_what_was_said(collect, said):
    with pytest.raises(DataError, match=f"round 0: collect gave .*{said}"):
        trainer().fit(rounds(collect), num_epochs=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_epochs": 3}, r"num_epochs=3 is not a multiple of 2 .*: 2, 4"),
        ({"num_epochs": 4, "eval_every_steps": 2}, r"eval_every_steps=2 .* of 4 .*: 4"),
        ({"num_epochs": 4, "save_every_steps": 6}, r"save_every_steps=6 .* of 4 .*: 4, 8"),
    ],
)
def test_nothing_is_due_within_a_round(options, said):
    with pytest.raises(ValueError, match=said):
        trainer().fit(rounds(), **options)


@pytest.mark.parametrize("option", ["num_examples", "epochs_per_round"])
def test_a_number_of_rounds_that_is_not_positive_is_refused(option):
    with pytest.raises(ValueError, match=f"{option}=0 must be a positive whole number"):
        rounds(**{option: 0})


def test_buckets_of_examples_that_are_not_there_yet_are_refused():
    buckets = choose_buckets(np.ones((NUM_EXAMPLES, 1), np.int64), 1)

    with pytest.raises(ValueError, match="bucketing and order are of examples known beforehand"):
        trainer().fit(rounds(), num_epochs=2, bucketing=Bucketing(buckets, (collate,)))
