"""What data parallelism sends: gradients, each once, many in one reduction."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from tests.engine.traffic import read_collectives

llama = find_model("llama")
mixtral = find_model("mixtral")

VALUES = {
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
NUM_DEVICES = 4


def lower_step(deployer, num_micro=1, family=llama):
    """The whole train step on eight rows per micro-batch, and its rules."""
    config = family.Config.from_hugging_face(VALUES)

    def loss_fn(params, batch, rngs, is_training):
        return cross_entropy(family.apply(config, params, batch["ids"]), batch["ids"])

    params = family.abstract_params(config)
    batch = {"ids": jax.ShapeDtypeStruct((8, 32), jnp.int32)}
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    lowered = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=rules,
        global_batch_size=8 * num_micro,
        per_device_batch_size=8 // deployer.num_data_shards,
        max_grad_norm=1.0,
    ).lower(batch)
    return lowered.compile(), rules


@pytest.fixture(scope="module")
def compiled_step():
    """Over four data shards, as its compiler left it, and its rules."""
    compiled, rules = lower_step(Deployer(devices=jax.devices()[:NUM_DEVICES]))
    return compiled.as_text(), rules


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

    of_layers = [one for one in read_collectives(text) if one.count == VALUES["num_hidden_layers"]]

    layers = sum(p.num_bytes for p in rules.parameters if p.path.startswith("layers/"))
    assert [one.num_bytes * one.count for one in of_layers] == [layers]
    assert len(re.findall(r" all-reduce\(", text)) <= 3


# What attends by a ring, and what computes experts, says itself how it runs on shards; a mixture's
# other layers are LLaMA's.
STEPS = {
    "fsdp": (llama, {"num_fsdp_shards": 2}),
    "experts and context": (mixtral, {"num_context_shards": 2}),
}


@functools.cache
def step_of(name, num_micro):
    """Of some micro-batches over four data shards, beside two shards of another axis."""
    family, axes = STEPS[name]
    num_devices = NUM_DEVICES * math.prod(axes.values())
    return lower_step(Deployer(**axes, devices=jax.devices()[:num_devices]), num_micro, family)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_gradients_travel_between_data_shards_once_a_step_however_many_micro_batches(name):
    """What travels within the other axis alone has smaller groups."""
    step, rules = step_of(name, 4)

    found = read_collectives(step.as_text())

    sent = sum(one.num_bytes * one.count for one in found if one.group_size >= NUM_DEVICES)
    # The loss and the sum of weights besides.
    assert rules.bytes_per_device <= sent <= rules.bytes_per_device + 64


@pytest.mark.slow
def test_accumulated_gradients_take_no_more_memory_for_being_kept_apart():
    """What is accumulated and what is added to it; each shard's of all shards would be four."""
    (one, rules), (four, _) = (step_of("fsdp", num_micro) for num_micro in (1, 4))

    of_one, of_four = (step.memory_analysis().temp_size_in_bytes for step in (one, four))
    assert of_four <= of_one + 2 * rules.bytes_per_device
