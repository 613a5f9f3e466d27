"""What train steps of further families send, encoders and cross-attention too: the optimum."""

import jax
import jax.numpy as jnp
import optax
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from tests.engine.traffic import read_collectives, wire_bytes

BATCH, SOURCE, TARGET, WIDTH, LAYERS, HEADS, HIDDEN = 4, 64, 32, 128, 2, 4, 256
NUM_SHARDS = 4
# Four all-reduces of an activation a layer, one of the lookup, one of the head's input.
ONE_STACK = (LAYERS * 4 + 2) * SOURCE
# Of a pair of layers eleven: cross-attention has two of the decoder's six and one of the source's.
TWO_STACKS = LAYERS * (5 * SOURCE + 6 * TARGET) + SOURCE + 2 * TARGET

# name: (family, positions of WIDTH floats that are reduced per example, config)
MODELS = {
    # Two heads to each key-value head.
    "llama_gqa": ("llama", ONE_STACK, {
        "vocab_size": 1024, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "intermediate_size": HIDDEN,
        "max_position_embeddings": SOURCE, "tie_word_embeddings": False,
    }),
    # Queries and keys are normalised over all shards' heads together.
    "olmo2": ("olmo2", ONE_STACK, {
        "vocab_size": 1024, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "intermediate_size": HIDDEN,
        "eos_token_id": 1,
    }),
    "t5": ("t5", TWO_STACKS, {
        "vocab_size": 1024, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": HIDDEN,
        "num_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False
    }),
}  # fmt: skip


def ids(length):
    return jax.ShapeDtypeStruct((BATCH, length), jnp.int32)


def compile_step(family, values, *, has_target=False):
    """The optimised HLO of the whole train step over four model shards, and its rules."""
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values})

    def loss_fn(params, batch, rngs, is_training):
        inputs = [batch["source"]]
        if "target" in batch:
            inputs += [jnp.ones_like(batch["source"]), batch["target"]]
        return cross_entropy(module.apply(config, params, *inputs), batch["labels"])

    batch = {"source": ids(SOURCE), "labels": ids(SOURCE)}
    if has_target:
        batch |= {"target": ids(TARGET), "labels": ids(TARGET)}
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
    return lowered.compile().as_text(), rules


def activation_bytes(positions):
    """Bytes that all-reducing these positions sends."""
    return 2 * (NUM_SHARDS - 1) / NUM_SHARDS * positions * BATCH * WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo2", "t5"])
def test_a_familys_train_step_sends_the_optimum_within_five_per_cent(name):
    """Engine cases 10 and 17: cross-attention and relative bias included."""
    family, positions, values = MODELS[name]
    text, _ = compile_step(family, values, has_target=positions == TWO_STACKS)

    optimum = activation_bytes(positions)
    assert optimum <= wire_bytes(text) <= 1.05 * optimum


@pytest.mark.slow
def test_of_replicated_key_value_kernels_only_the_gradient_is_sent():
    """Engine case 12: two key-value heads on four shards; the optimizer sends nothing."""
    family, positions, values = MODELS["llama_gqa"]
    num_kv = 2
    text, rules = compile_step(family, {**values, "num_key_value_heads": num_kv})

    (kernel,) = (p for p in rules.parameters if p.path == "layers/attention/kv")
    assert not any(kernel.spec)
    # Two shards compute each head's gradient: they add it up, and heads are gathered.
    added_up = 2 * (1 - num_kv / NUM_SHARDS) * kernel.num_bytes / num_kv
    gathered = (1 - 1 / num_kv) * kernel.num_bytes
    gathers = [one for one in read_collectives(text) if one.kind == "all-gather"]
    assert sum(one.wire_bytes for one in gathers) <= gathered
    optimum = activation_bytes(positions) + added_up + gathered
    assert optimum <= wire_bytes(text) <= 1.01 * optimum
