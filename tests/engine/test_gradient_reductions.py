"""What data parallelism sends: gradients, each once, many in one reduction."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from redco_flow import Deployer
from redco_flow.engine.compiled_step import lower_train_step
from redco_flow.engine.loss import cross_entropy
from redco_flow.engine.traffic import read_collectives
from redco_flow.models import llama

CONFIG = llama.Config.from_hugging_face(
    {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 32,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
)
NUM_DEVICES = 4


def loss_fn(params, batch, rngs, is_training):
    return cross_entropy(llama.apply(CONFIG, params, batch["ids"]), batch["ids"])


@pytest.fixture(scope="module")
def compiled_step():
    """The whole train step over four data shards, as its compiler left it, and its rules."""
    deployer = Deployer(devices=jax.devices()[:NUM_DEVICES])
    params, batch = llama.abstract_params(CONFIG), {"ids": jax.ShapeDtypeStruct((8, 32), jnp.int32)}
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    lowered = lower_train_step(
        deployer, loss_fn, params, optax.adamw(1e-3), rules, batch, max_grad_norm=1.0
    )
    return lowered.compile().as_text(), rules


def test_each_gradient_travels_once_and_nothing_else_but_a_few_numbers(compiled_step):
    text, rules = compiled_step

    found = read_collectives(text)

    assert {(one.kind, one.group_size) for one in found} == {("all-reduce", NUM_DEVICES)}
    sent = sum(one.num_bytes * one.count for one in found)
    # The loss and the sum of weights besides.
    assert rules.total_bytes <= sent <= rules.total_bytes + 64


def test_the_gradients_of_a_layer_are_one_reduction_within_the_backward_pass(compiled_step):
    """All of a layer's kernels and norms together, while earlier layers are still to come."""
    text, rules = compiled_step

    of_layers = [one for one in read_collectives(text) if one.count == CONFIG.num_hidden_layers]

    layers = sum(p.num_bytes for p in rules.parameters if p.path.startswith("layers/"))
    assert [one.num_bytes * one.count for one in of_layers] == [layers]
    assert len(re.findall(r" all-reduce\(", text)) <= 3
