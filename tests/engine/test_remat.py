"""What `remat` keeps for the backward pass, on every mesh: read off what is traced."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import topologies

from redco_flow import Deployer
from redco_flow.engine.step.compiled import on_unpadded_params
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from tests.drawn_params import draw_params
from tests.engine.traffic import read_collectives

# No other dim is LAYERS or LENGTH: an array with both was kept of each layer.
LAYERS, ROWS, LENGTH, WIDTH, HEADS, UNITS = 3, 8, 48, 32, 8, 40
MESHES = {
    "fsdp 1": {},
    "fsdp 2": {"num_fsdp_shards": 2},
    "fsdp 8": {"num_fsdp_shards": 8},
    "model 8": {"num_model_shards": 8},
    "model 2, fsdp 4": {"num_model_shards": 2, "num_fsdp_shards": 4},
    "context 8": {"num_context_shards": 8},
}
FAMILIES = {
    "llama": {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": UNITS,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 100,
    },
    # A fused kernel of queries, keys and values, and dropout.
    "gpt2": {
        "vocab_size": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": UNITS,
        "n_positions": 100, "bos_token_id": 2, "eos_token_id": 1,
        "resid_pdrop": 0.2, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "bart": {
        "vocab_size": 64, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": UNITS, "decoder_ffn_dim": UNITS, "max_position_embeddings": 100,
        "dropout": 0.0, "attention_dropout": 0.0,
    },
    "t5": {
        "vocab_size": 64, "d_model": WIDTH, "d_kv": 4, "d_ff": UNITS, "num_layers": LAYERS,
        "num_heads": HEADS, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
    },
}  # fmt: skip


def ids():
    return jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)


def model_of(family, remat):
    """A model and its config; `remat` alone, or with `activations`."""
    remat, activations = (remat, {}) if isinstance(remat, str) else remat
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **FAMILIES[family]})
    return module, config.updated({"remat": remat, "activations": activations})


def loss_of(family, remat):
    module, config = model_of(family, remat)

    def loss_fn(params, batch, rngs, is_training):
        given = [batch["ids"]]
        if family in ("bart", "t5"):
            given += [jnp.ones_like(batch["ids"]), batch["ids"]]
        logits = module.apply(config, params, *given, rngs=rngs if is_training else None)
        return cross_entropy(logits, batch["ids"])

    return loss_fn, module.abstract_params(config)


def on_mesh(mesh, loss_fn, params, batch):
    """Return the mean of a loss as the engine computes it, and how its parameters are stored."""
    deployer = Deployer(devices=jax.devices()[:8], **MESHES[mesh])
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    storage = deployer.storage(params, rules.specs(params), rules.fused(params))
    stored_loss = on_unpadded_params(loss_fn, storage)

    def mean(params, batch, rngs=None):
        totals, weights = stored_loss(storage.unpad(params), batch, rngs, rngs is not None)
        return jnp.sum(totals) / jnp.sum(weights)

    return deployer.on_mesh(mean), storage


def kept(mesh, loss_fn, params, batch):
    """Return the shapes of what is kept of each layer, without the layers; of all together."""
    mean, storage = on_mesh(mesh, loss_fn, params, batch)
    stored = jax.eval_shape(storage.to_storage, storage.shapes)

    def pull_back(params, batch):
        return jax.vjp(lambda params: mean(params, batch), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pull_back, stored, batch))
    return sorted(x.shape[1:] for x in leaves if x.shape[:1] == (LAYERS,) and LENGTH in x.shape)


def kept_by(family, mesh, remat):
    return kept(mesh, *loss_of(family, remat), {"ids": ids()})


def spaces_of(family, mesh, remat):
    """Return the shapes of what is kept of all layers, and whether it lies on the host."""
    mean, storage = on_mesh(mesh, *loss_of(family, remat), {"ids": ids()})
    stored = jax.eval_shape(storage.to_storage, storage.shapes)

    def pull_back(params, batch):
        return jax.vjp(lambda params: mean(params, batch), params)[1]

    kept = jax.make_jaxpr(pull_back)(stored, {"ids": ids()}).out_avals
    return [
        (x.shape, x.memory_space == jax.memory.Space.Host) for x in kept if x.shape[:1] == (LAYERS,)
    ]


EACH = [("llama", "context 8"), ("llama", "model 2, fsdp 4"), ("gpt2", "fsdp 8")]


@pytest.mark.parametrize(("family", "mesh"), [*(("llama", mesh) for mesh in MESHES), EACH[-1]])
def test_with_full_a_layer_keeps_its_input_alone(family, mesh):
    """Engine case 55: at fsdp 1, 2 and 8 and context 8, `full` keeps one array a layer,
    `dots` the named products, and neither keeps scores.
    """
    # Over model shards, which keep parts, attention's output too.
    assert kept_by(family, mesh, "full") == [(ROWS, LENGTH, WIDTH)] * (1 + ("model" in mesh))


@pytest.mark.parametrize(("family", "mesh"), EACH)
def test_with_dots_a_layer_keeps_its_input_and_its_products(family, mesh):
    """Engine case 55: those whose result something else reads; scores never."""
    found = [math.prod(shape) // (ROWS * LENGTH) for shape in kept_by(family, mesh, "dots")]

    gates = 2 if family == "llama" else 1
    # The layer's input, queries with keys and values, attention's output, the feed-forward's first.
    assert sorted(found) == sorted([WIDTH, 3 * WIDTH, WIDTH, gates * UNITS])


# Per token: what a result of each name is wide; a ring has its softmax' statistics beside it.
WIDTHS = {
    "qkv": 3 * WIDTH,
    "attention": WIDTH,
    "attention_out": WIDTH,
    "mlp_input": WIDTH,
    "mlp_in": 2 * UNITS,
    "mlp_out": WIDTH,
}
# Nothing looks at what is only added, as the last product of a layer with its norms before.
UNREAD = {"mlp_out"}


@pytest.mark.parametrize(
    ("mesh", "names"), [("model 2, fsdp 4", WIDTHS), ("context 8", ("qkv", "attention"))]
)
def test_what_is_kept_by_name_is_kept_beside_the_layers_input(mesh, names):
    """Engine case 55: each by itself."""
    for name in names:
        width = WIDTHS[name]
        found = kept_by("llama", mesh, ("full", {"attention_out": "recompute", name: "keep"}))

        widths = [math.prod(shape) // (ROWS * LENGTH) for shape in found]
        assert sorted(widths) == sorted([WIDTH, *({width} if name not in UNREAD else ())]), name


def test_what_is_computed_again_by_name_is_not_kept():
    """Engine case 55: of all that `minimal` keeps."""
    found = kept_by(
        "llama", "model 2, fsdp 4", ("minimal", {"mlp_in": "recompute", "qkv": "recompute"})
    )

    assert found == [(ROWS, LENGTH, WIDTH)] * 2  # attention's output is the other


def test_minimal_is_another_name_of_dots():
    """Engine case 55: MaxText's."""
    assert kept_by("llama", "fsdp 8", "minimal") == kept_by("llama", "fsdp 8", "dots")


