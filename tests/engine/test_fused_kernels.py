"""Kernels whose parts are taken apart after the product, as users write them, at the optimum."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer, parameter_digests
from redco_flow.engine.sharding.fused_parts import FusedParts
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from tests.drawn_params import numbered
from tests.engine.traffic import read_collectives, wire_bytes

LAYERS, WIDTH, HEADS, UNITS, VOCAB, LENGTH = 2, 32, 4, 48, 64, 8
HEAD_DIM = WIDTH // HEADS
NAMES = ("qkv", "qkv_bias", "out", "gate_up", "down")


def split_flat(fused):
    return [part.reshape(*part.shape[:-1], HEADS, HEAD_DIM) for part in jnp.split(fused, 3, -1)]


def slice_flat(fused):
    query, rest = fused[..., :WIDTH], fused[..., WIDTH:]
    parts = (query, rest[..., :WIDTH], rest[..., WIDTH:])
    return [part.reshape(*part.shape[:-1], HEADS, HEAD_DIM) for part in parts]


def name_parts(fused):
    return jnp.unstack(fused.reshape(*fused.shape[:-1], 3, HEADS, HEAD_DIM), axis=-3)


def list_heads(fused):
    return jnp.split(fused.reshape(*fused.shape[:-1], 3 * HEADS, HEAD_DIM), 3, axis=-2)


def flatten_rows(fused):
    parts = jnp.split(fused.reshape(-1, 3 * WIDTH), 3, axis=-1)
    return [part.reshape(*fused.shape[:-1], HEADS, HEAD_DIM) for part in parts]


def split_unequal(fused):
    """Three queries, summed, to a head's key; values are wider."""
    return _as_heads(*jnp.split(fused, [12 * HEADS, 16 * HEADS], axis=-1))


def slice_unequal(fused):
    scored, value = fused[..., : 16 * HEADS], fused[..., 16 * HEADS :]
    return _as_heads(scored[..., : 12 * HEADS], scored[..., 12 * HEADS :], value)


def _as_heads(query, key, value):
    rows = (*query.shape[:-1], HEADS)
    query = query.reshape(*rows, 3, 4).sum(-2)
    return query, key.reshape(*rows, 4), value.reshape(*rows, HEAD_DIM)


WAYS = {
    way.__name__: way
    for way in (
        split_flat,
        slice_flat,
        name_parts,
        list_heads,
        flatten_rows,
        split_unequal,
        slice_unequal,
    )
}


def params(names=NAMES):
    rng = np.random.default_rng(0)
    sizes = ((WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH, 2 * UNITS), (UNITS, WIDTH))
    layer = dict(zip(names, sizes, strict=True))
    shapes = {
        "table": (VOCAB, WIDTH),
        "layers": {name: (LAYERS, *shape) for name, shape in layer.items()},
    }
    return jax.tree.map(
        lambda shape: 0.3 * rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def attend(query, key, value):
    # Not a softmax, under which a bias of the keys changes nothing and its gradient is noise.
    weights = jax.nn.sigmoid(jnp.einsum("bqhk,bshk->bhqs", query, key) / HEAD_DIM**0.5)
    return jnp.einsum("bhqs,bshk->bqhk", weights, value)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def make_logits(way, *, is_scanned=True):
    """Layers are scanned and rematerialised, or a Python loop."""

    def layer(x, p):
        qkv, bias, out, gate_up, down = (p[name] for name in NAMES)
        mixed = attend(*way(normed(x) @ qkv + bias))
        x = x + mixed.reshape(x.shape) @ out
        gate, up = jnp.split(normed(x) @ gate_up, 2, axis=-1)
        return x + jax.nn.silu(gate) * up @ down

    def logits(params, ids):
        x, layers = params["table"][ids], params["layers"]
        if is_scanned:
            again = jax.checkpoint(lambda x, p: (layer(x, p), None))
            x, _ = jax.lax.scan(again, x, layers)
        else:
            for number in range(LAYERS):
                x = layer(x, jax.tree.map(lambda leaf, n=number: leaf[n], layers))
        return normed(x) @ params["table"].T

    return logits


def make_loss(way=split_flat, **options):
    logits = make_logits(way, **options)

    def loss(params, batch, rngs, is_training):
        return cross_entropy(logits(params, batch["ids"]), jnp.roll(batch["ids"], -1, 1))

    return loss


def examples(count=16):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(0, VOCAB, LENGTH).astype(np.int32)} for _ in range(count)]


