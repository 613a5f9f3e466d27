"""What a training computes, against loops written by hand."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.data.order import epoch_order
from redco_flow.engine.errors import DataError, NonFiniteLoss
from redco_flow.engine.step.optimizers import make_schedule

DIM = 4
HIDDEN = 8


def token_examples(count, seed=0, max_tokens=6):
    """Regression per token; the number of counted tokens differs much between examples."""
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(max_tokens, DIM)).astype(np.float32),
            "y": rng.normal(size=max_tokens).astype(np.float32),
            "counted": (np.arange(max_tokens) < rng.integers(0, max_tokens + 1)).astype(np.float32),
        }
        for _ in range(count)
    ]


def collate(examples):
    return {name: np.stack([np.asarray(e[name]) for e in examples]) for name in examples[0]}


def mlp_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "up": {
            "kernel": rng.normal(size=(DIM, HIDDEN)).astype(np.float32),
            "bias": rng.normal(size=HIDDEN).astype(np.float32),
        },
        "down": {"kernel": rng.normal(size=(HIDDEN, DIM)).astype(np.float32) / HIDDEN},
        "out": rng.normal(size=DIM).astype(np.float32),
    }


def mlp_loss(params, batch, rngs=None, is_training=True):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    outputs = (batch["x"] + hidden @ params["down"]["kernel"]) @ params["out"]
    losses = (outputs - batch["y"]) ** 2 * batch["counted"]
    return losses.sum(axis=1), batch["counted"].sum(axis=1)


def by_hand(examples, order, batch_size, optimizer, num_steps, params):
    """Train with bare JAX in float64, whole batches of any size, no masks and no accumulation."""

    @jax.jit
    def update(params, state, batch):
        def mean(params):
            totals, weights = mlp_loss(params, batch)
            return totals.sum() / weights.sum()

        loss, gradients = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params)
        state = jax.jit(optimizer.init)(params)
        losses = []
        for step in range(num_steps):
            rows = order[step * batch_size : (step + 1) * batch_size]
            batch = jax.tree.map(np.float64, collate([examples[i] for i in rows]))
            params, state, loss = update(params, state, batch)
            losses.append(float(loss))
        return jax.tree.map(np.asarray, params), losses


def two_devices():
    return Deployer(devices=jax.devices()[:2])


class Recorder(Callback):
    def __init__(self):
        self.logs, self.evals, self.checkpoints = [], [], []

    def on_log(self, record):
        self.logs.append(record)

    def on_eval(self, record):
        self.evals.append(record)

    def on_checkpoint(self, record):
        self.checkpoints.append(record)


def trainer_of(deployer, loss_fn=mlp_loss, params=None, **options):
    options = {"optimizer": optax.sgd(0.1), "global_batch_size": 8} | options
    params = mlp_params() if params is None else params
    if deployer.num_model_shards > 1 and "sharding_rules" not in options:
        options["sharding_rules"] = rules_of(deployer, loss_fn, params)
    return Trainer(deployer, collate_fn=collate, loss_fn=loss_fn, params=params, **options)


def rules_of(deployer, loss_fn, params, examples=None):
    """What a user writes; some losses here take other examples than `token_examples`."""
    if np.ndim(params) == 1:
        examples = [{"id": 0}, {"id": 1}]
    batch = collate(examples or token_examples(2))
    keys = jax.random.split(jax.random.key(0), 2)
    return deployer.get_sharding_rules(params, loss_fn, batch, keys, False)


def assert_trees_close(found, expected, rtol):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
        )


MESHES = [(1, 1), (2, 2), (1, 4)]


@functools.cache
def three_steps_by_hand():
    order = epoch_order(19, 3, 0)
    return by_hand(token_examples(19), order, 8, optax.adamw(1e-2), 3, mlp_params())


@pytest.mark.parametrize(("num_data", "num_model"), MESHES)
def test_losses_and_parameters_are_those_of_a_loop_by_hand_on_every_mesh(num_data, num_model):
    """Engine cases 12, 36 and 38: rows have 0 to 6 tokens, the last batch is partial."""
    examples = token_examples(19)
    deployer = Deployer(num_model, devices=jax.devices()[: num_data * num_model])
    trainer = trainer_of(deployer, optimizer=optax.adamw(1e-2), per_device_batch_size=2, seed=3)
    recorder = Recorder()

    trainer.fit(examples, num_epochs=1, callbacks=[recorder], log_every_steps=1)

    expected, losses = three_steps_by_hand()
    np.testing.assert_allclose([r["loss"] for r in recorder.logs], losses, rtol=1e-5)
    assert_trees_close(trainer.state["params"], expected, rtol=1e-5)


@pytest.mark.parametrize("per_device_batch_size", [None, 4, 2, 1])
def test_accumulation_changes_nothing(per_device_batch_size):
    """Engine cases 35 and 37: some micro-batches of one row have no token."""
    examples = token_examples(8, seed=1)
    optimizer = optax.sgd(0.1)
    deployer = Deployer(1, devices=jax.devices()[:2])
    trainer = trainer_of(deployer, per_device_batch_size=per_device_batch_size)

    trainer.fit(examples, num_epochs=1)

    assert any(e["counted"].sum() == 0 for e in examples)
    expected, _ = by_hand(examples, range(8), 8, optimizer, 1, mlp_params())
    assert_trees_close(trainer.state["params"], expected, rtol=1e-5)


def test_a_batch_without_any_token_changes_no_parameter():
    """Engine case 37: the loss is finite, and the batch contributes nothing."""
    examples = [e | {"counted": np.zeros(6, np.float32)} for e in token_examples(8)]
    trainer = trainer_of(two_devices())

    result = trainer.fit(examples, num_epochs=1, log_every_steps=1)

    assert result.loss == 0
    assert_trees_close(trainer.state["params"], mlp_params(), rtol=0)


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_every_example_is_trained_on_exactly_once_per_epoch(count):
    """Engine case 26: batch size 8; the engine pads the last batch."""

    def loss(params, batch, rngs, is_training):
        return params[batch["id"]], jnp.ones(len(batch["id"]))

    examples = [{"id": i} for i in range(count)]
    trainer = trainer_of(two_devices(), loss, jnp.zeros(count), optimizer=optax.sgd(1.0), seed=5)

    result = trainer.fit(examples, num_epochs=2)

    # In one step each of its examples moves by 1 / (examples in that step).
    expected = np.zeros(count)
    for epoch in range(2):
        order = epoch_order(count, 5, epoch)
        for start in range(0, count, 8):
            rows = order[start : start + 8]
            expected[rows] -= 1 / len(rows)
    np.testing.assert_allclose(trainer.state["params"], expected, rtol=1e-6)
    assert result.step == 2 * -(-count // 8)


@pytest.mark.parametrize("num_devices", [8])
def test_the_evaluation_loss_is_the_mean_over_all_tokens(num_devices):
    """Engine cases 26 and 27: every example is trained on and evaluated once; the metric is that
    over all examples.
    """
    trainer = trainer_of(Deployer(devices=jax.devices()[:num_devices]))

    for count in (1, 7, 8, 9, 21):
        examples = token_examples(count, seed=2)
        examples[0]["counted"][:] = 1
        totals, weights = jax.tree.map(
            np.float64, jax.jit(mlp_loss)(mlp_params(), collate(examples))
        )
        expected = totals.sum() / weights.sum()
        np.testing.assert_allclose(trainer.eval_loss(examples), expected, rtol=1e-6)
    for example in examples:
        example["counted"][:] = 0
    with pytest.raises(DataError, match="21 examples has no mean"):
        trainer.eval_loss(examples)


def test_the_evaluation_loss_in_buckets_is_the_same_and_each_width_is_compiled_once():
    """Engine cases 27 and 45: the metric is that over all examples; a step compiles once for each
    shape.
    """
    examples, traced = token_examples(45, seed=2), []

    def loss(params, batch, rngs, is_training):
        traced.append(batch["x"].shape[1])
        return mlp_loss(params, batch)

    def collate_to(width):
        return lambda rows: {name: array[:, :width] for name, array in collate(rows).items()}

    num_tokens = np.array([[max(1, int(example["counted"].sum()))] for example in examples])
    buckets = choose_buckets(num_tokens, 3, multiple=2)
    bucketing = Bucketing(buckets, tuple(collate_to(width) for (width,) in buckets.widths))
    trainer = trainer_of(two_devices(), loss)

    found = [trainer.eval_loss(examples, bucketing=bucketing) for _ in range(2)]

    assert traced == [6, 4, 2]
    assert found == [pytest.approx(trainer.eval_loss(examples), rel=1e-6)] * 2


def test_a_scalar_loss_is_averaged_over_examples_also_in_partial_batches():
    def loss(params, batch, rngs, is_training):
        return jnp.mean((batch["x"] - params) ** 2)

    examples = [{"x": float(i)} for i in range(11)]
    trainer = trainer_of(two_devices(), loss, jnp.zeros(()))

    assert trainer.eval_loss(examples) == pytest.approx(np.mean(np.arange(11.0) ** 2), rel=1e-6)


def test_the_learning_rate_is_the_schedules_at_the_optimizer_step_and_is_logged_as_used():
    """Engine case 39: four micro-batches per step."""

    def loss(params, batch, rngs, is_training):
        return jnp.full(len(batch["x"]), params), jnp.ones(len(batch["x"]))

    schedule = make_schedule("linear", 0.5, total_steps=6, warmup_steps=2)
    trainer = trainer_of(
        Deployer(devices=jax.devices()[:1]),
        loss,
        jnp.zeros(()),
        optimizer=optax.sgd(schedule),
        lr_schedule=schedule,
        per_device_batch_size=2,
    )
    recorder = Recorder()

    trainer.fit([{"x": 0.0}] * 48, num_epochs=1, callbacks=[recorder], log_every_steps=1)

    rates = [0, 0.25, 0.5, 0.375, 0.25, 0.125]
    np.testing.assert_allclose([r["learning_rate"] for r in recorder.logs], rates, rtol=1e-6)
    # The gradient is 1, so the parameter is minus the sum of the rates that were used.
    np.testing.assert_allclose(trainer.state["params"], -sum(rates), rtol=1e-6)


def test_clipping_is_by_the_global_norm_after_accumulation():
    """Engine case 40: gradients are clipped after accumulation, by the global norm, without
    all-gathering a gradient.
    """
    examples = token_examples(8, seed=1)
    by_optax = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))
    trainer = trainer_of(Deployer(4), max_grad_norm=0.05, per_device_batch_size=1)
    recorder = Recorder()

    trainer.fit(examples, num_epochs=1, callbacks=[recorder])

    expected, _ = by_hand(examples, range(8), 8, by_optax, 1, mlp_params())
    assert_trees_close(trainer.state["params"], expected, rtol=1e-5)
    # The norm that is logged is the one before clipping.
    assert recorder.logs[0]["grad_norm"] > 0.05


def test_a_bfloat16_model_keeps_float32_parameters_and_state():
    """Engine case 41: parameters and sums stay in float32."""

    def loss(params, batch, rngs, is_training):
        outputs = params.astype(jnp.bfloat16) * batch["x"].astype(jnp.bfloat16)
        return outputs.astype(jnp.float32), jnp.ones(len(batch["x"]))

    trainer = trainer_of(two_devices(), loss, jnp.bfloat16(1), optimizer=optax.adam(2.0**-12))

    trainer.fit([{"x": 1.0}] * 8, num_epochs=3)

    assert trainer.state["params"].dtype == jnp.float32
    assert trainer.state["opt_state"][0].mu.dtype == jnp.float32
    # Three updates of 2^-12 are far below bfloat16's spacing at 1.
    np.testing.assert_allclose(1 - trainer.state["params"], 3 * 2.0**-12, rtol=1e-3)


def draws(deployer, num_epochs=1, **options):
    """Train so that parameter [step, row] becomes minus the uniform number drawn there."""

    def loss(params, batch, rngs, is_training):
        drawn = jax.vmap(jax.random.uniform)(rngs)
        return params[batch["id"]] * drawn, jnp.ones(len(batch["id"]))

    # 8 examples in a batch of 8; the learning rate undoes the division by the batch.
    trainer = trainer_of(deployer, loss, jnp.zeros(8), optimizer=optax.sgd(8.0), seed=11, **options)
    found = []
    for epoch in range(num_epochs):
        before = np.asarray(trainer.state["params"])
        trainer.fit([{"id": i} for i in range(8)], num_epochs=epoch + 1)
        found.append((before - np.asarray(trainer.state["params"]))[epoch_order(8, 11, epoch)])
    return np.array(found)


def test_each_example_draws_its_own_random_numbers_the_same_on_every_mesh():
    """Engine case 42: each example has its own mask, which is the same after resuming."""
    alone = draws(Deployer(devices=jax.devices()[:1]), num_epochs=2)
    spread = draws(Deployer(2), num_epochs=2)
    accumulated = draws(Deployer(devices=jax.devices()[:2]), num_epochs=2, per_device_batch_size=1)

    # (seed, step, row) folded by hand.
    expected = [
        [
            jax.random.uniform(
                jax.random.fold_in(jax.random.fold_in(jax.random.key(11), step), row)
            )
            for row in range(8)
        ]
        for step in range(2)
    ]
    assert len(np.unique(np.round(alone, 5))) == 16
    for found in (alone, spread, accumulated):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_each_step_function_is_compiled_once(caplog):
    """Engine case 45: epochs with partial batches, evaluations and a second fit."""
    trainer = trainer_of(Deployer(2), per_device_batch_size=1)
    examples = token_examples(19)

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trainer.fit(examples, num_epochs=2, eval_examples=token_examples(5))
        trainer.fit(examples, num_epochs=3, eval_examples=token_examples(21))

    compiled = [r.getMessage() for r in caplog.records if "XLA compilation" in r.getMessage()]
    assert sum("train_step" in message for message in compiled) == 1
    assert sum("eval_step" in message for message in compiled) == 1


def test_a_model_may_name_mesh_axes_in_sharding_constraints():
    def constrained(params, batch, rngs, is_training):
        x = jax.lax.with_sharding_constraint(batch["x"], P("data", None, None))
        return mlp_loss(params, batch | {"x": x})

    trainer, plain = trainer_of(Deployer(2), constrained), trainer_of(Deployer(2))

    assert trainer.eval_loss(token_examples(8)) == plain.eval_loss(token_examples(8))
    trainer.fit(token_examples(8), num_epochs=1)


def test_parameters_given_to_a_trainer_stay_usable():
    params = jax.tree.map(jnp.asarray, mlp_params())
    examples = token_examples(8)

    first = trainer_of(Deployer(devices=jax.devices()[:1]), params=params)
    first.fit(examples, num_epochs=2)
    second = trainer_of(Deployer(2), params=params)
    second.fit(examples, num_epochs=2)

    assert_trees_close(params, mlp_params(), rtol=0)
    assert_trees_close(second.state["params"], first.state["params"], rtol=1e-5)


def test_a_step_takes_over_the_memory_of_the_state_before_it():
    trainer = trainer_of(two_devices())
    before = jax.tree.leaves(trainer.state)

    trainer.fit(token_examples(8), num_epochs=1)

    assert len(before) > 4
    assert all(array.is_deleted() for array in before)


def test_a_second_fit_goes_on_where_the_first_ended():
    examples = token_examples(12)
    at_once, in_two = trainer_of(two_devices()), trainer_of(two_devices())

    at_once.fit(examples, num_epochs=3)
    in_two.fit(examples, num_epochs=1)
    result = in_two.fit(examples, num_epochs=3)

    assert (result.start_step, result.step) == (2, 6)
    assert_trees_close(in_two.state["params"], at_once.state["params"], rtol=0)


def test_log_records_cover_every_step_once():
    recorder = Recorder()
    examples = token_examples(8 * 7)

    one_by_one = Recorder()
    trainer_of(two_devices()).fit(examples, num_epochs=1, callbacks=[one_by_one], log_every_steps=1)
    trainer_of(two_devices()).fit(examples, num_epochs=1, callbacks=[recorder], log_every_steps=3)

    assert [r["step"] for r in recorder.logs] == [3, 6, 7]
    assert recorder.logs[-1]["epoch"] == 1
    assert recorder.logs[0]["total_steps"] == 7
    assert all(r["tokens_per_second"] > 0 for r in recorder.logs)
    each = [r["loss"] for r in one_by_one.logs]
    assert min(each[:3]) < recorder.logs[0]["loss"] < max(each[:3])
    assert recorder.logs[2]["loss"] == pytest.approx(each[6], rel=1e-6)


@pytest.mark.parametrize("per_device_batch_size", [4, 1])
def test_what_a_loss_measures_is_logged_as_the_mean_by_the_same_weights(per_device_batch_size):
    def measuring(params, batch, rngs, is_training):
        totals, weights = mlp_loss(params, batch)
        return totals, weights, {"square": jnp.sum(batch["y"] ** 2 * batch["counted"], axis=1)}

    examples, recorder = token_examples(27), Recorder()
    trainer = trainer_of(
        two_devices(), measuring, per_device_batch_size=per_device_batch_size, seed=3
    )

    trainer.fit(
        examples, num_epochs=1, eval_examples=examples, callbacks=[recorder], log_every_steps=3
    )

    rows = [examples[index] for index in epoch_order(27, 3, 0)]
    windows = rows[:24], rows[24:]
    expected = [
        sum(np.sum(row["y"] ** 2 * row["counted"]) for row in window)
        / sum(np.sum(row["counted"]) for row in window)
        for window in windows
    ]
    np.testing.assert_allclose([r["square"] for r in recorder.logs], expected, rtol=1e-5)
    assert "square" not in recorder.evals[0]


def test_a_measure_that_is_not_finite_stops_the_training():
    def measuring(params, batch, rngs, is_training):
        totals, weights = mlp_loss(params, batch)
        return totals, weights, {"ratio": weights / 0.0}

    with pytest.raises(NonFiniteLoss, match="measure ratio after step 1 is"):
        trainer_of(two_devices(), measuring).fit(token_examples(8), num_epochs=1)


def test_evaluations_come_when_they_are_due_and_carry_loss_and_metrics():
    recorder = Recorder()
    trainer = trainer_of(two_devices())

    result = trainer.fit(
        token_examples(30),
        num_epochs=2,
        eval_examples=token_examples(5),
        eval_fn=lambda params, step: {"twice": 2 * step},
        callbacks=[recorder],
        eval_every_steps=3,
    )

    assert [r["step"] for r in recorder.evals] == [3, 6, 8]
    assert [r["twice"] for r in recorder.evals] == [6, 12, 16]
    expected = {"eval_loss": trainer.eval_loss(token_examples(5)), "twice": 16}
    assert result.metrics == expected


def test_a_loss_that_is_not_finite_stops_the_training_and_names_the_step():
    examples = token_examples(40)
    examples[epoch_order(40, 0, 0)[17]]["y"][:] = np.inf
    recorder = Recorder()

    with pytest.raises(NonFiniteLoss, match="step 3 is not finite") as caught:
        trainer_of(two_devices()).fit(
            [e | {"counted": np.ones(6, np.float32)} for e in examples],
            num_epochs=1,
            callbacks=[recorder],
            log_every_steps=1,
        )

    assert caught.value.step == 3
    assert [r["step"] for r in recorder.logs] == [1, 2]


def test_a_gradient_that_is_not_finite_stops_the_training_though_the_loss_is():
    def loss(params, batch, rngs, is_training):
        return jnp.sqrt(params * batch["x"]), jnp.ones(len(batch["x"]))

    with pytest.raises(NonFiniteLoss, match="gradient at step 1 is not finite"):
        trainer_of(two_devices(), loss, jnp.ones(())).fit([{"x": 0.0}] * 8, num_epochs=1)


def test_a_metric_that_is_not_finite_stops_the_training():
    with pytest.raises(NonFiniteLoss, match="metric perplexity after step 1 is inf"):
        trainer_of(two_devices()).fit(
            token_examples(8), num_epochs=1, eval_fn=lambda *_: {"perplexity": float("inf")}
        )


def test_several_model_shards_without_rules_are_refused_with_what_to_pass():
    with pytest.raises(ValueError, match=r"pass sharding_rules=deployer.get_sharding_rules"):
        trainer_of(Deployer(2), sharding_rules=None)


def test_training_on_nothing_is_refused():
    with pytest.raises(DataError, match="no examples"):
        trainer_of(two_devices()).fit([], num_epochs=1)


def test_a_batch_size_that_the_devices_cannot_split_is_refused():
    """Engine case 6: the error names the nearest sizes that divide."""
    with pytest.raises(ValueError, match=r"global_batch_size=13 .* nearest valid values: 12, 14"):
        trainer_of(two_devices(), global_batch_size=13)


def test_clipping_to_nothing_is_refused():
    with pytest.raises(ValueError, match="max_grad_norm=0 must be positive"):
        trainer_of(two_devices(), max_grad_norm=0)
