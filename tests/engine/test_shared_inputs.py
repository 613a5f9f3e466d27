"""What several column-parallel kernels read has its gradient reduced once, and as it was."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from redco_flow import Deployer
from redco_flow.engine.sharding.shared_inputs import shares_inputs
from redco_flow.engine.step.compiled import on_unpadded_params
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from tests.engine.traffic import read_collectives

ROWS, LENGTH, VOCAB, WIDTH, LAYERS, HEADS, GROUPS = 8, 16, 64, 32, 2, 8, 4
HEAD_DIM, UNITS = WIDTH // HEADS, 64
# Of a layer forwards and backwards, of a lookup's rows and of what the head reads.
PER_LAYER, PER_MODEL = 4, 2


class FlaxBlock(nn.Module):
    """Flax's own attention, with biases, and SwiGLU; each kernel casts what it reads."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        normed = nn.LayerNorm()(x)
        attention = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype)
        x = x + attention(normed, mask=nn.make_causal_mask(x[..., 0])).astype(x.dtype)
        normed = nn.LayerNorm()(x)
        gate, up = (nn.Dense(UNITS, dtype=self.dtype)(normed) for _ in range(2))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(nn.silu(gate) * up).astype(x.dtype)


def attend(query, key, value):
    """Attend (B, G, R, T, K) to (B, G, T, K)."""
    weights = jax.nn.softmax(jnp.einsum("bgrtk,bgsk->bgrts", query, key))
    return jnp.einsum("bgrts,bgsk->bgrtk", weights, value)


class GroupedBlock(nn.Module):
    """Keys and values narrower than queries, heads first; flat rows for the feed-forward.

    A router that reads what gate and up read is replicated.
    """

    @nn.compact
    def __call__(self, x):
        def kernel(name, *shape):
            return self.param(name, nn.initializers.normal(0.2), shape)

        normed = nn.RMSNorm()(x)
        per_group = HEADS // GROUPS
        query = kernel("query", GROUPS, per_group, WIDTH, HEAD_DIM)
        key, value = (kernel(name, GROUPS, WIDTH, HEAD_DIM) for name in ("key", "value"))
        out = kernel("out", GROUPS, per_group, HEAD_DIM, WIDTH)
        mixed = attend(
            jnp.einsum("btd,grdk->bgrtk", normed, query),
            jnp.einsum("btd,gdk->bgtk", normed, key),
            jnp.einsum("btd,gdk->bgtk", normed, value),
        )
        x = x + jnp.einsum("bgrtk,grkd->btd", mixed, out)
        normed = nn.RMSNorm()(x)
        scale = jax.nn.sigmoid(normed @ kernel("router", WIDTH, 1))
        gate = jax.nn.silu(normed.reshape(-1, WIDTH) @ kernel("gate", WIDTH, UNITS))
        up = normed.reshape(-1, WIDTH) @ kernel("up", WIDTH, UNITS)
        hidden = (gate * up).reshape(*x.shape[:-1], UNITS) * scale
        return x + hidden @ kernel("down", UNITS, WIDTH)


class HalfFusedBlock(nn.Module):
    """One kernel for keys and values beside one for queries."""

    @nn.compact
    def __call__(self, x):
        normed = nn.RMSNorm()(x)
        heads = (*x.shape[:-1], HEADS, HEAD_DIM)
        query = nn.Dense(WIDTH, name="query")(normed).reshape(heads)
        both = jnp.split(nn.Dense(2 * WIDTH, name="key_value")(normed), 2, axis=-1)
        key, value = (part.reshape(heads) for part in both)
        mixed = nn.dot_product_attention(query, key, value)
        x = x + nn.Dense(WIDTH, name="out")(mixed.reshape(x.shape))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(UNITS)(nn.RMSNorm()(x))))


class Decoder(nn.Module):
    block: nn.Module
    is_scanned: bool = False
    num_layers: int = 1

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(ids)
        if self.is_scanned:
            layers = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            x, _ = layers(nn.remat(self.block)(), x, None)
        else:
            for _ in range(self.num_layers):
                x = self.block()(x)
        return embed.attend(nn.LayerNorm()(x))


def batch():
    return {"ids": np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)}


def loss_of(module):
    def loss_fn(params, batch, rngs, is_training):
        ids = batch["ids"]
        return cross_entropy(module.apply({"params": params}, ids), jnp.roll(ids, -1, 1))

    return loss_fn


@functools.cache
def params_of(module):
    return jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]


def expected_gradients(loss_fn, params):
    """Return the loss' and its mean's gradients, on one device."""

    def mean(params):
        totals, weights = loss_fn(params, batch(), None, True)
        return totals.sum() / weights.sum()

    return jax.device_get(jax.jit(jax.value_and_grad(mean))(params))


