"""Saving, stopping and resuming: the same numbers as without."""

import inspect
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer, restore_params
from redco_flow.engine.errors import DataError, NonFiniteLoss, TrainingStopped

WIDTH, UNITS = 4, 16
EVAL_SEED = 99


# Most tests here train the same thing twice; the second trainer loads what was compiled.
pytestmark = pytest.mark.usefixtures("compile_cache")


def examples(count=21, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=WIDTH).astype(np.float32), "y": float(rng.normal())}
        for _ in range(count)
    ]


def collate(rows):
    return {
        "x": np.stack([row["x"] for row in rows]),
        "y": np.array([row["y"] for row in rows], np.float32),
    }


def outputs(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] @ params["out"]


def loss(params, batch, rngs, is_training):
    x = batch["x"]
    if is_training:  # dropout: resuming must go on with the same random numbers
        x = x * jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(rngs)
    return (outputs(params, x) - batch["y"]) ** 2, jnp.ones(len(batch["y"]))


def trainer_of(deployer=None, **options):
    rng = np.random.default_rng(5)
    params = {
        "up": rng.normal(size=(WIDTH, UNITS)).astype(np.float32),
        "down": rng.normal(size=(UNITS, WIDTH)).astype(np.float32),
        "out": rng.normal(size=WIDTH).astype(np.float32),
    }
    options = {"global_batch_size": 4, "per_device_batch_size": 1, "loss_fn": loss} | options
    deployer = deployer or Deployer(2, devices=jax.devices()[:4])
    traced = (params, options["loss_fn"], collate(examples(2)), None, False)
    return Trainer(
        deployer,
        sharding_rules=deployer.get_sharding_rules(*traced),
        collate_fn=collate,
        params=params,
        optimizer=optax.adamw(1e-2),
        seed=3,
        **options,
    )


class StopAt(Callback):
    """Asks for a stop once a step's log record was heard; also keeps all records."""

    def __init__(self, step=math.inf):
        self.step, self.polls = step, 0
        self.records, self.checkpoints = [], []

    def on_log(self, record):
        self.records.append(record)

    def on_eval(self, record):
        self.records.append(record)

    def on_checkpoint(self, record):
        self.checkpoints.append(record)

    def should_stop(self):
        self.polls += 1
        return self.polls >= self.step


def assert_bitwise(found, expected):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [4, 6])
def test_a_stopped_and_resumed_training_ends_bitwise_as_an_uninterrupted_one(tmp_path, stop_after):
    """Engine cases 30, 42 and 46: 6 steps an epoch, so in mid-epoch and at an epoch's end."""
    whole = trainer_of()
    expected = whole.fit(examples(), num_epochs=2, eval_examples=examples(5, EVAL_SEED))

    stop = StopAt(stop_after)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TrainingStopped) as caught:
        trainer_of().fit(
            examples(),
            num_epochs=2,
            eval_examples=examples(5, EVAL_SEED),
            checkpointer=checkpointer,
            should_stop=stop.should_stop,
        )
    resumed = trainer_of()
    with Checkpointer(tmp_path) as checkpointer:
        result = resumed.fit(
            examples(),
            num_epochs=2,
            eval_examples=examples(5, EVAL_SEED),
            checkpointer=checkpointer,
        )

    assert caught.value.step == stop_after
    assert (result.start_step, result.step) == (stop_after, 12)
    assert_bitwise(resumed.state, whole.state)
    assert result.metrics == expected.metrics


@pytest.mark.slow
def test_a_checkpoint_holds_its_steps_state_though_training_goes_on(tmp_path):
    """Engine case 46: the step after a save donates the very arrays that are being saved."""
    trainer = trainer_of()
    states = {}

    def remember(params, step):
        states[step] = jax.tree.map(lambda x: np.array(x), trainer.state)
        return {"step": step}

    with Checkpointer(tmp_path, keep_last=100) as checkpointer:
        trainer.fit(
            examples(40),
            num_epochs=1,
            eval_fn=remember,
            eval_every_steps=1,
            checkpointer=checkpointer,
        )
        assert checkpointer.steps() == list(range(1, 11))
        for step, expected in states.items():
            found, commit = checkpointer.restore(step, like=trainer.state)
            assert commit.metrics == {"step": step}
            assert_bitwise(found, expected)


def test_metrics_are_committed_with_the_parameters_they_score(tmp_path):
    """Engine case 49: "Best" is the step that was scored."""
    heard = StopAt()
    with Checkpointer(tmp_path, keep_last=100, keep_best={"eval_loss": "min"}) as checkpointer:
        trainer = trainer_of()
        trainer.fit(
            examples(),
            num_epochs=3,
            eval_examples=examples(5, EVAL_SEED),
            checkpointer=checkpointer,
            callbacks=[heard],
            save_every_steps=4,
        )
        commits = {step: checkpointer.commit(step) for step in checkpointer.steps()}
        best = checkpointer.best("eval_loss")

        assert sorted(commits) == [4, 6, 8, 12, 16, 18]
        assert [step for step, commit in commits.items() if commit.metrics] == [6, 12, 18]
        assert best == min((6, 12, 18), key=lambda step: commits[step].metrics["eval_loss"])
        trainer.restore(checkpointer, best)
        assert trainer.eval_loss(examples(5, EVAL_SEED)) == commits[best].metrics["eval_loss"]
    assert [record["step"] for record in heard.checkpoints] == sorted(commits)
    assert heard.checkpoints[1]["metrics"] == commits[6].metrics


