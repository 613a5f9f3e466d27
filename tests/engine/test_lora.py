"""Low-rank factors beside kernels: trained alone, merged exactly."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.errors import EngineError
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.step.quantization import NF4_LEVELS, Blocks
from redco_flow.engine.step.trainable import trainable_mask
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from redco_flow.models.projections import product
from tests.drawn_params import draw_params

LAYERS, WIDTH, HEADS, UNITS, VOCAB, LENGTH = 2, 16, 4, 32, 97, 6
RANK, ALPHA = 2, 8.0


def params():
    rng = np.random.default_rng(0)
    shapes = {
        "table": (VOCAB, WIDTH),
        "layers": {
            "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
            "up": (LAYERS, WIDTH, UNITS),
            "down": (LAYERS, UNITS, WIDTH),
        },
        "head": (WIDTH, VOCAB),
    }
    return jax.tree.map(
        lambda shape: 0.3 * rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def logits(params, ids):
    @jax.checkpoint
    def layer(x, p):
        q, k, v = jnp.einsum("btd,dchk->cbthk", x, p["qkv"])
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k), axis=-1)
        mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, p["out"])
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["table"][ids], params["layers"])
    return x @ params["head"]


def loss(params, batch, rngs, is_training):
    return cross_entropy(logits(params, batch["ids"]), jnp.roll(batch["ids"], -1, 1))


def loss_of_logits(scores, ids):
    return cross_entropy(scores, jnp.roll(ids, -1, 1))[0]


def examples(count=16):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(0, VOCAB, LENGTH).astype(np.int32)} for _ in range(count)]


def collate(rows):
    return {"ids": np.stack([row["ids"] for row in rows])}


IDS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
TRACED = (params(), loss, {"ids": IDS}, None, False)


def plan(targets="layers|head", **kinds):
    return plan_lora(*TRACED, rank=RANK, alpha=ALPHA, targets=targets, **kinds)


def started(lora, base=None):
    """In one program, as in a training."""
    return jax.jit(lora.start)(params() if base is None else base, jax.random.key(0))


def with_factors(lora):
    """As after some training: B is not zero any more."""
    rng = np.random.default_rng(2)
    factors = jax.tree.map(
        lambda x: (0.2 * rng.normal(size=x.shape)).astype(x.dtype), lora.shapes(params())["lora"]
    )
    return {"base": params(), "lora": factors}


def merged_by_hand(adapted):
    """NumPy, with every kernel as a matrix."""
    found = jax.tree.map(np.array, adapted["base"])
    for path, factors in adapted["lora"].items():
        *folders, name = path.split("/")
        holder = found
        for folder in folders:
            holder = holder[folder]
        a, b = np.float64(factors["a"]), np.float64(factors["b"])
        stacked = (a, b) if folders else (a[None], b[None])
        changes = [x.reshape(-1, RANK) @ y.reshape(RANK, -1) for x, y in zip(*stacked, strict=True)]
        change = np.reshape(changes, holder[name].shape) * ALPHA / RANK
        holder[name] = (holder[name] + change).astype(np.float32)
    return found


def test_factors_have_the_kernels_inputs_and_outputs():
    factors = jax.eval_shape(lambda: plan().start(params(), jax.random.key(0)))["lora"]

    assert {path: (f["a"].shape, f["b"].shape) for path, f in factors.items()} == {
        "head": ((16, 2), (2, 97)),
        "layers/qkv": ((2, 16, 2), (2, 2, 3, 4, 4)),
        "layers/out": ((2, 4, 4, 2), (2, 2, 16)),
        "layers/up": ((2, 16, 2), (2, 2, 32)),
        "layers/down": ((2, 32, 2), (2, 2, 16)),
    }


def test_a_model_computes_in_a_wider_dtype_than_its_bases():
    """A narrow base is made wider by its factors: the model must not take it as narrow already."""
    model = find_model("llama")
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = model.Config.from_hugging_face({"model_type": "llama", **sizes})
    base = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), draw_params(model, config)
    )
    ids = collate(examples(2))["ids"]

    def total(params, ids):
        return jnp.sum(loss_of_logits(model.apply(config, params, ids), ids))

    lora = plan_lora(base, total, ids, rank=RANK, alpha=ALPHA, targets="attention")
    start = started(lora, base)

    def adapted(factors):
        return lora.adapt(total)({**start, "lora": factors}, ids)

    def merged(factors):
        return total(lora.merge({**start, "lora": factors}), ids)

    found, expected = (jax.jit(jax.value_and_grad(f))(start["lora"]) for f in (adapted, merged))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, two in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5 * (np.abs(two).max() + 1e-6))


def test_a_base_of_no_known_dtype_is_an_error():
    with pytest.raises(EngineError, match="base_dtype='int4' must be one of int8, nf4, or None"):
        plan(base_dtype="int4")


def test_separate_kernels_of_a_stack_have_factors_of_their_own():
    lora, ids = plan(separate=True), collate(examples(2))["ids"]
    adapted = with_factors(lora)

    qkv = adapted["lora"]["layers/qkv"]
    assert (qkv["a"].shape, qkv["b"].shape) == ((2, 3, 16, 2), (2, 3, 2, 4, 4))
    together = with_factors(plan())["lora"]
    for path in together.keys() - {"layers/qkv"}:
        assert adapted["lora"][path]["a"].shape == together[path]["a"].shape
    base, merged = (
        np.asarray(p["layers"]["qkv"]) for p in (params(), jax.jit(lora.merge)(adapted))
    )
    for layer in range(LAYERS):
        for part in range(3):
            change = qkv["a"][layer, part] @ qkv["b"][layer, part].reshape(RANK, -1)
            expected = base[layer, :, part].reshape(WIDTH, -1) + ALPHA / RANK * np.asarray(change)
            found = merged[layer, :, part].reshape(WIDTH, -1)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lora.adapt(logits))(adapted, ids),
        jax.jit(logits)(jax.jit(lora.merge)(adapted), ids),
        rtol=1e-5,
        atol=1e-5,
    )


def test_named_parts_of_a_kernel_alone_have_factors():
    """Of q, k and v the first and the last, in the stack as in one of its layers."""
    lora = plan("layers/out", named={"layers/qkv": (2, (0, 2))}, dora=True, base_dtype="int8")
    start = started(lora)
    merge = jax.jit(lora.merge)
    base = np.asarray(merge(start)["layers"]["qkv"])
    factors = start["lora"]["layers/qkv"]
    b = 0.1 * np.random.default_rng(2).normal(size=factors["b"].shape).astype(np.float32)
    start["lora"]["layers/qkv"] = {**factors, "b": b}

    merged = merge(start)

    assert factors["a"].shape == (LAYERS, 2, WIDTH, RANK)
    found = np.asarray(merged["layers"]["qkv"])
    change = ALPHA / RANK * np.einsum("lcdr,lcrhk->ldchk", factors["a"], b)
    changed = base[:, :, [0, 2]] + change
    lengths = np.linalg.norm(changed, axis=1, keepdims=True)
    changed *= np.asarray(factors["m"])[:, None] / lengths
    np.testing.assert_allclose(found[:, :, [0, 2]], changed, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[:, :, 1], base[:, :, 1], rtol=0, atol=1e-7)
    ids = collate(examples(2))["ids"]
    np.testing.assert_allclose(
        jax.jit(lora.adapt(logits))(start, ids), jax.jit(logits)(merged, ids), rtol=1e-5, atol=1e-5
    )


def test_what_is_trained_in_full_has_no_factors_and_keeps_its_optimizer_state():
    lora = plan("layers|head", full=("head", "table"))

    assert [target.path for target in lora.targets] == [
        "layers/down", "layers/out", "layers/qkv", "layers/up",
    ]  # fmt: skip
    shapes = lora.shapes(params())
    mask = trainable_mask(shapes, lora.trainable)
    assert {key for key, on in mask["base"].items() if on is True} == {"head", "table"}
    assert not any(jax.tree.leaves(mask["base"]["layers"]))
    assert all(jax.tree.leaves(mask["lora"]))


def test_training_starts_from_the_base_exactly():
    lora, ids = plan(), collate(examples(2))["ids"]

    found = jax.jit(lora.adapt(logits))(started(lora), ids)

    np.testing.assert_array_equal(found, jax.jit(logits)(params(), ids))


def test_the_first_factor_is_drawn_as_in_peft():
    """By torch's `kaiming_uniform_(a=sqrt(5))`: uniform within one over the inputs' square root."""
    factors = started(plan())["lora"]

    for path, found in factors.items():
        scaled = np.ravel(found["a"]) * np.sqrt(32 if path == "layers/down" else 16)
        assert 0.8 < np.abs(scaled).max() <= 1
        assert np.std(scaled) == pytest.approx(1 / np.sqrt(3), abs=0.15)


def test_all_linear_is_every_kernel_but_tables_and_the_head():
    paths = [target.path for target in plan("all-linear").targets]

    assert paths == ["layers/down", "layers/out", "layers/qkv", "layers/up"]


def test_with_magnitudes_training_starts_from_the_base():
    lora, ids = plan(dora=True), collate(examples(2))["ids"]
    start = started(lora)

    found = jax.jit(lora.adapt(logits))(start, ids)

    assert start["lora"]["layers/qkv"]["m"].shape == (2, 3, 4, 4)
    np.testing.assert_allclose(found, jax.jit(logits)(params(), ids), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(logits)(jax.jit(lora.merge)(start), ids), found, rtol=1e-5, atol=1e-5
    )


def test_a_base_of_8_bits_is_off_by_half_a_step_at_most():
    lora, ids = plan(base_dtype="int8"), collate(examples(2))["ids"]
    start = started(lora)

    merged = jax.jit(lora.merge)(start)

    for path in ("qkv", "out", "up", "down"):
        kept, exact = (np.asarray(p["layers"][path]) for p in (start["base"], params()))
        assert kept.dtype == np.int8
        inputs = (1, 2) if path == "out" else (1,)
        step = np.abs(exact).max(axis=inputs, keepdims=True) / 127
        assert (np.abs(np.asarray(merged["layers"][path]) - exact) <= step / 2 + 1e-7).all()
    assert start["base"]["table"].dtype == np.float32
    scales = {path: scale.shape for path, scale in start["scales"].items()}
    assert scales["layers/qkv"] == (2, 3, 4, 4)
    np.testing.assert_allclose(
        jax.jit(lora.adapt(logits))(start, ids), jax.jit(logits)(merged, ids), rtol=1e-6, atol=1e-6
    )


def test_a_base_of_4_bits_has_qloras_levels_and_a_scale_for_each_block():
    lora, ids = plan(base_dtype="nf4"), collate(examples(2))["ids"]
    start = started(lora)

    merged = jax.jit(lora.merge)(start)

    for path, inputs in (("qkv", 1), ("out", 2), ("up", 1), ("down", 1)):
        kept, exact = (np.asarray(p["layers"][path]) for p in (start["base"], params()))
        assert kept.dtype == np.uint8
        assert kept.size == exact.size / 2
        size = exact.shape[inputs]
        of_blocks = np.maximum.reduceat(np.abs(exact), range(0, size, 64), axis=inputs)
        largest = np.repeat(of_blocks, 64, axis=inputs).take(range(size), axis=inputs)
        steps = np.asarray(merged["layers"][path]) / largest
        nearest = np.abs(exact / largest - NF4_LEVELS[:, *[None] * exact.ndim]).argmin(axis=0)
        np.testing.assert_allclose(steps, NF4_LEVELS[nearest], atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lora.adapt(logits))(start, ids), jax.jit(logits)(merged, ids), rtol=1e-6, atol=1e-6
    )


def test_four_bits_are_off_by_half_a_gap_at_most():
    size = 100  # blocks of 64, of which one is not full
    kernel = np.random.default_rng(0).normal(size=(3, size, 5)).astype(np.float32)
    blocks = Blocks(1, size)

    stored, scales = jax.jit(blocks.store)(kernel)
    found = np.asarray(jax.jit(blocks.widen)(stored, scales))

    assert found.shape == kernel.shape
    of_weights = np.repeat(np.asarray(scales), 64, axis=1)[:, :size]
    assert (np.abs(found - kernel) <= 0.152 * of_weights).all()


def of_pairs(params, batch, rngs, is_training):
    """What two kernels, the first of them twice, give in each layer (L, 3, 2 B, T, D)."""
    x = batch["x"].reshape(-1, *batch["x"].shape[2:])

    @jax.checkpoint
    def layer(x, p):
        return x, jnp.stack([x @ p["one"], product(x, p["two"]), x @ p["one"]])

    return jax.lax.scan(layer, x, params)[1]


def test_dropout_zeroes_each_number_that_factors_read_by_itself_whatever_the_micro_batch():
    """The kernels are zero and the factors the identity: the result is what they read."""
    rate, width, keys = 0.25, 8, jax.random.split(jax.random.key(1), 32)
    base = {name: np.zeros((2, width, width), np.float32) for name in ("one", "two")}
    x = np.ones((len(keys), 2, 32, width), np.float32)
    lora = plan_lora(
        base, of_pairs, {"x": x}, None, True,
        rank=width, alpha=width, targets="one|two", dropout=rate,
    )  # fmt: skip
    identity = np.broadcast_to(np.eye(width, dtype=np.float32), (2, width, width))
    full = {"base": base, "lora": {name: {"a": identity, "b": identity} for name in base}}
    adapted = jax.jit(lora.adapt_loss(of_pairs), static_argnums=3)

    flat = np.asarray(adapted(full, {"x": x}, keys, True))

    found = flat.reshape(2, 3, *x.shape)
    np.testing.assert_allclose(np.unique(found), [0, 1 / (1 - rate)])
    four_sigma = 4 / np.sqrt(found.size)
    assert found.mean() == pytest.approx(1, abs=four_sigma * np.sqrt(rate / (1 - rate)))
    centred = (found - 1) / np.sqrt(rate / (1 - rate))
    for dim in range(found.ndim):  # layers, products, rows, pairs, tokens and inputs
        products = centred * np.roll(centred, 1, axis=dim)
        assert abs(products.mean()) < 2 * four_sigma, dim
    some = adapted(full, {"x": x[4:7]}, keys[4:7], True)
    np.testing.assert_array_equal(flat[:, :, 8:14], some)
    np.testing.assert_array_equal(adapted(full, {"x": x}, keys, False), np.ones_like(flat))
    with pytest.raises(EngineError, match=r"activations \(64, 32, 8\), whose first dim"):
        adapted(full, {"x": x}, keys[:3], True)


@pytest.mark.parametrize(
    "kinds",
    [
        {}, {"separate": True}, {"dora": True, "separate": True}, {"base_dtype": "int8"},
        {"targets": None, "named": {"w": (1, (0, 2))}},
        {"targets": None, "named": {"w": (1, (0, 2))}, "dora": True},
    ],
    ids=str,
)  # fmt: skip
def test_dropout_of_each_parts_inputs_is_its_own_where_its_factors_are(kinds):
    """Dropout of all but the factors' part of a product is that of one number at a time."""
    rng = np.random.default_rng(5)
    base = {"w": rng.normal(size=(6, 3, 4)).astype(np.float32)}
    keys = jax.random.split(jax.random.key(2), 2)

    def multiply(params, x, rngs, is_training):
        return jnp.unstack(jnp.einsum("btd,dcf->btcf", x, params["w"]), axis=2)

    x = np.broadcast_to(np.eye(6, dtype=np.float32), (2, 6, 6))
    options = {"rank": RANK, "alpha": ALPHA, "targets": "w", "dropout": 0.5} | kinds
    lora = plan_lora(base, multiply, x, None, True, **options)
    start = lora.start(base, jax.random.key(0))
    full = {**start, "lora": jax.tree.map(lambda leaf: leaf + 0.1, start["lora"])}

    found = jnp.stack(lora.adapt_loss(multiply)(full, x, keys, True), axis=2)

    # Of one number at a time a mask keeps what the factors add to a row of the kernel, or not.
    widened = jnp.stack(lora.adapt(multiply)({**full, "lora": start["lora"]}, x, None, 0), axis=2)
    added = jnp.stack(lora.adapt(multiply)(full, x, None, 0), axis=2) - widened
    is_adapted = np.array([number in kinds.get("named", {"w": (1, (0, 1, 2))})["w"][1]
                           for number in range(3)])  # fmt: skip
    shares = np.asarray((found - widened)[:, :, is_adapted] / added[:, :, is_adapted])
    np.testing.assert_allclose(found[:, :, ~is_adapted], widened[:, :, ~is_adapted])
    np.testing.assert_allclose(np.minimum(abs(shares), abs(shares - 2)), 0, atol=1e-3)
    kept = shares.mean(axis=-1).round() > 0
    assert kept.any()
    assert not kept.all()
    has_own = "named" in kinds or "separate" in kinds
    assert (kept != kept[:, :, :1]).any() == has_own