def train_step(module, num_model_shards, *, lora=None, params=None, num_micro=1, **mesh):
    """Return loss and gradients of one step on a mesh, and its program's text."""
    num_devices = num_model_shards * mesh.get("num_fsdp_shards", 1) * mesh.pop("num_data_shards", 1)
    deployer = Deployer(num_model_shards, devices=jax.devices()[:num_devices], **mesh)
    loss_fn, model = loss_of(module), params_of(module)
    plan = TrainingPlan(
        deployer, loss_fn=loss_fn, params=model, lora=lora, batch=batch(), global_batch_size=ROWS,
        per_device_batch_size=ROWS // deployer.num_data_shards // num_micro,
        # Its momentum after one step is the gradient.
        optimizer=optax.sgd(1.0, momentum=0.9),
        sharding_rules=deployer.get_sharding_rules(model, loss_fn, batch(), None, False),
    )  # fmt: skip
    compiled = plan.compile()
    start = jax.jit(
        lambda params: plan.storage.to_storage(plan.start(params)),
        out_shardings=plan.storage.stored_sharding,
    )
    given = {"batch": batch(), "mask": np.ones(ROWS, np.float32), "rows": np.arange(ROWS)}
    batches = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape).astype(like.dtype), like.sharding),
        given, plan.micro_batches(),
    )  # fmt: skip
    state, metrics = compiled(start(model if params is None else params), batches)
    gradients = plan.storage["opt_state"].to_logical(state["opt_state"])
    return (
        metrics["total"] / metrics["weight"],
        jax.device_get(jax.tree.leaves(gradients)),
        compiled.as_text(),
    )


def num_reductions(text, num_model_shards, *, num_rows=ROWS):
    """Count the activations (B, T, D), float32, that are reduced over the model shards."""
    sent = sum(
        one.num_bytes * one.count
        for one in read_collectives(text)
        if one.kind == "all-reduce" and one.group_size == num_model_shards
    )
    return sent / (num_rows * LENGTH * WIDTH * 4)


def assert_same(found, expected):
    loss, gradients = found
    expected_loss, expected_leaves = expected[0], jax.tree.leaves(expected[1])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    scale = max(np.abs(leaf).max() for leaf in expected_leaves)
    for one, two in zip(gradients, expected_leaves, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5 * scale)


def test_flax_attention_and_swiglu_send_the_optimum():
    """Engine case 17."""
    module = Decoder(FlaxBlock, num_layers=2)

    *found, text = train_step(module, 4)

    assert_same(found, expected_gradients(loss_of(module), params_of(module)))
    optimum = 2 * PER_LAYER + PER_MODEL
    assert optimum <= num_reductions(text, 4) <= 1.05 * optimum


def test_kernels_of_several_widths_in_scanned_layers_send_the_optimum():
    """Rematerialised, so that what follows attention is reduced again; in local micro-batches."""
    module = Decoder(GroupedBlock, is_scanned=True)

    *found, text = train_step(module, 4, num_data_shards=2, num_micro=2)

    assert_same(found, expected_gradients(loss_of(module), params_of(module)))
    optimum = LAYERS * (PER_LAYER + 1) + PER_MODEL
    assert optimum <= num_reductions(text, 4, num_rows=ROWS // 2) <= 1.05 * optimum


def test_a_fused_kernel_beside_a_separate_one_sends_the_optimum_over_fsdp():
    module = Decoder(HalfFusedBlock)

    *found, text = train_step(module, 4, num_fsdp_shards=2)

    assert_same(found, expected_gradients(loss_of(module), params_of(module)))
    optimum = PER_LAYER + PER_MODEL
    assert optimum <= num_reductions(text, 4, num_rows=ROWS // 2) <= 1.05 * optimum


def test_low_rank_factors_of_some_kernels_have_their_gradients():
    module = Decoder(FlaxBlock)
    loss_fn, model = loss_of(module), params_of(module)
    lora = plan_lora(
        model, loss_fn, batch(), None, False, rank=2, alpha=4.0, targets="query/kernel"
    )
    params = lora.start(model, jax.random.key(1))
    params["lora"] = jax.tree.map(lambda x: x + 0.1, params["lora"])
    loss, gradients = expected_gradients(lora.adapt(loss_fn), params)

    *found, text = train_step(module, 2, lora=lora, params=params)

    assert_same(found, (loss, gradients["lora"]))
    assert num_reductions(text, 2) <= 1.05 * (PER_LAYER + PER_MODEL)


def test_kernels_that_cast_what_they_read_are_summed_in_the_dtype_that_they_cast_to():
    """In bfloat16 that is as far from float32 as the function itself on one device."""
    module = Decoder(lambda: FlaxBlock(jnp.bfloat16))
    params = params_of(module)

    _, gradients, text = train_step(module, 2)

    assert num_reductions(text, 2) <= 1.05 * (PER_LAYER + PER_MODEL)
    _, exact = expected_gradients(loss_of(Decoder(FlaxBlock)), params)
    _, rounded = expected_gradients(loss_of(module), params)
    found, alone, exact = (ravel_pytree(tree)[0] for tree in (gradients, rounded, exact))
    assert jnp.linalg.norm(found - exact) <= 1.25 * jnp.linalg.norm(alone - exact)


def test_a_function_without_shared_inputs_is_called_as_it_is():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(UNITS)(nn.LayerNorm()(x))))

    module = Decoder(Plain)
    deployer = Deployer(2, devices=jax.devices()[:2])
    loss_fn, params = loss_of(module), params_of(module)
    rules = deployer.get_sharding_rules(params, loss_fn, batch(), None, False)
    stored_loss = on_unpadded_params(loss_fn, deployer.params_storage(params, rules))

    def traced(function):
        return jax.make_jaxpr(lambda params: function(params, batch(), None, True))(params)

    assert not shares_inputs(traced(loss_fn).jaxpr)
    assert str(traced(stored_loss)) == str(traced(loss_fn))