def test_a_checkpoint_is_told_of_while_it_is_on_the_disk(tmp_path):
    found = {}

    class Look(Callback):
        def on_checkpoint(self, record):
            found[record["step"]] = checkpointer.commit(record["step"]).step

    with Checkpointer(tmp_path) as checkpointer:
        trainer_of().fit(
            examples(),
            num_epochs=1,
            checkpointer=checkpointer,
            callbacks=[Look()],
            log_every_steps=100,
            save_every_steps=1,
        )

    assert found == {step: step for step in range(1, 7)}


@pytest.mark.slow
def test_training_goes_on_with_another_mesh_and_other_micro_batches(tmp_path):
    """Engine cases 31 and 47: the order of examples is the same; it is restored exactly."""
    whole = trainer_of()
    whole.fit(examples(), num_epochs=2)

    with Checkpointer(tmp_path) as checkpointer:
        trainer_of().fit(examples(), num_epochs=1, checkpointer=checkpointer)
    other = trainer_of(Deployer(4, devices=jax.devices()[:4]), per_device_batch_size=4)
    with Checkpointer(tmp_path) as checkpointer:
        result = other.fit(examples(), num_epochs=2, checkpointer=checkpointer)

    assert result.start_step == 6
    for found, expected in zip(
        jax.tree.leaves(other.state["params"]), jax.tree.leaves(whole.state["params"]), strict=True
    ):
        # Another order of sums, over six steps of Adam.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 8}, "global_batch_size: checkpoint 4, now 8"),
        ({"count": 22}, "num_examples: checkpoint 21, now 22"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, change, message):
    """Engine case 8: training is refused, with what differs."""
    with Checkpointer(tmp_path) as checkpointer:
        trainer_of().fit(examples(), num_epochs=1, checkpointer=checkpointer)

    options = dict(change)
    rows = examples(options.pop("count", 21))
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(DataError, match=message):
        trainer_of(**options).fit(rows, num_epochs=2, checkpointer=checkpointer)


def test_nothing_is_saved_once_a_loss_is_not_finite(tmp_path):
    bad = examples()

    def breaks_at_step_five(params, batch, rngs, is_training):
        totals, weights = loss(params, batch, rngs, is_training)
        return jnp.where(batch["y"] > 100, jnp.nan, totals), weights

    trainer = trainer_of(loss_fn=breaks_at_step_five)
    order = trainer.read_batches(bad, 4, 5)
    with order:
        bad[int(next(order).rows[0])]["y"] = 1000.0

    with Checkpointer(tmp_path, keep_last=100) as checkpointer:
        with pytest.raises(NonFiniteLoss) as caught:
            trainer.fit(bad, num_epochs=2, checkpointer=checkpointer, save_every_steps=1)
        checkpointer.wait()

        assert caught.value.step == 5
        assert checkpointer.steps() == [1, 2, 3, 4]


def test_a_finished_training_is_not_repeated(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        first = trainer_of().fit(
            examples(), num_epochs=1, eval_examples=examples(5), checkpointer=checkpointer
        )
        again = trainer_of().fit(
            examples(), num_epochs=1, eval_examples=examples(5), checkpointer=checkpointer
        )

    assert (again.start_step, again.step, again.loss) == (6, 6, None)
    assert again.metrics == first.metrics


def test_predictions_from_a_checkpoint_are_those_from_the_trainers_memory(tmp_path):
    """Engine case 52: predictions equal those of the trainer's own parameters."""
    trainer = trainer_of()
    with Checkpointer(tmp_path) as checkpointer:
        trainer.fit(examples(), num_epochs=1, checkpointer=checkpointer)
    predictor = Predictor(
        trainer.deployer,
        collate_fn=collate,
        pred_fn=lambda params, batch, rngs: outputs(params, batch["x"]),
        sharding_rules=trainer.sharding_rules,
        batch_size=4,
    )

    in_memory = predictor.predict(examples(), trainer.state["params"])
    restored = restore_params(tmp_path / "6", like=trainer.state["params"])

    assert_bitwise(predictor.predict(examples(), restored), in_memory)


def test_no_process_can_save_alone(tmp_path):
    """Engine case 22: every process makes the same calls, and callbacks only get numbers."""
    heard = StopAt()
    with Checkpointer(tmp_path) as checkpointer:
        trainer_of().fit(
            examples(),
            num_epochs=1,
            eval_examples=examples(5),
            checkpointer=checkpointer,
            callbacks=[heard],
        )

    for function in (Trainer.__init__, Trainer.fit, Checkpointer.__init__, Checkpointer.save):
        names = " ".join(inspect.signature(function).parameters)
        assert not any(word in names for word in ("process", "rank", "primary", "main"))
    assert json.loads(json.dumps(heard.records + heard.checkpoints))