def test_the_backward_pass_draws_masks_again_and_keeps_none():
    base = {"w": np.ones((6, 4), np.float32)}
    x, keys = np.ones((2, 64, 6), np.float32), jax.random.split(jax.random.key(2), 2)

    def multiply(params, x, rngs, is_training):
        return x @ params["w"]

    lora = plan_lora(base, multiply, x, None, True, rank=1, alpha=1, targets="w", dropout=0.5)
    factors = lora.start(base, jax.random.key(0))["lora"]

    def adapted(factors, x):
        return lora.adapt_loss(multiply)({"base": base, "lora": factors}, x, keys, True)

    _, backward = jax.vjp(adapted, factors, x)

    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= x.size]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        {}, {"rank_stabilized": True}, {"dora": True}, {"dropout": 0.25},
        {"dropout": 0.25, "dora": True},
    ],
    ids=str,
)  # fmt: skip
def test_results_and_gradients_are_those_of_peft(kinds):
    torch = pytest.importorskip("torch", reason="install redco-flow[reference] for torch")
    peft = pytest.importorskip("peft", reason="install peft")
    rng = np.random.default_rng(3)
    kernel, x, weights = (
        rng.normal(size=shape).astype(np.float32) for shape in ((16, 24), (5, 16), (5, 24))
    )

    def multiply(params, x, rngs, is_training):
        return x @ params["w"]

    def plan_with(rank, **kinds):
        given = ({"w": kernel}, multiply, x, None, True)
        return plan_lora(*given, rank=rank, alpha=8.0, targets="w", **kinds)

    lora, keys = plan_with(3, **kinds), jax.random.split(jax.random.key(1), len(x))
    state = lora.start({"w": kernel}, jax.random.key(0))
    factors = {
        name: np.asarray(np.asarray(values) + 0.3 * rng.normal(size=values.shape), np.float32)
        for name, values in state["lora"]["w"].items()
    }

    def total(factors):
        params = {"base": {"w": kernel}, "lora": {"w": factors}}
        y = lora.adapt_loss(multiply)(params, x, keys, True)
        return (y * weights).sum(), y

    gradients, found = jax.jit(jax.grad(total, has_aux=True))(factors)

    flags = {"use_rslora": "rank_stabilized" in kinds, "use_dora": "dora" in kinds}
    rate = kinds.get("dropout", 0.0)
    settings = peft.LoraConfig(r=3, lora_alpha=8, target_modules=["0"], lora_dropout=rate, **flags)
    linear = torch.nn.Linear(16, 24, bias=False)
    linear.weight.data = torch.tensor(kernel.T.copy())
    model = peft.get_peft_model(torch.nn.Sequential(linear), settings)
    layer = model.base_model.model[0]
    theirs = {"a": layer.lora_A["default"].weight, "b": layer.lora_B["default"].weight}
    if "dora" in kinds:
        theirs["m"] = layer.lora_magnitude_vector["default"].weight
    for name, parameter in theirs.items():
        parameter.data = torch.tensor(factors[name].T.copy())
    if rate:
        # Of what is read there remains the mask, by factors that are the identity.
        identity = {"a": np.eye(16, dtype=np.float32), "b": np.eye(16, 24, dtype=np.float32) * 2}
        nothing = {"base": {"w": 0 * kernel}, "lora": {"w": identity}}
        masks = plan_with(16, dropout=rate).adapt_loss(multiply)(nothing, 0 * x + 1, keys, True)
        mask = torch.tensor(np.asarray(masks)[:, :16])
        hook = layer.lora_dropout["default"].register_forward_hook
        hook(lambda _module, inputs, _output: inputs[0] * mask)
    result = model(torch.tensor(x))
    (result * torch.tensor(weights)).sum().backward()

    np.testing.assert_allclose(found, result.detach().numpy(), rtol=1e-5, atol=1e-5)
    for name, parameter in theirs.items():
        np.testing.assert_allclose(
            gradients[name], parameter.grad.numpy().T, rtol=1e-5, atol=1e-4, err_msg=name
        )


