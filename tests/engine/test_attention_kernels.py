"""Which kernel computes a model's attention, by the mesh's devices, and what steps keep with it."""

from __future__ import annotations

import importlib
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from redco_flow import Deployer, Trainer, TrainingPlan
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.attention.bias import row_biases
from redco_flow.models.attention.grouped import attend_grouped
from redco_flow.models.attention.kernels import first_able
from redco_flow.models.attention.splash import splash_attend
from redco_flow.models.find import find_model
from redco_flow.models.layer_config import AttentionConfig

LENGTH = 256
LLAMA = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
# For compilers that unroll layers.
ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}
# No dim is as long as the rows, or parts of them.
NARROW_SIZES = {"hidden_size": 192, "intermediate_size": 96, "head_dim": 64}
GEMMA = {
    **LLAMA, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
KERNEL = "pallas_call"


def traced_for(platform, kind, function, *inputs, **sizes):
    """Trace for devices that are not there: no compiler of theirs is needed."""
    sizes = {"data": 1, "fsdp": 1, "context": 1, "model": 1} | sizes
    mesh = AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * 4,
        abstract_device=AbstractDevice(kind, 1, platform),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(function)(*inputs))


def attending(family, values, attention="auto", **given):
    """Return a forward pass and its inputs."""
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values}).updated(
        {"attention": attention, "dtype": given.pop("dtype", "float32")}
    )
    ids = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    texts = [ids] if family != "t5" else [ids, ids, ids]
    keys = jax.random.split(jax.random.key(0), 2) if given.pop("drops", False) else None

    def forward(params, *texts):
        return module.apply(config, params, *texts, rngs=keys, **given)

    return forward, module.abstract_params(config), *texts


@pytest.mark.parametrize(("family", "values"), [("llama", LLAMA), ("gemma2", GEMMA)])
def test_tpus_attend_by_splash_whatever_this_machine_has(family, values, caplog):
    caplog.set_level(logging.INFO)
    kind = f"TPU for {family}"

    found = [traced_for("tpu", kind, *attending(family, values), model=2) for _ in range(2)]

    assert all(KERNEL in jaxpr for jaxpr in found)
    assert [r.getMessage() for r in caplog.records if kind in r.getMessage()] == [
        f"attention on {kind} devices: splash."
    ]


@pytest.mark.parametrize(
    ("kind", "sizes", "forward", "reason"),
    [
        ("TPU a", {}, partial(attending, "llama", LLAMA, "xla"), "the setting says so"),
        ("TPU b", {}, partial(attending, "llama", {**LLAMA, "attention_dropout": 0.1}, drops=True),
         "attention weights are dropped out"),
        ("TPU c", {}, partial(attending, "t5", T5), "scores have a bias, as of relative positions"),
        ("TPU d", {"model": 3}, partial(attending, "llama", LLAMA),
         "3 model shards do not divide 4 heads and 2 key-value heads"),
        ("TPU e", {}, partial(attending, "gpt_oss", {**LLAMA, "num_local_experts": 4}),
         "heads have attention sinks, which no kernel supports"),
    ],
)  # fmt: skip
def test_where_splash_cannot_attend_xla_does_and_the_log_says_why(
    kind, sizes, forward, reason, caplog
):
    caplog.set_level(logging.INFO)

    jaxpr = traced_for("tpu", kind, *forward(), **sizes)

    messages = [r.getMessage() for r in caplog.records if kind in r.getMessage()]
    assert f"attention on {kind} devices: xla, because {reason}." in messages
    # T5's cross-attention has no bias.
    assert (KERNEL in jaxpr) == (kind == "TPU c")


def test_cpus_attend_by_xla():
    assert KERNEL not in traced_for("cpu", "cpu", *attending("llama", LLAMA))


@pytest.mark.parametrize(
    ("asked", "platform", "kind"),
    [
        ("splash", "cpu", "cpu"),
        ("cudnn", "tpu", "TPU v5p"),
        ("splash", "gpu", "NVIDIA H100"),
        ("triton", "tpu", "TPU v5p"),
        ("triton", "gpu", "Tesla V100-SXM2-16GB"),
    ],
)
def test_a_kernel_that_the_devices_do_not_have_is_refused(asked, platform, kind):
    forward = attending("llama", LLAMA, asked)

    with pytest.raises(ValueError, match=f"attention is '{asked}', which {kind} devices cannot"):
        traced_for(platform, kind, *forward)


@pytest.mark.parametrize(("family", "values", "asked", "shards", "is_splash"), [
    ("gemma2", GEMMA, "auto", {"context": 2}, True),
    ("llama", LLAMA, "splash", {"context": 2, "model": 2}, True),
    ("llama", LLAMA, "xla", {"context": 2}, False),
    ("llama", LLAMA, "auto", {"context": 4}, False),
])  # fmt: skip
def test_a_ring_over_tpus_works_on_blocks_by_splash(family, values, asked, shards, is_splash):
    """But of fewer than 128 tokens on a device."""
    jaxpr = traced_for("tpu", "TPU v5p", *attending(family, values, asked), **shards)

    assert (KERNEL in jaxpr) == is_splash
    assert "ppermute" in jaxpr