OFFLOADED = (
    "full",
    {
        "qkv": "keep",
        "attention": "offload",
        "attention_out": "recompute",
        "layer_input": "offload",
    },
)


@pytest.mark.parametrize("mesh", ["model 2, fsdp 4", "context 8"])
def test_what_is_offloaded_goes_to_the_hosts_memory_alone(mesh):
    """Engine case 55: and no copy of it stays on the device."""
    found = [(shape[1:], is_host) for shape, is_host in spaces_of("llama", mesh, OFFLOADED)]

    on_device = [shape for shape, is_host in found if not is_host and LENGTH in shape]
    on_host = [shape for shape, is_host in found if is_host and LENGTH in shape]
    assert [math.prod(shape) // (ROWS * LENGTH) for shape in on_device] == [3 * WIDTH]
    assert [math.prod(shape) // (ROWS * LENGTH) for shape in on_host] == [WIDTH] * 2


@pytest.mark.parametrize(("mesh", "num_shards"), [("model 2, fsdp 4", 1), ("context 8", 8)])
def test_of_a_part_that_is_offloaded_the_rest_stays_on_the_device(mesh, num_shards):
    """Engine case 55: a part of each context shard's own tokens."""
    remat, activations = OFFLOADED
    found = spaces_of("llama", mesh, (remat, {**activations, "offload_share": 1 / 3}))

    tokens = LENGTH // num_shards
    for share, is_host in ((tokens // 3, True), (tokens - tokens // 3, False)):
        parts = [
            shape for shape, on in found if shape[2:4] == (num_shards, share) and on == is_host
        ]
        assert [math.prod(shape[4:]) for shape in parts] == [WIDTH] * 2
    whole = [shape for shape, _ in found if shape[1:3] == (ROWS, LENGTH)]
    assert [math.prod(shape[3:]) for shape in whole] == [3 * WIDTH]


@pytest.mark.parametrize("mesh", ["model 2, fsdp 4", "context 8"])
def test_with_none_a_layer_keeps_its_weights_of_attention_too(mesh):
    """Engine case 55: but for the ring's, which never keeps scores."""
    found = kept_by("llama", mesh, "none")

    assert len(found) > 4
    assert any(shape.count(LENGTH) == 2 for shape in found) == (mesh != "context 8")


@pytest.mark.parametrize(("family", "mesh"), [("bart", "context 8"), ("t5", "fsdp 1")])
def test_each_of_two_stacks_keeps_its_layers_inputs_alone(family, mesh):
    """Engine case 55: at fsdp 1, 2 and 8 and context 8, `full` keeps one array a layer,
    `dots` the named products, and neither keeps scores.
    """
    assert kept_by(family, mesh, "full") == [(ROWS, LENGTH, WIDTH)] * 2


def test_with_dots_two_stacks_keep_the_same_over_fsdp_shards_and_no_scores():
    """Engine case 55: at fsdp 1, 2 and 8 and context 8, `full` keeps one array a layer,
    `dots` the named products, and neither keeps scores.
    """
    found = kept_by("bart", "fsdp 8", "dots")

    assert found == kept_by("bart", "fsdp 1", "dots")
    assert max(shape.count(LENGTH) for shape in found) == 1
    assert len(found) > 2


POLICIES = {
    "everything again": None,
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "what is named": jax.checkpoint_policies.save_only_these_names("inner"),
}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        y = jax.ad_checkpoint.checkpoint_name(nn.Dense(UNITS)(y), "inner")
        return x + nn.Dense(WIDTH)(nn.gelu(y)), None


class Scanned(nn.Module):
    policy: object = None

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(64, WIDTH)(ids)
        layer = nn.remat(Block, prevent_cse=False, policy=self.policy)
        layers = nn.scan(layer, {"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return nn.Dense(64)(layers()(x, None)[0])


def loss_of_linen(module):
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))

    def loss_fn(params, batch, rngs, is_training):
        return cross_entropy(module.apply(params, batch["ids"]), batch["ids"])

    return loss_fn, params


@pytest.mark.parametrize("policy", POLICIES)
def test_a_users_scanned_layers_keep_what_their_policy_says(policy):
    """Engine case 55: in Linen."""
    whole, split = (
        kept(mesh, *loss_of_linen(Scanned(POLICIES[policy])), {"ids": ids()})
        for mesh in ("fsdp 1", "fsdp 8")
    )

    inner = {"everything again": 0, "products": 1, "what is named": 1}[policy]
    assert split == whole
    assert split.count((ROWS, LENGTH, UNITS)) == inner


class NnxModel(nnx.Module):
    """Layers in a Python loop, each under `nnx.remat`."""

    def __init__(self, rngs):
        self.table = nnx.Embed(64, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            [
                nnx.Sequential(
                    nnx.Linear(WIDTH, UNITS, rngs=rngs),
                    nnx.gelu,
                    nnx.Linear(UNITS, WIDTH, rngs=rngs),
                )
                for _ in range(LAYERS)
            ]
        )
        self.head = nnx.Linear(WIDTH, 64, rngs=rngs)

    def __call__(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + nnx.remat(lambda layer, x: layer(x))(layer, x)
        return self.head(x)


def test_a_users_layers_one_by_one_keep_their_inputs_alone():
    """Engine case 55: in NNX."""
    graph, state = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))))
    params = nnx.to_pure_dict(state)

    def loss_fn(params, batch, rngs, is_training):
        filled = nnx.merge(graph, params)
        return cross_entropy(filled(batch["ids"]), batch["ids"])

    mean, _ = on_mesh("fsdp 8", loss_fn, params, {"ids": ids()})
    pull_back = jax.eval_shape(
        lambda p, batch: jax.vjp(lambda p: mean(p, batch), p)[1], params, {"ids": ids()}
    )

    shapes = [x.shape for x in jax.tree.leaves(pull_back)]
    assert (ROWS, LENGTH, UNITS) not in shapes
    assert (ROWS, LENGTH, WIDTH) in shapes


def branching(params, batch, rngs, is_training):
    """What is rematerialised stands where no parameter goes, in a branch and in a scan."""

    @jax.checkpoint
    def again(x):
        return jnp.sin(jnp.sin(jnp.sin(x)))

    def repeated(x):
        return jax.lax.scan(lambda x, _: (again(x), None), x, None, length=LAYERS)[0]

    x = params["table"][batch["ids"]] @ params["up"]
    x = jax.lax.cond(jnp.sum(batch["ids"]) > 0, repeated, lambda x: x, x)
    return cross_entropy(x @ params["head"], batch["ids"])


def test_what_holds_no_parameter_keeps_what_it_says_too():
    """Engine case 55: at fsdp 1, 2 and 8 and context 8, `full` keeps one array a layer,
    `dots` the named products, and neither keeps scores.
    """
    sizes = {"table": (64, WIDTH), "up": (WIDTH, UNITS), "head": (UNITS, 64)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}

    assert kept("fsdp 8", branching, params, {"ids": ids()}) == [(ROWS, LENGTH, UNITS)]


def real(family, remat, mesh, *, dropout=False, frozen=()):
    """Return gradients of some parameters, in numbers."""
    loss_fn, _ = loss_of(family, remat)
    module, config = model_of(family, remat)
    params = draw_params(module, config)
    batch = {"ids": np.random.default_rng(1).integers(2, 64, (ROWS, LENGTH), np.int32)}
    rngs = jax.random.split(jax.random.key(2), ROWS) if dropout else None
    mean, storage = on_mesh(mesh, loss_fn, params, batch)
    trained = {name: value for name, value in params.items() if name not in frozen}

    def of_trained(trained, params, batch, rngs):
        return mean(storage.to_storage({**params, **trained}), batch, rngs)

    return jax.jit(jax.grad(of_trained))(trained, params, batch, rngs)


@pytest.mark.slow
@pytest.mark.covers("one device", family="gpt2", mesh="fsdp × model")
def test_gradients_are_those_of_whole_parameters():
    """Engine case 55: with keys, which have no gradient, and with what is frozen."""
    options = {"dropout": True, "frozen": ("positions",)}
    expected = real("gpt2", "full", "fsdp 1", **options)

    found = real("gpt2", "full", "model 2, fsdp 4", **options)

    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5 * np.abs(two).max())