def test_merged_parameters_compute_what_the_factors_did():
    lora, ids = plan(), collate(examples(2))["ids"]
    adapted = with_factors(lora)

    merged = jax.jit(lora.merge)(adapted)

    for found, expected in zip(
        jax.tree.leaves(merged), jax.tree.leaves(merged_by_hand(adapted)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lora.adapt(logits))(adapted, ids),
        jax.jit(logits)(merged, ids),
        rtol=1e-5,
        atol=1e-5,
    )
    assert (
        np.abs(jax.jit(logits)(merged, ids) - np.asarray(jax.jit(logits)(params(), ids))).max()
        > 0.1
    )


@pytest.mark.parametrize(
    ("equation", "kinds"),
    [
        ("btd,dchk->btchk", {"targets": "w"}),
        ("btd,dchk->cbthk", {"targets": "w", "separate": True}),
        ("btd,dchk->btchk", {"targets": None, "named": {"w": (1, (0, 2))}}),
        ("dchk,btd->btchk", {"targets": "w", "base_dtype": "int8"}),
        ("product", {"targets": "w"}),
    ],
    ids=str,
)
def test_no_array_of_the_kernels_size_is_made_from_factors_or_gradients(equation, kinds):
    rng = np.random.default_rng(4)
    base = {"w": rng.normal(size=(18, 3, 6, 5)).astype(np.float32)}
    x = rng.normal(size=(2, 4, 18)).astype(np.float32)
    is_kernel_first = equation.startswith("dchk")

    def score(params, x):
        operands = (params["w"], x) if is_kernel_first else (x, params["w"])
        multiply = product if equation == "product" else partial(jnp.einsum, equation)
        return jnp.sum(jnp.sin(multiply(*operands)))

    lora = plan_lora(base, score, x, rank=RANK, alpha=ALPHA, **kinds)
    start = started(lora, base)
    factors = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(0.1), start["lora"])
    gradient = jax.grad(lambda f, x: lora.adapt(score)({**start, "lora": f}, x), argnums=(0, 1))
    compiled = jax.jit(gradient).lower(factors, x).compile()
    expected = jax.jit(
        jax.grad(lambda f, x: score(lora.merge({**start, "lora": f}), x), argnums=(0, 1))
    )

    for one, two in zip(
        jax.tree.leaves(compiled(factors, x)), jax.tree.leaves(expected(factors, x)), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    made = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    sizes = {int(np.prod([int(size) for size in one.split(",")])) for one in made}
    assert sizes
    assert base["w"].size not in sizes


@jax.custom_vjp
def halved(x, w):
    return x @ w


halved.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (0.5 * g @ kept[1].T, kept[0].T @ g / 4)
)