def test_a_ring_over_gpus_is_xlas():
    with pytest.raises(ValueError, match=r"'cudnn'.* where sequences are not split"):
        traced_for("gpu", "NVIDIA H900", *attending("llama", LLAMA, "cudnn"), context=2)
    jaxpr = traced_for("gpu", "NVIDIA H900", *attending("llama", LLAMA), context=2)
    assert "ppermute" in jaxpr


# No other dim is as long as its rows of LENGTH tokens.
NARROW = {**LLAMA, "hidden_size": 192}
ON_A_GPU = {"dtype": "bfloat16", "segment_ids": jnp.zeros((2, LENGTH), jnp.int32)}
NOT_HERE = "cuDNN's kernels are compiled beside the NVIDIA GPUs that run them alone"


@pytest.mark.parametrize(
    ("kind", "values", "asked", "obstacle"),
    [
        ("NVIDIA a", NARROW, "auto", None),
        ("NVIDIA b", NARROW, "triton", None),
        ("NVIDIA c", {**GEMMA, "hidden_size": 192}, "auto", None),
        ("NVIDIA d", {**LLAMA, "hidden_size": 2048}, "triton",
         "heads have 512 dims; Triton's kernel takes 256 or fewer"),
        ("NVIDIA e", NARROW, "xla", "the setting says so"),
    ],
)  # fmt: skip
def test_packed_rows_on_gpus_are_attended_to_by_triton(kind, values, asked, obstacle, caplog):
    """Or, where it cannot, by XLA, as the log says once; cuDNN is not compiled on this machine."""
    caplog.set_level(logging.INFO)
    family = "gemma2" if "sliding_window" in values else "llama"

    jaxpr = traced_for("gpu", kind, *attending(family, values, asked, **ON_A_GPU), model=2)

    (message,) = [r.getMessage() for r in caplog.records if kind in r.getMessage()]
    chosen = "triton" if obstacle is None else "xla"
    reasons = [NOT_HERE] * (asked == "auto") + [obstacle] * (obstacle is not None)
    because = f", because {'; '.join(reasons)}" if reasons else ""
    assert message == f"attention on {kind} devices: {chosen}{because}."
    assert (KERNEL in jaxpr) == (obstacle is None)
    scores = re.search(rf"\[(?:\d+,)*{LENGTH},{LENGTH}\]", jaxpr)
    assert (scores is None) == (obstacle is None)


@pytest.mark.parametrize(
    ("obstacles", "expected"),
    [
        ({"cudnn": None, "triton": None}, "triton"),
        ({"cudnn": "a", "triton": None}, "triton"),
        ({"cudnn": None, "triton": "b"}, "cudnn"),
        ({"cudnn": "a", "triton": "b"}, "xla"),
    ],
)
def test_a_bias_as_large_as_the_scores_is_cudnns_last_choice(obstacles, expected):
    chosen, reason = first_able(obstacles, prefers_no_bias=True)

    assert chosen == expected
    assert ("bias as large as the scores" in str(reason)) == (obstacles["cudnn"] is None)
    assert first_able({"cudnn": None, "triton": None}, prefers_no_bias=False) == ("cudnn", None)


def test_another_kernel_is_an_error_of_the_config():
    module = find_model("llama")

    with pytest.raises(ValueError, match="attention is 'flash'; it must be one of auto, xla, spl"):
        module.Config().updated({"attention": "flash"})
    assert "attention" not in module.Config().updated({"attention": "xla"}).to_hugging_face()


VOCAB, SHORT = 32, 12
HEADS = AttentionConfig(4, 2, 8, 8**-0.5)


def loss_with(attend):
    """The loss of a layer of attention alone, over packed rows."""

    def loss_fn(params, batch, rngs, is_training):
        embedded = params["embedding"][batch["ids"]]
        query, key, value = (
            jnp.einsum("btd,dhk->bthk", embedded, params[name])
            for name in ("query", "key", "value")
        )
        heads = attend(HEADS, query, key, value, row_biases(None, batch["segments"]))
        logits = jnp.einsum("bthk,hkv->btv", heads, params["head"])
        return cross_entropy(logits, batch["ids"])

    return loss_fn


def draw_params():
    shapes = {
        "embedding": (VOCAB, 16), "query": (16, 4, 8), "key": (16, 2, 8), "value": (16, 2, 8),
        "head": (4, 8, VOCAB),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()
    }


def collate(rows):
    ids = np.stack(rows)
    return {"ids": ids, "segments": np.cumsum(ids % 4 == 0, axis=1).astype(np.int32)}


