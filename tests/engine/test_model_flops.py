"""A step's model FLOPs, counted from its trace, beside the closed forms that the field uses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer, TrainingPlan
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.devices import peak_tflops
from redco_flow.engine.progress import peak_memory_bytes, utilization
from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_config, find_model

ROWS, LENGTH, WIDTH, LAYERS, HEADS, UNITS, VOCABULARY = 8, 64, 32, 3, 4, 96, 120
TOKENS = ROWS * LENGTH
GROUPS = 2
HEAD = WIDTH * VOCABULARY
# Kernels' sizes; a table that is only looked up in multiplies nothing.
LLAMA_LAYER = WIDTH * WIDTH * (2 + 2 * GROUPS / HEADS) + 3 * WIDTH * UNITS
GPT2_LAYER = 4 * WIDTH * WIDTH + 2 * WIDTH * UNITS
# PaLM, appendix B: 12 L H Q T for a token, forwards and backwards.
ATTENTION = 12 * LAYERS * WIDTH * LENGTH * TOKENS

LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": UNITS,
    "max_position_embeddings": LENGTH,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": UNITS,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def model_of(family, **changes):
    """Shapes and loss of a small model."""
    given = {"llama": LLAMA, "gpt2": GPT2}.get(family, LLAMA)
    config = find_config(family).from_hugging_face({"model_type": family, **given, **changes})
    model = find_model(family)

    def loss(params, batch, rngs, is_training):
        return cross_entropy(model.apply(config, params, batch["ids"]), batch["ids"])

    return model.abstract_params(config), loss


BATCH = {"ids": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)}


def flops_of(params, loss, batch=BATCH, *, devices=1, **options):
    plan = TrainingPlan(
        Deployer(devices=jax.devices()[:devices]),
        loss_fn=loss,
        params=params,
        optimizer=optax.sgd(0.1),
        batch=batch,
        **{"global_batch_size": ROWS, **options},
    )
    return plan.model_flops()


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("llama", LAYERS * LLAMA_LAYER + HEAD), ("gpt2", LAYERS * GPT2_LAYER + HEAD)],
)
def test_a_decoders_step_is_six_operations_a_kernels_number_and_token_and_attention(
    family, kernels
):
    assert flops_of(*model_of(family)) == 6 * kernels * TOKENS + ATTENTION


@pytest.mark.parametrize(
    "options",
    [{"per_device_batch_size": 1}, {"devices": 4}, {"devices": 2, "per_device_batch_size": 2}],
)
def test_neither_accumulation_nor_devices_change_a_steps_model_flops(options):
    assert flops_of(*model_of("llama"), **options) == flops_of(*model_of("llama"))


def test_a_loss_in_chunks_counts_as_one_at_once():
    """It makes gradients with the losses: products that no backward pass multiplies again."""
    params, _ = model_of("llama")
    config = find_config("llama").from_hugging_face({"model_type": "llama", **LLAMA})
    model = find_model("llama")

    def loss(params, batch, rngs, is_training):
        hidden, head, _ = model.apply_before_head(config, params, batch["ids"])
        score = partial(model.score, config)
        return chunked_cross_entropy(score, head, hidden, batch["ids"], num_chunks=4)

    assert flops_of(params, loss) == flops_of(*model_of("llama"))


@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_what_is_rematerialised_is_not_counted(remat):
    assert flops_of(*model_of("llama", remat=remat)) == flops_of(*model_of("llama"))


def test_an_experts_token_counts_what_its_chosen_experts_multiply():
    params, loss = model_of("mixtral", num_local_experts=4, num_experts_per_tok=2)
    router = WIDTH * 4
    experts = 2 * 3 * WIDTH * UNITS
    layer = LLAMA_LAYER - 3 * WIDTH * UNITS + experts + router

    assert flops_of(params, loss) == 6 * (LAYERS * layer + HEAD) * TOKENS + ATTENTION


KERNEL = 16 * 48


def two_kernels():
    return {"up": jnp.zeros((16, 48)), "down": jnp.zeros((48, 16))}


def two_products(params, batch, rngs, is_training):
    made = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jnp.sum(made**2, axis=-1), jnp.ones(len(made))


VECTORS = {"x": jax.ShapeDtypeStruct((ROWS, 16), jnp.float32)}
ONE = 2 * KERNEL * ROWS


@pytest.mark.parametrize(
    ("trainable", "products"),
    [
        (None, 5),  # the data that comes in needs no gradient: 2 + 3
        ("up", 4),  # the kernel's own gradient, and the one through `down` to it
        ("down", 3),
    ],
)
def test_frozen_kernels_have_no_gradient_of_their_own(trainable, products):
    counted = flops_of(two_kernels(), two_products, VECTORS, trainable=trainable)

    assert counted == products * ONE


def test_low_rank_factors_count_their_own_products_beside_the_frozen_kernels():
    rank = 4
    traced = (two_kernels(), two_products, VECTORS, None, False)
    lora = plan_lora(*traced, rank=rank, alpha=1.0, targets="up|down")

    counted = flops_of(two_kernels(), two_products, VECTORS, lora=lora)

    a_and_b = 2 * ROWS * rank * (16 + 48)
    first = ONE + 3 * a_and_b - 2 * ROWS * rank * 16  # nothing flows to the data
    second = 2 * ONE + 3 * a_and_b
    assert counted == first + second


def test_low_rank_factors_of_a_stacked_model_spare_the_kernels_gradients():
    params, loss = model_of("llama")
    lora = plan_lora(params, loss, BATCH, None, False, rank=2, alpha=1.0, targets="mlp")
    frozen_head = 2 * TOKENS * HEAD * 2

    counted = flops_of(params, loss, lora=lora)

    # A scan's layers are all counted alike, and gate and up are one kernel, with one A.
    kernels = 2 * TOKENS * LAYERS * LLAMA_LAYER * 2
    factors = 3 * 2 * TOKENS * LAYERS * 2 * (2 * WIDTH + 3 * UNITS)
    assert counted == frozen_head + kernels + ATTENTION + factors


def test_a_convolution_counts_what_each_output_sums():
    def loss(params, batch, rngs, is_training):
        made = jax.lax.conv_general_dilated(
            batch["image"], params["kernel"], (2, 2), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return jnp.sum(made**2, axis=(1, 2, 3)), jnp.ones(len(made))

    image = {"image": jax.ShapeDtypeStruct((ROWS, 32, 32, 3), jnp.float32)}

    counted = flops_of({"kernel": jnp.zeros((3, 3, 3, 8))}, loss, image)

    assert counted == 2 * 2 * ROWS * 16 * 16 * 8 * 3 * 3 * 3


def test_of_a_loop_of_unknown_length_nothing_is_told(caplog):
    caplog.set_level("INFO")

    def loss(params, batch, rngs, is_training):
        made = jax.lax.while_loop(
            lambda x: jnp.sum(x) < 9, lambda x: x + x @ params["kernel"], batch["x"]
        )
        return jnp.sum(made, axis=-1), jnp.ones(len(made))

    assert flops_of({"kernel": jnp.eye(16)}, loss, VECTORS) is None
    assert "it multiplies in a loop (while_loop)" in caplog.text


def test_the_same_shapes_are_traced_once():
    traces = []

    def loss(params, batch, rngs, is_training):
        traces.append(batch["x"].shape)
        return two_products(params, batch, rngs, is_training)

    plan = TrainingPlan(
        Deployer(devices=jax.devices()[:1]),
        loss_fn=loss,
        params=two_kernels(),
        optimizer=optax.sgd(0.1),
        batch=VECTORS,
        global_batch_size=ROWS,
    )

    assert [plan.model_flops(), plan.model_flops()] == [5 * ONE, 5 * ONE]
    assert traces == [(ROWS, 16)]


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", None),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("cpu", None),
    ],
)
def test_a_devices_peak_is_known_by_its_exact_kind(kind, peak):
    assert peak_tflops(kind) == peak


def test_mfu_is_the_devices_share_of_what_they_could_compute():
    class Kind:
        device_kind = "TPU v4"

    assert utilization(4 * 27.5e12, 2.0, [Kind, Kind]) == {"tflops_per_device": 27.5, "mfu": 0.1}


class Device:
    """What JAX tells of a device."""

    def __init__(self, stats, process_index=0):
        self.process_index = process_index
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(
    ("devices", "peak"),
    [
        ([Device({"peak_bytes_in_use": 3}), Device({"peak_bytes_in_use": 5})], 5),
        ([Device({"peak_bytes_in_use": 3}), Device({"peak_bytes_in_use": 5}, 1)], 3),
        ([Device({"bytes_in_use": 3})], None),
        ([Device(None)], None),
        ([], None),
    ],
)
def test_peak_memory_is_the_largest_of_this_process_devices(devices, peak):
    assert peak_memory_bytes(devices) == peak


class Recorder(Callback):
    def __init__(self):
        self.logs = []

    def on_log(self, record):
        self.logs.append(record)


def test_a_training_on_cpus_logs_tflops_and_no_mfu():
    trainer = Trainer(
        Deployer(devices=jax.devices()[:2]),
        collate_fn=lambda rows: {"x": np.stack(rows)},
        loss_fn=two_products,
        params={key: np.full(x.shape, 0.1, np.float32) for key, x in two_kernels().items()},
        optimizer=optax.sgd(0.01),
        global_batch_size=ROWS,
    )
    recorder = Recorder()

    trainer.fit(
        list(np.ones((4 * ROWS, 16), np.float32)),
        num_epochs=1,
        callbacks=[recorder],
        log_every_steps=2,
    )

    record = recorder.logs[-1]
    per_second = record["tokens_per_second"] / ROWS  # each row weighs one
    assert record["tflops_per_device"] == pytest.approx(5 * ONE * per_second / 2 / 1e12)
    assert "mfu" not in record
    assert record.get("peak_memory_bytes") == peak_memory_bytes(trainer.devices)
    # Of the first two steps the second alone is timed: the first compiled.
    first = recorder.logs[0]
    assert first["step_seconds"] == first["steps_seconds"] > 0
