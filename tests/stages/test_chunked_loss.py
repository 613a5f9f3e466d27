"""A loss in chunks is the loss at once: in number, gradients and layout, with less memory."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.transformer.language_model import Head, score
from redco_flow.recipes.find import find_recipe
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.plan import plan_training, start_trainer
from redco_flow.text.tokenizer import TextTokenizer
from tests.drawn_params import draw_like
from tests.engine.traffic import read_collectives, wire_bytes

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
# An untied head, a tied one with a soft cap, a bias, a projection before it, a scaled tied one.
MODELS = {
    "llama": LLAMA,
    "gemma2": {**LLAMA, "head_dim": 8, "final_logit_softcapping": 3.0},
    "gptj": {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 64},
    "opt": {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 8, "max_position_embeddings": 64},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}
DATA_MESH = {"num_model_shards": 2, "fsdp": 2}  # data 2, fsdp 2, model 2
CONTEXT_MESH = DATA_MESH | {"num_context_shards": 2}  # fsdp 2, context 2, model 2
EXAMPLES = [
    {"row_id": str(n), "source_ids": [5, 6 + n], "target_ids": [7 + n, *[9] * (n % 5), 3]}
    for n in range(8)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a few words, and some more words"] * 9, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


def recipe_of(tokenizer, family, length=8, **values):
    name = "text_to_text" if family == "t5" else "language_modeling"
    model = {"family": family, "config": {**MODELS[family], **values}}
    recipe = find_recipe(name).build(model, tokenizer, source_length=length, target_length=length)
    return name, recipe


def plan_of(tokenizer, family, settings, *, packed=False, **values):
    name, recipe = recipe_of(tokenizer, family, **values)
    own = {"recipe": name, "global_batch_size": 8, "optimizer": "sgd", "learning_rate": 1.0}
    own |= {"schedule": {"type": "constant"}, "max_grad_norm": None}
    config = Config.from_json({**own, **settings})
    collate = recipe.collate_fn
    if packed:
        pack = recipe.collate_packed(24)
        collate = lambda rows: pack([[row, row] for row in rows])  # noqa: E731
    devices = jax.devices()[: 8 if settings.get("num_model_shards") else 1]
    plan = plan_training(config, recipe, collate(EXAMPLES), 10, devices=devices)
    return plan, config, recipe, collate


def step_of(trainer):
    """Return the gradients of a step of plain gradient descent, and the mean loss."""
    state = jax.tree.map(np.asarray, trainer._state["params"])
    with trainer.read_batches(EXAMPLES, 0, 1) as batches:
        (found,) = trainer.device_batches(batches)
    after, metrics = trainer.plan.train_step(trainer._state, found)
    gradients = jax.tree.map(lambda old, new: old - np.asarray(new), state, after["params"])
    return gradients, float(metrics["total"] / metrics["weight"])


def assert_same_step(tokenizer, family, settings, **options):
    found = [
        step_of(
            start_trainer(*plan_of(tokenizer, family, settings | {"num_loss_chunks": n}, **options))
        )
        for n in (1, 3)
    ]
    assert_same(found[1], found[0])


def assert_same(in_chunks, at_once):
    (gradients, loss_in_chunks), (expected, loss) = in_chunks, at_once
    assert loss_in_chunks == pytest.approx(loss, rel=1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for one, other in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest, rtol=1e-5)


@pytest.mark.slow
# The tests below train the others; a mesh splits each head as GPT-J's.
@pytest.mark.parametrize("family", ["gemma2", "opt", "t5"])
def test_every_familys_head_has_the_same_loss_and_gradients_with_a_z_loss_too(tokenizer, family):
    _, recipe = recipe_of(tokenizer, family)
    batch, keys = recipe.collate_fn(EXAMPLES), jax.random.split(jax.random.key(0), len(EXAMPLES))
    params = draw_like(recipe.abstract_params(), stddev=0.1)

    def found(num_chunks):
        loss_fn = recipe.loss_in_chunks(num_chunks, z_loss=0.1)

        def mean(params):
            totals, weights, *_ = loss_fn(params, batch, keys, True)
            return totals.sum() / weights.sum()

        on_mesh = Deployer(devices=jax.devices()[:1]).on_mesh(jax.value_and_grad(mean))
        lowered = jax.jit(on_mesh).lower(params)
        loss, gradients = lowered.compile()(params)
        return (gradients, float(loss)), lowered.as_text()

    (in_chunks, program), (at_once, other) = found(3), found(1)
    assert program != other
    assert_same(in_chunks, at_once)


@pytest.mark.slow
def test_loss_and_gradients_are_the_same_with_sequences_split_over_devices(tokenizer):
    """Of a head with a bias."""
    assert_same_step(tokenizer, "gptj", CONTEXT_MESH | {"z_loss": 0.1})


@pytest.mark.slow
def test_only_training_adds_the_z_loss(tokenizer):
    settings = DATA_MESH | {"z_loss": 0.1, "num_loss_chunks": 3, "logits_dtype": "bfloat16"}
    plain, _ = plan_of(tokenizer, "llama", {})[2:]
    plan, config, recipe, collate = plan_of(tokenizer, "llama", settings)

    trainer = start_trainer(plan, config, recipe, collate)
    evaluated, params = trainer.eval_loss(EXAMPLES), jax.device_get(trainer.state["params"])
    _, loss = step_of(trainer)
    loss_fn = jax.jit(plain.loss_fn, static_argnums=3)
    totals, weights = loss_fn(params, collate(EXAMPLES), None, False)
    assert evaluated == pytest.approx(float(totals.sum() / weights.sum()), 1e-5)
    # Drawn anew, the model's logits are small, and log Z is about that of the vocabulary's size.
    extra = loss - float(totals.sum() / weights.sum())
    assert extra == pytest.approx(0.1 * np.log(recipe.model["config"]["vocab_size"]) ** 2, rel=0.1)


@pytest.mark.slow
def test_they_are_for_packed_rows_with_gradients_deferred_to_the_last_micro_batch(tokenizer):
    settings = {"num_model_shards": 2, "per_device_batch_size": 1}
    assert_same_step(tokenizer, "llama", settings, packed=True)


@pytest.mark.slow
def test_layout_and_traffic_stay_and_the_logits_go(tokenizer):
    """The head's gradient is reduced once, not in every chunk, over fsdp as over data."""
    plans = [
        plan_of(
            tokenizer, "llama", {**CONTEXT_MESH, "num_loss_chunks": n}, vocab_size=16384, length=128
        )[0]
        for n in (1, 8)
    ]

    assert plans[0].model_rules == plans[1].model_rules
    steps = [plan.compile() for plan in plans]
    at_once, in_chunks = (wire_bytes(step.as_text()) for step in steps)
    assert in_chunks < 1.05 * at_once
    # Of a device: what shards along fsdp share is not whole on any.
    head_bytes = 4 * 16 * 16384 // 2 // 2
    sent = read_collectives(steps[1].as_text())
    assert {one.count for one in sent if one.num_bytes >= head_bytes} == {1}
    at_once, in_chunks = (step.memory_analysis().temp_size_in_bytes for step in steps)
    assert in_chunks < at_once - 4 * 256 * 16384  # a device's logits in float32