def collate(rows):
    return {"ids": np.stack([row["ids"] for row in rows])}


TRACED = (collate(examples(2)), None, False)


class Norms(Callback):
    def __init__(self):
        self.values = []

    def on_log(self, record):
        self.values += [record["loss"], record["grad_norm"]]


def trainer_of(num_model_shards, loss, *, optimizer=None, num_fsdp_shards=1, lora=None):
    devices = jax.devices()[: num_model_shards * num_fsdp_shards]
    deployer = Deployer(num_model_shards, num_fsdp_shards=num_fsdp_shards, devices=devices)
    start = params()
    rules = deployer.get_sharding_rules(start, loss, *TRACED)
    if lora is not None:
        start = lora.start(start, jax.random.key(0))
        rules, loss = lora.rules(rules, start), lora.adapt(loss)
    return Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=start,
        optimizer=optimizer or optax.adamw(1e-2),
        sharding_rules=rules,
        global_batch_size=8,
        max_grad_norm=1.0,
        trainable=lora.trainable if lora else None,
    )


def trained(trainer):
    norms = Norms()
    trainer.fit(examples(), num_epochs=2, callbacks=[norms], log_every_steps=1)
    return norms.values


@functools.cache
def on_one_shard(way):
    trainer = trainer_of(1, make_loss(way))
    return trained(trainer), jax.device_get(trainer.state["params"])


def assert_trains_alike(split, expected_norms, expected):
    np.testing.assert_allclose(trained(split), expected_norms, rtol=1e-5)
    for one, two in zip(
        jax.tree.leaves(split.state["params"]), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-5)


def assert_trains_as_one_shard(loss, num_model_shards=4, **options):
    alone = trainer_of(1, loss, **options)
    norms = trained(alone)

    assert_trains_alike(trainer_of(num_model_shards, loss, **options), norms, alone.state["params"])


def step_text(num_model_shards, loss, optimizer=None):
    deployer = Deployer(num_model_shards, devices=jax.devices()[:num_model_shards])
    shapes, batch = jax.eval_shape(params), collate(examples(8))
    rules = deployer.get_sharding_rules(shapes, loss, *TRACED)
    lowered = TrainingPlan(
        deployer,
        loss_fn=loss,
        params=shapes,
        optimizer=optimizer or optax.adamw(1e-2),
        sharding_rules=rules,
        global_batch_size=8,
        max_grad_norm=1.0,
    ).lower(batch)
    return lowered.compile().as_text()


def rules_of(loss, num_model_shards=4, start=None, **options):
    start = start or params()
    return Deployer(num_model_shards).get_sharding_rules(start, loss, *TRACED, **options)


def test_a_shards_columns_lie_together_and_are_put_back_exactly():
    fused, array = FusedParts(1, (4, 8, 2), 2), np.arange(3 * 14).reshape(3, 14)

    stored = fused.to_storage(array)

    by_hand = [0, 1, 4, 5, 6, 7, 12, 2, 3, 8, 9, 10, 11, 13]
    np.testing.assert_array_equal(stored, array[:, by_hand])
    np.testing.assert_array_equal(fused.to_logical(stored), array)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "is_scanned"),
    [
        *((way, True) for way in ("name_parts", "list_heads", "slice_unequal")),
        ("flatten_rows", False),
    ],
)
def test_a_step_sends_megatrons_optimum_however_the_parts_are_taken_apart(way, is_scanned, caplog):
    """Engine case 17: the number of all-reduces is minimal."""
    loss = make_loss(WAYS[way], is_scanned=is_scanned)

    text = step_text(4, loss)

    # Rematerialised layers repeat the reduction after attention.
    num_reductions = LAYERS * (5 if is_scanned else 4) + 2
    optimum = 2 * 3 / 4 * num_reductions * 4 * 8 * LENGTH * WIDTH
    assert {one.kind for one in read_collectives(text)} == {"all-reduce"}
    # The step's scalars and norms' sums weigh something beside activations this small.
    assert optimum <= wire_bytes(text) <= 1.08 * optimum
    assert not caplog.records


