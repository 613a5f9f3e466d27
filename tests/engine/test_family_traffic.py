"""What train steps of further families send, encoders and cross-attention too: the optimum."""

import jax
import jax.numpy as jnp
import optax
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.compiled import lower_train_step
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.step.traffic import wire_bytes
from redco_flow.models.find import find_model

BATCH, SOURCE, TARGET, WIDTH, LAYERS, HEADS, HIDDEN = 4, 64, 32, 128, 2, 4, 256
NUM_SHARDS = 4
# Four all-reduces of an activation a layer, one of the lookup, one of the head's input.
ONE_STACK = (LAYERS * 4 + 2) * SOURCE
# Of a pair of layers eleven: cross-attention has two of the decoder's six and one of the source's.
TWO_STACKS = LAYERS * (5 * SOURCE + 6 * TARGET) + SOURCE + 2 * TARGET
T5 = {
    "vocab_size": 1024, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": HIDDEN,
    "num_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0,
}  # fmt: skip

# name: (family, positions of WIDTH floats that are reduced per example, config)
MODELS = {
    "opt": ("opt", ONE_STACK, {
        "vocab_size": 1024, "max_position_embeddings": SOURCE, "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "ffn_dim": HIDDEN, "dropout": 0.0, "attention_dropout": 0.0,
    }),
    # Two heads to each key-value head.
    "llama_gqa": ("llama", ONE_STACK, {
        "vocab_size": 1024, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "intermediate_size": HIDDEN,
        "max_position_embeddings": SOURCE, "tie_word_embeddings": False,
    }),
    # A vocabulary that four shards do not divide.
    "bert": ("bert", ONE_STACK, {
        "vocab_size": 1022, "max_position_embeddings": SOURCE, "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": HIDDEN,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "t5_v1.1": ("t5", TWO_STACKS, {
        **T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False
    }),
    "t5_v1.0": ("t5", TWO_STACKS, {**T5, "feed_forward_proj": "relu"}),
    "bart": ("bart", TWO_STACKS, {
        "vocab_size": 1021, "d_model": WIDTH, "max_position_embeddings": SOURCE,
        "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    }),
}  # fmt: skip


def ids(length):
    return jax.ShapeDtypeStruct((BATCH, length), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_familys_train_step_sends_the_optimum_within_five_per_cent(name):
    """Engine cases 10 and 17: cross-attention and relative bias included."""
    family, positions, values = MODELS[name]
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values})

    def loss_fn(params, batch, rngs, is_training):
        inputs = [batch["source"]]
        if "target" in batch:
            inputs += [jnp.ones_like(batch["source"]), batch["target"]]
        return cross_entropy(module.apply(config, params, *inputs), batch["labels"])

    batch = {"source": ids(SOURCE), "labels": ids(SOURCE)}
    if positions == TWO_STACKS:
        batch |= {"target": ids(TARGET), "labels": ids(TARGET)}
    params = module.abstract_params(config)
    deployer = Deployer(NUM_SHARDS, devices=jax.devices()[:NUM_SHARDS])
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)

    lowered = lower_train_step(
        deployer, loss_fn, params, optax.adamw(1e-3), rules, batch, max_grad_norm=1.0
    )

    optimum = 2 * (NUM_SHARDS - 1) / NUM_SHARDS * positions * BATCH * WIDTH * 4
    assert optimum <= wire_bytes(lowered.compile().as_text()) <= 1.05 * optimum
