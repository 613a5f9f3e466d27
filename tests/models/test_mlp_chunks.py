"""Feed-forward layers over some tokens at a time compute what they compute of all at once."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model
from tests.drawn_params import draw_params
from tests.engine.traffic import wire_bytes

llama = find_model("llama")
mixtral = find_model("mixtral")

# No other dim is UNITS, or half of them.
ROWS, LENGTH, WIDTH, UNITS, HEADS, NUM_CHUNKS = 4, 48, 16, 44, 4, 5
FAMILIES = {
    # Gated.
    "llama": {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": UNITS,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": LENGTH,
    },
    # Plain, with biases, beside attention.
    "gptj": {
        "vocab_size": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_inner": UNITS,
        "n_positions": LENGTH, "rotary_dim": 2, "bos_token_id": 2, "eos_token_id": 1,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    # With dropout of the units.
    "t5": {
        "vocab_size": 64, "d_model": WIDTH, "d_kv": 4, "d_ff": UNITS, "num_layers": 1,
        "num_heads": HEADS, "dropout_rate": 0.2, "feed_forward_proj": "gated-gelu",
    },
}  # fmt: skip
OFFLOADED = {
    "remat": "full",
    "activations": {"layer_input": "offload", "attention": "offload", "offload_share": 0.5},
}


def plan_of(family, mesh, values, *, num_micro=1):
    """Return the plan of a training with plain gradient descent at a rate of 1."""
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **FAMILIES[family]})
    config = config.updated(values)

    def loss_fn(params, batch, rngs, is_training):
        logits = module.apply(config, params, batch["ids"], rngs=rngs if is_training else None)
        return cross_entropy(logits, batch["ids"])

    sizes = {axis: int(size) for axis, size in (part.split() for part in mesh.split(", "))}
    deployer = Deployer(
        sizes.get("model", 1),
        num_fsdp_shards=sizes.get("fsdp", 1),
        num_context_shards=sizes.get("context", 1),
        devices=jax.devices()[: int(np.prod([*sizes.values()]))],
    )
    params = module.abstract_params(config)
    batch = {"ids": jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)}
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1)
    return TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(1.0),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=ROWS,
        per_device_batch_size=ROWS // num_micro // shards,
        batch=batch,
    ), draw_params(module, config, stddev=0.1 if family == "t5" else 0.02)


def run(plan, params):
    """Return the compiled step, the loss and the gradients."""
    step = plan.compile()
    shapes = plan.micro_batches()
    ids = np.random.default_rng(0).integers(3, 64, (ROWS, LENGTH))
    numbers = {"batch": {"ids": ids}, "mask": np.ones(ROWS), "rows": np.arange(ROWS)}
    batches = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape).astype(like.dtype), like.sharding),
        numbers,
        shapes,
    )
    start = jax.jit(lambda params: plan.storage.to_storage(plan.start(params)))
    state = jax.device_put(start(params), jax.tree.map(lambda x: x.sharding, plan.state))
    state, metrics = step(state, batches)
    after = plan.storage.to_logical(state)["params"]
    gradients = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params, after)
    return step, float(metrics["total"] / metrics["weight"]), gradients


def assert_same(found, expected):
    (_, loss, gradients), (_, expected_loss, expected_gradients) = found, expected
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (gradients, expected_gradients)), strict=True):
        # Sums run in another order, and a difference of parameters up to 1 is rounded by 2^-23.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max() + 2**-22)


def rows_of_units(step, num_units):
    """Return the most rows of units that an array of a device's program has."""
    shapes = re.findall(r"f32\[([0-9,]+)\]", step.as_text())
    dims = [[int(size) for size in shape.split(",")] for shape in shapes]
    return max(int(np.prod(shape)) // num_units for shape in dims if num_units in shape)


@pytest.mark.slow
def test_a_step_in_chunks_is_that_of_all_tokens_and_sends_no_more():
    """The kernels' gradients are reduced once, not in every chunk."""
    mesh, values = "data 2, fsdp 2, model 2", {"remat": "minimal"}
    whole, params = plan_of("llama", mesh, values)
    plan, _ = plan_of("llama", mesh, {**values, "num_mlp_chunks": NUM_CHUNKS})

    found, expected = run(plan, params), run(whole, params)

    assert_same(found, expected)
    sent, at_once = (wire_bytes(step.as_text()) for step, *_ in (found, expected))
    assert sent <= 1.001 * at_once
    num_units = UNITS // 2
    num_tokens = ROWS * LENGTH // whole.deployer.num_data_shards
    # Of a chunk with two gates, or of a kernel with two.
    most = max(2 * math.ceil(num_tokens / NUM_CHUNKS), 2 * WIDTH)
    assert rows_of_units(found[0], num_units) <= most < rows_of_units(expected[0], num_units)


@pytest.mark.slow
def test_units_are_dropped_alike_in_chunks():
    module = find_model("t5")
    whole = module.Config.from_hugging_face({"model_type": "t5", **FAMILIES["t5"]})
    params = draw_params(module, whole, stddev=0.1)
    ids = np.random.default_rng(0).integers(3, 64, (ROWS, LENGTH))
    given = (params, ids, np.ones_like(ids), jax.random.split(jax.random.key(1), ROWS))
    deployer = Deployer(2, devices=jax.devices()[:2])
    given = jax.device_put(given, deployer.named_sharding())

    found, expected = (
        deployer.jit(functools.partial(module.encode, config))(*given)
        for config in (whole.updated({"num_mlp_chunks": NUM_CHUNKS}), whole)
    )

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_offloaded_and_in_chunks_gradients_are_those_of_the_plain_step():
    """And those of micro-batches whose gradients are added up before they are reduced."""
    mesh = "data 2, context 2"
    whole, params = plan_of("gptj", mesh, {})
    plan, _ = plan_of("gptj", mesh, {**OFFLOADED, "num_mlp_chunks": NUM_CHUNKS}, num_micro=2)

    assert_same(run(plan, params), run(whole, params))


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (llama, {"num_mlp_chunks": 0}, "num_mlp_chunks is 0; it must be a positive whole number"),
        (mixtral, {"num_mlp_chunks": 2}, "a mixture of experts takes all tokens at once"),
        (
            llama,
            {"num_mlp_chunks": 2, "remat": "full", "activations": {"mlp_in": "keep"}},
            "num_mlp_chunks is 2, and activations has mlp_in 'keep'",
        ),
    ],
)
def test_chunks_that_a_model_cannot_have_are_refused(config, values, message):
    with pytest.raises(ValueError, match=message):
        config.Config(**values)