@pytest.mark.parametrize("way", WAYS)
def test_the_parts_are_found_however_they_are_taken_apart(way):
    sizes = (12 * HEADS, 4 * HEADS, WIDTH) if "unequal" in way else (WIDTH,) * 3

    fused = {p.path: p.fused for p in rules_of(make_loss(WAYS[way])).parameters}

    assert fused["layers/qkv"] == FusedParts(2, sizes, 4)
    assert fused["layers/qkv_bias"] == FusedParts(1, sizes, 4)


@pytest.mark.slow
def test_training_is_that_of_one_shard_where_parts_are_unequal():
    """Engine case 12, losses and gradients on any mesh: they equal those of one device."""
    # However they are taken apart, the parts are the same.
    expected = on_one_shard(split_unequal)

    assert_trains_alike(trainer_of(4, make_loss(slice_unequal)), *expected)


@pytest.mark.slow
def test_training_is_that_of_one_shard_where_parameters_are_split_over_fsdp_too():
    assert_trains_alike(trainer_of(4, make_loss(), num_fsdp_shards=2), *on_one_shard(split_flat))


@pytest.mark.slow
def test_parameters_sorted_by_shard_are_saved_in_their_own_order(tmp_path):
    """Engine case 47: their digests are those of one shard's."""
    found = []
    for num_model_shards in (1, 2):
        trainer = trainer_of(num_model_shards, make_loss())
        assert trainer.plan.storage.is_exact == (num_model_shards == 1)
        with Checkpointer(tmp_path / str(num_model_shards)) as checkpointer:
            checkpointer.save(0, trainer.state, cursor={})
            checkpointer.wait()
            found.append(parameter_digests(checkpointer.step_directory(0)))

    assert found[0] == found[1]


@pytest.mark.slow
def test_training_low_rank_factors_of_fused_kernels_is_that_of_one_shard(caplog):
    lora = plan_lora(params(), make_loss(), *TRACED, rank=2, alpha=4.0, targets="qkv$|gate_up")

    assert_trains_as_one_shard(make_loss(), lora=lora)

    assert not [record for record in caplog.records if "move between" in record.message]


