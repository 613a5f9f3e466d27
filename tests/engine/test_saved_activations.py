"""Over model shards each keeps its part of the sequence of what all have in full."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer, TrainingPlan
from redco_flow.engine.step.compiled import on_unpadded_params
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model
from tests.drawn_params import draw_like
from tests.engine.traffic import read_collectives

# No other dim is LAYERS or LENGTH: an array with both was kept of each layer.
LAYERS, ROWS, LENGTH, WIDTH, HEADS = 3, 8, 24, 16, 4
FAMILIES = {
    "llama": {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 40,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": LENGTH,
    },
    # Norms on the sums of sublayers and what they read, and cross-attention.
    "bart": {
        "vocab_size": 64, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": LENGTH,
        "dropout": 0.0, "attention_dropout": 0.0,
    },
    "t5": {
        "vocab_size": 64, "d_model": WIDTH, "d_kv": 4, "d_ff": 40, "num_layers": LAYERS,
        "num_heads": HEADS, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
    },
    "gptj": {
        "vocab_size": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": 40,
        "n_positions": LENGTH, "rotary_dim": 2, "bos_token_id": 2, "eos_token_id": 1,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
WHOLE = {"layer_input": "keep", "attention_out": "recompute", "mlp_out": "recompute"}
INPUT_ALONE = {**WHOLE, "layer_input": "split"}
ALL = dict.fromkeys(("layer_input", "attention_out", "mlp_input", "mlp_out"), "split")


def deployer_of(model, *, data=1, fsdp=1, context=1):
    devices = jax.devices()[: data * fsdp * context * model]
    return Deployer(model, num_fsdp_shards=fsdp, num_context_shards=context, devices=devices)


def model_of(family, remat="full", activations=None):
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **FAMILIES[family]})
    return module, config.updated({"remat": remat, "activations": activations or {}})


def loss_of(family, *choice):
    module, config = model_of(family, *choice)

    def loss_fn(params, batch, rngs, is_training):
        given = [batch["ids"]]
        if family in ("bart", "t5"):
            given += [jnp.ones_like(batch["ids"]), batch["ids"]]
        logits = module.apply(config, params, *given, rngs=rngs if is_training else None)
        return cross_entropy(logits, batch["ids"])

    return loss_fn, module.abstract_params(config)


def batch_of(length=LENGTH):
    return {"ids": jax.ShapeDtypeStruct((ROWS, length), jnp.int32)}


def kept(deployer, loss_fn, params, length=LENGTH):
    """Return what is kept of each layer: (shape, shape of a device's part), without the layers."""
    batch = batch_of(length)
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    storage = deployer.storage(params, rules.specs(params), rules.fused(params))
    stored_loss = on_unpadded_params(loss_fn, storage)

    def pull_back(params, batch):
        def mean(params):
            totals, weights = stored_loss(storage.unpad(params), batch, None, False)
            return jnp.sum(totals) / jnp.sum(weights)

        return jax.vjp(mean, params)[1]

    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=deployer.rows_sharding()), batch
    )
    compiled = jax.jit(deployer.on_mesh(pull_back)).lower(storage.abstract_stored, batch).compile()
    shapes = jax.tree.leaves(jax.eval_shape(deployer.on_mesh(pull_back), storage.shapes, batch))
    shardings = jax.tree.leaves(compiled.output_shardings)
    return [
        (x.shape[1:], sharding.shard_shape(x.shape)[1:])
        for x, sharding in zip(shapes, shardings, strict=True)
        if x.shape[:1] == (LAYERS,) and length in x.shape
    ]


@pytest.mark.parametrize(
    ("family", "shards", "num_arrays"),
    [
        ("llama", {"model": 2, "context": 2, "data": 2}, 2),
        ("bart", {"model": 4}, 3 + 4),
    ],
)
def test_with_full_each_shard_keeps_its_part_of_inputs_and_reduced_results(
    family, shards, num_arrays
):
    """Engine case 61: and nothing else, in arrays no more than there are shards."""
    found = kept(deployer_of(**shards), *loss_of(family))

    length = LENGTH // shards["model"] // shards.get("context", 1)
    rows = ROWS // shards.get("fsdp", 1) // shards.get("data", 1)
    assert found == [((ROWS, LENGTH, WIDTH), (rows, length, WIDTH))] * num_arrays


