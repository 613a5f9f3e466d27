"""What whole train steps of the models send, compiled from shapes alone, against Megatron's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from tests.engine.traffic import wire_bytes

BATCH, LENGTH, WIDTH, LAYERS, HEADS, HIDDEN = 4, 64, 128, 2, 4, 256
NUM_SHARDS = 4

# family: (all-reduces of an activation per layer, config)
MODELS = {
    # A vocabulary that four shards do not divide, and a fused c_attn.
    "gpt2": (
        4,
        {
            "vocab_size": 1023,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "n_positions": LENGTH,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    # Attention and feed-forward run in parallel and share their reductions.
    "gptj": (
        2,
        {
            "vocab_size": 1024,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "n_positions": LENGTH,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "rotary_dim": 8,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_models_train_step_sends_the_optimum_within_five_per_cent(family):
    """Engine cases 10, 17 and 40: logits and gradients' norm included."""
    reductions_per_layer, values = MODELS[family]
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values})

    def loss_fn(params, batch, rngs, is_training):
        return cross_entropy(module.apply(config, params, batch["input_ids"]), batch["labels"])

    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    batch = {"input_ids": ids, "labels": ids}
    params = module.abstract_params(config)
    deployer = Deployer(NUM_SHARDS, devices=jax.devices()[:NUM_SHARDS])
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)

    lowered = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=rules,
        global_batch_size=BATCH,
        max_grad_norm=1.0,
    ).lower(batch)

    # Each all-reduce over n shards costs 2(n-1)/n; one for the lookup, one for the head.
    num_reductions = LAYERS * reductions_per_layer + 2
    activation_bytes = 4 * BATCH * LENGTH * WIDTH
    optimum = 2 * (NUM_SHARDS - 1) / NUM_SHARDS * num_reductions * activation_bytes
    assert optimum <= wire_bytes(lowered.compile().as_text()) <= 1.05 * optimum


def test_the_step_lowered_from_shapes_is_the_trainers_own():
    """Its vocabulary of 7 over four shards lies padded."""
    rng = np.random.default_rng(0)
    params = {
        "table": rng.normal(size=(7, 8)).astype(np.float32),
        "up": rng.normal(size=(8, 16)).astype(np.float32),
        "down": rng.normal(size=(16, 8)).astype(np.float32),
    }
    examples = [{"ids": ids} for ids in rng.integers(0, 7, (8, 5))]

    def collate(examples):
        return {"ids": np.stack([e["ids"] for e in examples]).astype(np.int32)}

    def loss_fn(params, batch, rngs, is_training):
        x = params["table"][batch["ids"]]
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return cross_entropy(x[:, :-1] @ params["table"].T, batch["ids"][:, 1:])

    deployer, optimizer = Deployer(4), optax.adamw(1e-2)
    rules = deployer.get_sharding_rules(params, loss_fn, collate(examples[:2]), None, False)
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss_fn,
        params=params,
        optimizer=optimizer,
        sharding_rules=rules,
        global_batch_size=8,
        per_device_batch_size=2,
        max_grad_norm=1.0,
    )

    lowered = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=jax.eval_shape(lambda: params),
        optimizer=optimizer,
        sharding_rules=rules,
        global_batch_size=8,
        per_device_batch_size=2,
        max_grad_norm=1.0,
    ).lower({"ids": jax.ShapeDtypeStruct((4, 5), jnp.int32)})

    with trainer.read_batches(examples, 0, 1) as batches:
        (batch,) = trainer.device_batches(batches)
        own = trainer.plan.train_step.lower(trainer._state, batch)
    assert lowered.as_text() == own.as_text()