def trained(attend, deployer, **options):
    loss_fn, params = loss_with(attend), draw_params()
    texts = list(np.random.default_rng(1).integers(0, VOCAB, (8, SHORT)).astype(np.int32))
    # The rules of what XLA computes, as they are derived of a model: without a mesh.
    rules = deployer.get_sharding_rules(
        params, loss_with(attend_grouped), collate(texts), None, False
    )
    trainer = Trainer(
        deployer, collate_fn=collate, loss_fn=loss_fn, params=params, optimizer=optax.sgd(0.5),
        sharding_rules=rules, global_batch_size=8, **options,
    )  # fmt: skip
    trainer.fit(texts, num_epochs=2)
    return jax.device_get(trainer.state["params"])


def test_micro_batches_of_packed_rows_train_like_one_device_and_reduce_once(caplog):
    """Each data shard keeps the gradients of its rows apart, with the kernel in the step."""
    caplog.set_level(logging.INFO)
    deployer = Deployer(2, num_fsdp_shards=2, devices=jax.devices()[:8])

    attend = partial(splash_attend, is_interpreted=True)
    found = trained(attend, deployer, per_device_batch_size=1)

    assert not [r for r in caplog.records if "in every micro-batch" in r.getMessage()]
    alone = trained(attend_grouped, Deployer(devices=jax.devices()[:1]))
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-4 * np.abs(two).max())


@pytest.mark.slow
def test_a_step_compiled_for_tpus_has_the_kernel_once_and_no_scores(monkeypatch, caplog):
    """Packed rows in micro-batches over data 2 x model 2, recomputed but for attention.

    JAX leaves a forward kernel of which nothing is used.
    """
    pytest.importorskip("libtpu", reason="pip install libtpu")
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    module = find_model("llama")
    values = {"model_type": "llama", **ONE_LAYER, **NARROW_SIZES, "max_position_embeddings": 512}
    config = module.Config.from_hugging_face(values).updated(
        {"dtype": "bfloat16", "remat": "full", "activations": {"attention": "keep"}}
    )

    def loss_fn(params, batch, rngs, is_training):
        logits = module.apply(config, params, batch["ids"], segment_ids=batch["segments"])
        return cross_entropy(logits, batch["ids"])

    deployer, params = Deployer(2, devices=devices), module.abstract_params(config)
    rows = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    batch = {"ids": rows, "segments": rows}
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=8,
        per_device_batch_size=1,
        batch=batch,
    )

    program = plan.compile().as_text()

    # Forward, the gradient of the queries, those of keys and values.
    assert program.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.findall(r"\[[\d,]*512,512[\d,]*\]", program)
    assert not [r for r in caplog.records if "in every micro-batch" in r.getMessage()]


@pytest.mark.slow
def test_a_step_over_context_shards_compiled_for_tpus_has_the_kernel_and_no_scores(monkeypatch):
    """Of 1024 tokens on 2 shards, each with two parts of 256; no other dim has these sizes.

    In float32, with whose precision Mosaic compiles the kernel, too.
    """
    pytest.importorskip("libtpu", reason="pip install libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
    module, length = find_model("llama"), 1024
    values = {"model_type": "llama", **ONE_LAYER, **NARROW_SIZES, "max_position_embeddings": length}
    config = module.Config.from_hugging_face(values).updated({"dtype": "float32", "remat": "full"})

    def loss_fn(params, batch, rngs, is_training):
        logits = module.apply(config, params, batch["ids"], segment_ids=batch["segments"])
        return cross_entropy(logits, batch["ids"])

    deployer = Deployer(
        num_context_shards=2,
        fsdp_over_context=True,
        devices=devices[:2],
        matmul_precision="highest",
    )
    params, rows = module.abstract_params(config), jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch = {"ids": rows, "segments": rows}
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=1,
        batch=batch,
    )

    program = plan.compile().as_text()

    assert "tpu_custom_call" in program
    # XLA for TPUs makes convolutions of products.
    products = re.findall(r" convolution\(.*", program)
    assert products
    assert all("operand_precision={highest,highest}" in one for one in products)
    assert "collective-permute" in program
    assert not re.findall(r"\[[\d,]*(?:256|512|1024),(?:256|512|1024)[\d,]*\]", program)


@pytest.mark.slow
def test_attention_costs_no_more_than_splash_called_bare(monkeypatch):
    """Between projections, of 512 tokens, compiled for a v5p chip."""
    pytest.importorskip("libtpu", reason="pip install libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    attention_cost = importlib.import_module("attention_cost")
    options = SimpleNamespace(target="v5p", shape="tiny", window=None, cap=None, xla=False)

    record = attention_cost.measure(options, 512)

    assert record["ours"]["kernels"] == record["bare"]["kernels"] == 3
    assert record["hbm_bytes_ratio"] <= 1.1
    assert record["temp_bytes_ratio"] <= 1.1