@pytest.mark.parametrize(
    "multiply",
    [
        halved,
        lambda x, w: jax.lax.dot(
            jnp.round(x * 4).astype(jnp.int8), w, preferred_element_type=jnp.float32
        ),
        lambda x, w: x @ w.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    ],
    ids=["a rule of its own", "whole numbers", "a cast that quantizes"],
)
def test_what_is_more_than_a_product_gets_the_sum_of_kernel_and_factors(multiply):
    rng = np.random.default_rng(5)
    base, x = {"w": rng.normal(size=(6, 7))}, rng.normal(size=(4, 6))
    base, x = jax.tree.map(lambda leaf: leaf.astype(np.float32), (base, x))

    def score(params, x):
        return jnp.sum(jnp.sin(multiply(x, params["w"])))

    lora = plan_lora(base, lambda p, x: x @ p["w"], x, rank=RANK, alpha=ALPHA, targets="w")
    factors = jax.tree.map(
        lambda leaf: np.asarray(leaf) + np.float32(0.1), started(lora, base)["lora"]
    )

    def with_gradients(function):
        total = jax.value_and_grad(
            lambda f, x: function({"base": base, "lora": f}, x), argnums=(0, 1)
        )
        return jax.jit(total)(factors, x)

    found = with_gradients(lora.adapt(score))
    expected = with_gradients(lambda params, x: score(lora.merge(params), x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    dropping = replace(lora, dropout=0.5).adapt_loss(lambda params, *_: score(params, x))
    with pytest.raises(EngineError, match=r"dropout=0\.5 falls on what w is multiplied with"):
        dropping({"base": base, "lora": factors}, x, jax.random.split(jax.random.key(0), 4), True)


@pytest.mark.slow
def test_gradients_of_the_factors_are_those_through_the_merged_kernels():
    lora, batch = plan(), collate(examples(2))
    adapted = with_factors(lora)

    def through(function):
        def total(factors):
            given = {"base": adapted["base"], "lora": factors}
            return function(given, batch, None, True)[0].sum()

        return jax.jit(jax.grad(total))(adapted["lora"])

    found = through(lora.adapt(loss))
    expected = through(lambda p, *rest: loss(lora.merge(p), *rest))

    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5 * np.abs(two).max())


def trainer_of(data, fsdp, model, rows=None, **kinds):
    lora = plan(**kinds)
    deployer = Deployer(model, num_fsdp_shards=fsdp, devices=jax.devices()[: data * fsdp * model])
    settings = TrainingPlan(
        deployer,
        loss_fn=loss,
        params=params(),
        optimizer=optax.adamw(1e-2),
        sharding_rules=deployer.get_sharding_rules(*TRACED),
        lora=lora,
        global_batch_size=8,
        per_device_batch_size=rows,
        max_grad_norm=1.0,
    )
    return Trainer.from_plan(settings, params=params(), collate_fn=collate)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_log(self, record):
        self.values += [record["loss"], record["grad_norm"]]


def trained(*mesh, **kinds):
    """Return the losses and gradients' norms of some steps, and the trainer."""
    losses, trainer = Losses(), trainer_of(*mesh, **kinds)
    trainer.fit(examples(), num_epochs=2, callbacks=[losses], log_every_steps=1)
    return losses.values, trainer


@pytest.mark.slow
def test_training_the_factors_is_the_same_on_a_mesh_in_micro_batches_and_leaves_the_base():
    """The vocabulary of 97 lies padded in the base, and in the head's B and magnitudes."""
    kinds = {
        "dora": True,
        "separate": True,
        "dropout": 0.25,
        "base_dtype": "nf4",
        "full": ("head",),
    }
    expected, alone = trained(1, 1, 1, **kinds)

    found, split = trained(2, 2, 2, 1, **kinds)

    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[-2] < expected[0]
    start = started(plan(**kinds))
    found, begun = split.state["params"]["base"], start["base"]
    expected = alone.state["params"]["base"]["head"]
    np.testing.assert_allclose(found["head"], expected, rtol=0, atol=1e-5)
    assert (np.asarray(found.pop("head")) != begun.pop("head")).mean() > 0.9
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(begun), strict=True):
        np.testing.assert_array_equal(one, two)