EQUAL, UNEQUAL = [0.5, 0.5, 0.5], [1.0, 0.0, 2.5]  # of rows: one of the latter only pads


@pytest.mark.parametrize(
    ("weights", "options", "settings"),
    [
        (EQUAL, {}, {}),
        (EQUAL, {"z_loss": 0.1}, {"logits_dtype": "bfloat16"}),
        (EQUAL, {"z_loss": 0.1, "label_smoothing": 0.1}, {}),
        (UNEQUAL, {"label_smoothing": 0.1}, {}),
        (UNEQUAL, {"z_loss": 0.1}, {"equal_weights": False}),
    ],
)
def test_chunks_that_do_not_divide_the_tokens_change_nothing(weights, options, settings):
    rng = np.random.default_rng(0)
    kernel, hidden = rng.normal(size=(6, 11)), rng.normal(size=(3, 7, 6))
    head = Head(kernel.astype(np.float32), rng.normal(size=11).astype(np.float32))
    labels = rng.integers(-1, 11, (3, 7))
    score_all, weights = partial(score, 5.0), np.array(weights)
    settings = {"num_chunks": 4, **options, **settings}

    def at_once(head, hidden):
        logits = score_all(head, hidden).astype(settings.get("logits_dtype", "float32"))
        return cross_entropy(logits, labels, **options)[0] @ weights

    def in_chunks(head, hidden):
        losses, _ = chunked_cross_entropy(score_all, head, hidden, labels, **settings)
        return losses @ weights

    inputs = (head, hidden.astype(np.float32))
    compute = Deployer(devices=jax.devices()[:1]).on_mesh(jax.value_and_grad(in_chunks, (0, 1)))
    text = str(jax.make_jaxpr(compute)(*inputs))
    found = jax.jit(compute)(*inputs)

    assert "scan" in text
    expected = jax.jit(jax.value_and_grad(at_once, (0, 1)))(*inputs)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "num_tokens", "num_model_shards", "expected"),
    [
        (4096, 8192, 1, 16),  # 3.9 GiB of logits
        (4096, 8192, 2, 8),
        (1024, 8192, 1, 16),
        (4096, 512, 1, 1),
    ],
)
def test_auto_chunks_of_a_cpu_have_at_most_256_mib_of_logits(
    width, num_tokens, num_model_shards, expected
):
    vocab_size = 128256
    head = Head(jax.ShapeDtypeStruct((width, vocab_size), np.float32), None)
    hidden = jax.ShapeDtypeStruct((1, num_tokens, width), np.float32)
    labels = jax.ShapeDtypeStruct((1, num_tokens), np.int32)
    deployer = Deployer(num_model_shards, devices=jax.devices()[:num_model_shards])

    def loss(head, hidden, labels):
        return chunked_cross_entropy(partial(score, None), head, hidden, labels)

    jaxpr = str(jax.make_jaxpr(deployer.on_mesh(loss))(head, hidden, labels))

    lengths = {int(found) for found in re.findall(r"length=(\d+)", jaxpr)}
    assert lengths == ({expected} if expected > 1 else set())