@functools.cache
def plain():
    return real("llama", "none", "fsdp 8")


CHOICES = [
    ("minimal", {"qkv": "offload", "mlp_in": "recompute", "layer_input": "offload"}),
    (
        "full",
        {
            "attention": "offload",
            "attention_out": "offload",
            "mlp_input": "keep",
            "offload_share": 0.4,
        },
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("remat", CHOICES, ids=["offload", "keep and offload a part"])
@pytest.mark.covers("one device", family="llama", mesh="fsdp")
def test_every_choice_gives_the_same_gradients(remat):
    """Engine case 55: on CPUs too, where what is offloaded stays where it is."""
    found = real("llama", remat, "fsdp 8")

    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(plain()), strict=True):
        # The same operations on the same numbers: XLA may only fuse them otherwise.
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6 * np.abs(two).max())


@pytest.mark.slow
def test_a_compiled_step_for_tpus_offloads_to_the_host(monkeypatch):
    """Engine case 55: by the compiler's own count of the host's memory."""
    pytest.importorskip("libtpu", reason="pip install libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices

    loss_fn, params = loss_of("llama", ("full", {"layer_input": "offload"}))
    deployer, batch = Deployer(num_fsdp_shards=4, devices=devices), {"ids": ids()}
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-2),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=ROWS,
    )

    assert plan.memory(batch).host_temporaries > 0


def test_a_parameter_is_gathered_twice_and_its_gradient_reduced_once_with_full():
    """Engine case 55: no copy is kept, and nothing travels more often for it."""
    loss_fn, params = loss_of("llama", "full")
    deployer = Deployer(num_fsdp_shards=8, devices=jax.devices()[:8])
    batch = {"ids": ids()}
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)

    lowered = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-2),
        sharding_rules=rules,
        global_batch_size=ROWS,
    ).lower(batch)

    found = read_collectives(lowered.compile().as_text())
    gathered = sum(one.num_bytes * one.count for one in found if one.kind == "all-gather")
    reduced = sum(one.num_bytes * one.count for one in found if one.kind != "all-gather")
    assert gathered <= 2 * rules.total_bytes
    assert reduced <= 1.01 * rules.total_bytes