def test_factors_lie_like_their_kernels_inputs_and_outputs_and_alone_have_optimizer_state():
    trainer = trainer_of(1, 1, 4)

    specs = {p.path: p.spec for p in trainer.sharding_rules.parameters}
    assert specs["lora/layers/up/a"] == P(None, None, None)
    assert specs["lora/layers/up/b"] == P(None, None, "model")
    assert specs["lora/layers/down/a"] == P(None, "model", None)
    assert specs["lora/layers/qkv/b"] == P(None, None, None, "model", None)
    assert specs["lora/layers/out/a"] == P(None, "model", None, None)
    factors = trainer.state["params"]["lora"]
    num_trained = sum(x.size for x in jax.tree.leaves(factors))
    assert sum(x.size for x in jax.tree.leaves(trainer.state["opt_state"])) == 2 * num_trained + 1


def test_a_checkpoint_restores_base_and_factors(tmp_path):
    kinds = {"full": ("table",), "base_dtype": "int8"}
    trainer = trainer_of(1, 1, 4, **kinds)
    with Checkpointer(tmp_path) as checkpointer:
        trainer.fit(examples(), num_epochs=1, checkpointer=checkpointer)
        other = trainer_of(2, 1, 1, **kinds)
        other.restore(checkpointer)

    for found, expected in zip(
        jax.tree.leaves(other.state), jax.tree.leaves(trainer.state), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_models_kernels_are_found_by_what_they_do():
    module = find_model("llama")
    config = module.Config.from_hugging_face(
        {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
            "bos_token_id": 0, "eos_token_id": 0,
        }
    )  # fmt: skip
    shapes = module.abstract_params(config)

    def forward(params, ids):
        return module.apply(config, params, ids)

    lora = plan_lora(shapes, forward, IDS, rank=2, alpha=4, targets="layers")

    leaves = {"/".join(k.key for k in path): x for path, x in
              jax.tree_util.tree_leaves_with_path(shapes)}  # fmt: skip
    for target in lora.targets:
        assert target.stack == (0,), target.path
        inputs = np.prod([leaves[target.path].shape[i] for i in target.inputs])
        assert inputs == {"out": 32, "wo": 48}.get(target.path.split("/")[-1], 32), target.path
    assert all("norm" not in target.path for target in lora.targets)
    assert len(lora.targets) >= 4
    everything = plan_lora(shapes, forward, IDS, rank=2, alpha=4, targets="all-linear")
    assert everything.targets == lora.targets
    apart = plan_lora(shapes, forward, IDS, rank=2, alpha=4, targets="layers", separate=True)
    stacks = {target.path.split("/")[-1]: target.stack for target in apart.targets}
    assert stacks == {"q": (0,), "kv": (0, 2), "out": (0,), "wi": (0, 2), "wo": (0,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {
            "model_type": "gptj", "n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4,
            "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0,
        },
        {
            "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 24,
        },
    ],
    ids=lambda values: values["model_type"],
)  # fmt: skip
def test_a_decoders_factors_have_the_same_dropout_on_a_mesh(values):
    """Shards would share a causal text out evenly, join a parallel block's kernels (GPT-J's) and
    repeat keys and values where they are few."""
    module = find_model(values["model_type"])
    config = module.Config.from_hugging_face(
        {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, **values}
    )
    base, batch = draw_params(module, config, stddev=0.1), {"ids": np.arange(16).reshape(2, 8)}
    keys = jax.random.split(jax.random.key(0), 2)

    def score(params, batch, rngs, is_training):
        return module.apply(config, params, batch["ids"])

    lora = plan_lora(base, score, batch, None, True, rank=2, alpha=4, targets="layers", dropout=0.5)
    drawn = jax.eval_shape(lora.start, base, jax.random.key(0))
    rng = np.random.default_rng(0)
    factors = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f"), drawn["lora"])

    def outcome(*shape):
        def adapted(factors):
            scores = lora.adapt_loss(score)({"base": base, "lora": factors}, batch, keys, True)
            return jnp.sum(jnp.sin(scores)), scores

        mesh = jax.make_mesh(shape, ("context", "model"), axis_types=(AxisType.Auto,) * 2)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            placed = jax.device_put(factors, NamedSharding(mesh, P()))
            return jax.device_get(jax.jit(jax.grad(adapted, has_aux=True))(placed))

    found, expected = outcome(2, 2), outcome(1, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-3), found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "norm"}, "matches no kernel; kernels: head, layers/down, layers/out"),
        ({"targets": "("}, "not a regex"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"full": ("heads",)}, "no parameters heads to train in full; parameters: head, layers"),
        ({"targets": "head", "full": ("head",)}, r"matches no kernel; .*trained in full: head"),
        ({"dropout": 1.0}, r"dropout=1\.0 must be at least 0 and below 1"),
        ({"named": {"table": None}}, "table cannot have factors: nothing is multiplied with it"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(options, message):
    given = {"rank": RANK, "alpha": ALPHA, "targets": "layers"} | options

    with pytest.raises(EngineError, match=message):
        plan_lora(*TRACED, **given)
