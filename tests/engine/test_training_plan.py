"""A training is planned from shapes alone, and the Trainer executes what was planned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer, TrainingPlan
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model
from tests.drawn_params import draw_params

llama = find_model("llama")

LENGTH = 8
CONFIG = llama.Config.from_hugging_face(
    {
        "model_type": "llama",
        "vocab_size": 101,  # which no number of shards divides
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": LENGTH,
    }
)
EXAMPLES = list(np.random.default_rng(0).integers(0, 101, (12, LENGTH)).astype(np.int32))
BATCH = {"ids": jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)}
SETTINGS = {"global_batch_size": 8, "per_device_batch_size": 1, "max_grad_norm": 1.0}


def loss_fn(params, batch, rngs, is_training):
    return cross_entropy(llama.apply(CONFIG, params, batch["ids"]), batch["ids"])


def collate(examples):
    return {"ids": np.stack(examples)}


TRACED = (llama.abstract_params(CONFIG), loss_fn, BATCH, None, False)


def deployer_of(devices=None, **shards):
    devices = jax.devices()[:4] if devices is None else devices
    return Deployer(num_model_shards=2, num_fsdp_shards=2, devices=devices, seed=3, **shards)


def lora():
    return plan_lora(*TRACED, rank=2, alpha=4.0, targets="attention")


def plan_of(deployer=None, **options):
    deployer = deployer or deployer_of()
    return TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=TRACED[0],
        optimizer=optax.adamw(1e-2),
        sharding_rules=deployer.get_sharding_rules(*TRACED, optimizer=optax.adamw(1e-2)),
        **{**SETTINGS, "batch": BATCH, **options},
    )


def start_of(plan):
    params = draw_params(llama, CONFIG)
    return Trainer.from_plan(plan, collate_fn=collate, params=params)


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)


def held_by_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


OPTIONS = {
    "all parameters": {},
    "factors": {"lora": lora()},
    "some": {"trainable": "attention", "on_nonfinite": "skip"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_planning_and_lowering_make_no_array(options):
    before = {id(array) for array in jax.live_arrays()}

    plan = plan_of(**options)
    plan.lower()

    assert not [array.shape for array in jax.live_arrays() if id(array) not in before]


def test_the_trainer_executes_the_plan():
    """Shardings of the state, and the program: lowered from shapes, and for what is run."""
    plan = plan_of(**OPTIONS["factors"])
    planned, text = described(plan.state), plan.lower().as_text()

    trainer = start_of(plan)
    with trainer.read_batches(EXAMPLES, 0, 1) as batches:
        (batch,) = trainer.device_batches(batches)
        run = plan.train_step.lower(trainer._state, batch).as_text()
        assert described(batch) == described(plan.micro_batches())
        trainer.advance(batch)

    assert described(trainer._state) == planned
    assert run == text
    assert trainer.sharding_rules is plan.rules


def test_given_parameters_start_the_same_training_and_lie_on_the_devices_once():
    deployer = Deployer(devices=jax.devices()[:1], seed=3)
    plan = plan_of(deployer, **OPTIONS["factors"])
    kept = draw_params(llama, CONFIG)
    given = jax.tree.map(jnp.copy, kept)
    before = {id(array) for array in jax.live_arrays()}

    trainer = Trainer.from_plan(plan, collate_fn=collate, params=given, donate_params=True)

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    made = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    state = held_by_one_device(trainer._state)
    assert state <= made < 1.01 * state
    expected = Trainer.from_plan(plan, collate_fn=collate, params=kept).state
    jax.tree.map(np.testing.assert_array_equal, trainer.state, expected)


def test_a_plan_with_factors_trains_them_alone_and_merges_them_into_the_models_parameters():
    plan = plan_of(lora=lora())
    trainer = start_of(plan)
    start = draw_params(llama, CONFIG)

    trainer.fit(EXAMPLES, num_epochs=1)

    trained = trainer.state["params"]
    jax.tree.map(np.testing.assert_array_equal, trained["base"], start)
    merged = plan.model_params(trained)
    expected = plan.lora.merge(jax.device_get(trained))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), merged, expected)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), merged, start)
    assert changed["layers"]["attention"]["kv"]
    assert not changed["embedding"]


def test_planned_memory_is_that_of_the_trainers_arrays():
    plan = plan_of(lora=lora())
    trainer = start_of(plan)

    memory = plan.memory()

    batch = 4 * (SETTINGS["global_batch_size"] // 2) * (LENGTH + 1)  # ids and a mask
    assert memory.arguments == held_by_one_device(trainer._state) + batch
    # What the step returns reuses what it is given, but for a few metrics.
    assert 0 <= memory.outputs - memory.aliased < 1024
    assert memory.total == memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    assert plan.bytes_per_device > held_by_one_device(trainer._state)


def test_a_plan_says_every_parameters_sharding_and_why():
    plan = plan_of(lora=lora())

    of_model = {p.path: p for p in plan.model_rules.parameters}
    assert of_model["layers/mlp/wo"].spec == P(None, "model", "fsdp")
    assert "row-parallel" in of_model["layers/mlp/wo"].reason
    assert {p.path for p in plan.rules.parameters} > {f"base/{path}" for path in of_model}


def test_a_wider_batch_is_lowered_by_the_same_plan():
    plan = plan_of(batch=None)

    (ids,) = plan.micro_batches({"ids": np.zeros((3, 5), np.int32)})["batch"].values()

    # Four micro-batches of a row for each of two data shards, whatever was collated.
    assert ids.shape == (4, 2, 5)
    with pytest.raises(ValueError, match="made without a batch"):
        plan.lower()
    with pytest.raises(ValueError, match=r"leading dims differ: \[1, 2\]"):
        plan.lower({"ids": np.zeros((1, 5)), "labels": np.zeros((2, 5))})


def test_factors_and_a_choice_of_parameters_are_refused_together():
    with pytest.raises(ValueError, match="lora or trainable, not both"):
        plan_of(lora=lora(), trainable="attention")


def test_parameters_are_counted_by_elements_and_of_factors_the_trained_ones_too():
    """By hand: embedding and head, two layers of q, k, v, o, three of the MLP and two norms."""
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32
    in_all = 2 * 101 * 32 + 2 * layer + 32
    # Of rank 2; k and v are one kernel and share one A.
    factors = 2 * 2 * 3 * (32 + 32)

    plain, adapted = plan_of(), plan_of(lora=lora())

    assert (plain.num_parameters, plain.num_trained) == (in_all, in_all)
    assert plain.parameters_text().startswith(f"{in_all:,} parameters in ")
    assert "trained" not in plain.parameters_text()
    assert (adapted.num_parameters, adapted.num_trained) == (in_all + factors, factors)
    assert adapted.parameters_text().endswith("; trained 768 of 25,824 (2.97%), LoRA")