@pytest.mark.slow
def test_checkpoints_hold_the_users_order_and_restore_bitwise_over_any_shards(tmp_path):
    """Engine cases 46 and 47: it is restored bitwise; it is restored exactly."""
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    split = trainer_of(4, make_loss(), optimizer=optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        # Moments of which no two are equal, without a step.
        state = jax.jit(numbered)(split.state)
        checkpointer.save(1, state, cursor={})

        others = [trainer_of(count, make_loss(), optimizer=optimizer) for count in (1, 2)]
        for other in others:
            other.restore(checkpointer)

    for other in others:
        for one, two in zip(jax.tree.leaves(other.state), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(one, two)


def test_predictions_are_those_of_whole_parameters():
    logits, values = make_logits(split_flat), params()

    def best(params, batch, rngs):
        return logits(params, batch["ids"]).argmax(-1)

    deployer = Deployer(4)
    rules = deployer.get_sharding_rules(values, make_loss(), *TRACED)
    predictor = Predictor(
        deployer, collate_fn=collate, pred_fn=best, sharding_rules=rules, batch_size=4
    )

    found = predictor.predict(examples(6), values)

    np.testing.assert_array_equal(found, logits(values, collate(examples(6))["ids"]).argmax(-1))


def test_rules_name_the_heads_and_the_parts():
    reasons = {p.path: (p.spec, p.reason) for p in rules_of(make_loss()).parameters}

    assert reasons["layers/qkv"] == (
        P(None, None, "model"),
        "column-parallel over 4 heads, in each of its 3 fused parts",
    )
    assert reasons["layers/qkv_bias"] == (
        P(None, "model"),
        "sharded like the 4 heads that it is combined with elementwise, "
        "in each of its 3 fused parts",
    )
    assert reasons["layers/gate_up"] == (
        P(None, None, "model"),
        "column-parallel over 48 units, in each of its 2 fused parts",
    )


def test_renamed_parameters_are_fused_the_same():
    """Engine case 14: the sharding plan is the same."""
    words = ("zebra", "apple", "mango", "delta", "birch")
    renamed = params(words)

    def loss(params, *rest):
        layers = {name: params["layers"][w] for name, w in zip(NAMES, words, strict=True)}
        return make_loss()({**params, "layers": layers}, *rest)

    found = {p.path: (p.spec, p.fused) for p in rules_of(loss, start=renamed).parameters}

    for parameter in rules_of(make_loss()).parameters:
        path = parameter.path.split("/")[-1]
        path = f"layers/{words[NAMES.index(path)]}" if path in NAMES else path
        assert found[path] == (parameter.spec, parameter.fused)


def test_a_users_rule_for_the_kernel_is_taken_literally(caplog):
    rules = rules_of(make_loss(), overrides=[("qkv$", (None, None, "model"))])

    fused = {p.path: p.fused for p in rules.parameters}
    assert fused["layers/qkv"] is None
    # Its bias has no kernel to follow then.
    assert fused["layers/qkv_bias"] is None
    assert fused["layers/gate_up"] == FusedParts(2, (UNITS, UNITS), 4)


def test_heads_that_the_shards_do_not_divide_leave_the_kernel_in_the_users_order():
    rules = rules_of(make_loss(), num_model_shards=8)

    by_path = {p.path: p for p in rules.parameters}
    assert by_path["layers/qkv"].fused is None
    assert by_path["layers/gate_up"].fused == FusedParts(2, (UNITS, UNITS), 8)


def test_what_looks_along_all_columns_leaves_the_kernel_in_the_users_order(caplog):
    def sorts_first(fused):
        return split_flat(fused + jnp.cumsum(fused, axis=-1))

    rules = rules_of(make_loss(sorts_first))

    by_path = {p.path: p for p in rules.parameters}
    assert by_path["layers/qkv"].fused is None
    assert by_path["layers/gate_up"].fused is not None


def test_a_function_that_looks_along_the_columns_after_all_computes_the_same_and_says_so(caplog):
    """The rules came from another function."""

    def reversed_twice(fused):
        return split_flat(fused[..., ::-1][..., ::-1])

    deployer, values = Deployer(4, devices=jax.devices()[:4]), params()
    rules = deployer.get_sharding_rules(values, make_loss(), *TRACED)
    trainers = [
        Trainer(
            deployer,
            collate_fn=collate,
            loss_fn=make_loss(way),
            params=values,
            optimizer=optax.adamw(1e-2),
            sharding_rules=rules,
            global_batch_size=8,
        )
        for way in (split_flat, reversed_twice)
    ]

    expected, found = (trainer.eval_loss(examples()) for trainer in trainers)

    assert found == pytest.approx(expected, rel=1e-6)
    assert "layers/qkv, layers/qkv_bias: used otherwise" in caplog.text


def low_rank_moments():
    """An optimizer whose state is of a shape of its own."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros((*p.shape[:-1], 3)), params)

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -1e-2 * g, updates), state

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
def test_an_optimizer_with_arrays_of_other_shapes_keeps_the_users_order(caplog):
    with caplog.at_level(logging.WARNING):
        split = trainer_of(4, make_loss(), optimizer=low_rank_moments())

    assert "fused kernels stay as they are" in caplog.text
    stored, exact = (tree["params"]["layers"]["qkv"] for tree in (split._state, split.state))
    np.testing.assert_array_equal(stored, exact)
    alone = trainer_of(1, make_loss(), optimizer=low_rank_moments())
    np.testing.assert_allclose(trained(split), trained(alone), rtol=1e-5)


def test_devices_hold_their_own_columns_of_every_part():
    trainer = trainer_of(4, make_loss())

    kernel = trainer._state["params"]["layers"]["qkv"]

    exact = params()["layers"]["qkv"].reshape(LAYERS, WIDTH, 3, HEADS, HEAD_DIM)
    for number, shard in enumerate(kernel.addressable_shards):
        assert shard.index[2].start == number * 3 * HEAD_DIM
        own = exact[:, :, :, number].reshape(LAYERS, WIDTH, 3 * HEAD_DIM)
        np.testing.assert_array_equal(shard.data, own)