@pytest.mark.parametrize(("family", "num_shards"), [("t5", 2), ("gptj", 4)])
@pytest.mark.slow
def test_what_would_take_more_memory_or_send_more_is_not_split_unasked(family, num_shards):
    """Engine case 61: of two shards three halves, and of layers whose sublayers are not reduced
    again.
    """
    asked, unasked = (
        kept(deployer_of(num_shards), *loss_of(family, "full", choice))
        for choice in (INPUT_ALONE, {})
    )

    assert {part[1] for _, part in asked} == {LENGTH // num_shards}
    decoders = [part for _, part in unasked[-1:]]  # of T5's encoder two halves are kept
    assert decoders == [(ROWS, LENGTH, WIDTH)]


def test_one_model_shard_keeps_the_layers_input_alone():
    """Engine case 61: there `split` means keep."""
    found = kept(deployer_of(1, fsdp=4), *loss_of("llama"))
    asked = kept(deployer_of(1, fsdp=4), *loss_of("llama", "full", {"layer_input": "split"}))

    assert found == asked == [((ROWS, LENGTH, WIDTH), (ROWS // 4, LENGTH, WIDTH))]


def test_a_length_that_the_shards_do_not_divide_is_split_too():
    """Engine case 61: the last shard's part is filled up."""
    found = kept(deployer_of(4), *loss_of("llama"), length=LENGTH - 1)

    assert [shape for shape, _ in found] == [(ROWS, LENGTH - 1, WIDTH)] * 2


def sent(family, num_shards, *choice, **shards):
    """Return the bytes that the train step's gathers send, and all that it sends."""
    loss_fn, params = loss_of(family, *choice)
    deployer = deployer_of(num_shards, **shards)
    rules = deployer.get_sharding_rules(params, loss_fn, batch_of(), None, False)
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(1e-2),
        sharding_rules=rules,
        global_batch_size=ROWS,
    )
    found = read_collectives(plan.compile(batch_of()).as_text())
    return sum(one.wire_bytes for one in found)


@pytest.mark.parametrize(("family", "num_shards"), [("llama", 2)])
@pytest.mark.slow
def test_parts_are_gathered_for_no_more_than_a_reduction_that_is_spared(family, num_shards):
    """Engine case 61: whole, the backward pass would reduce results again."""
    found, whole = (sent(family, num_shards, "full", choice) for choice in ({}, WHOLE))

    assert found <= 1.001 * whole


def test_the_layers_input_alone_costs_one_gather_a_layer():
    """Engine case 61: as the documentation says to who asks for it."""
    found, whole = (sent("llama", 4, "full", choice) for choice in (INPUT_ALONE, WHOLE))

    gathered = 3 / 4 * LAYERS * ROWS * LENGTH * WIDTH * 4
    assert found - whole == pytest.approx(gathered, rel=1e-3)


def train(family, deployer, *choice, **options):
    """Return what a step makes of the parameters."""
    loss_fn, shapes = loss_of(family, *choice)
    rows = np.random.default_rng(0).integers(3, 64, (ROWS, LENGTH)).astype(np.int32)
    trainer = Trainer(
        deployer,
        collate_fn=lambda examples: {"ids": np.stack(examples)},
        loss_fn=loss_fn,
        params=draw_like(shapes),
        optimizer=optax.sgd(1.0),
        sharding_rules=deployer.get_sharding_rules(shapes, loss_fn, batch_of(), None, False),
        global_batch_size=ROWS,
        seed=7,
        **options,
    )
    trainer.fit(list(rows), num_epochs=1)
    return jax.device_get(trainer.state["params"])


def gradients(family, deployer, *choice):
    """Return those of a mean loss, without a trainer's micro-batches."""
    loss_fn, shapes = loss_of(family, *choice)
    batch = {"ids": np.random.default_rng(0).integers(3, 64, (ROWS, LENGTH)).astype(np.int32)}
    rules = deployer.get_sharding_rules(shapes, loss_fn, batch, None, False)

    def mean(params, batch):
        totals, weights = loss_fn(params, batch, None, False)
        return jnp.sum(totals) / jnp.sum(weights)

    params = deployer.shard_params(draw_like(shapes), rules)
    return deployer.jit(jax.grad(mean))(params, deployer.put_rows(batch))


@pytest.mark.slow
@pytest.mark.covers("one device", family="llama", mesh="fsdp × model")
def test_a_step_with_split_activations_is_that_of_one_device():
    """Engine case 61: also in micro-batches, and where data shards keep gradients apart."""
    deployer = deployer_of(4, fsdp=2)

    found = train("llama", deployer, "minimal", ALL, per_device_batch_size=2)

    assert_near(found, train("llama", deployer_of(1), "none"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shards"),
    [("llama", {"model": 2, "context": 2, "data": 2}), ("bart", {"model": 4, "data": 2})],
)
@pytest.mark.covers("one device", family="family", mesh="shards")
def test_gradients_with_split_activations_are_those_of_one_device(family, shards):
    """Engine case 61."""
    found = gradients(family, deployer_of(**shards))

    assert_near(found, gradients(family, deployer_of(1), "none"))


def assert_near(found, expected):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Of float32 numbers whose sums run in another order.
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * np.abs(two).max())
