"""Trainings on a GPU: the processor's losses, the memory that was planned, bits that repeat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.progress import peak_memory_bytes
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model

pytestmark = pytest.mark.gpu

PROJECT = Path(__file__).resolve().parents[2]
LLAMA = find_model("llama")
LENGTH, VOCAB = 128, 512
CONFIG = LLAMA.Config.from_hugging_face(
    {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512,
     "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
     "max_position_embeddings": LENGTH}
)  # fmt: skip


class Losses(Callback):
    """What each logged step says."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, record: Any) -> None:
        self.found.append(float(record["loss"]))


def collate(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {"ids": np.stack([row["ids"] for row in rows])}


def examples(count: int, length: int = LENGTH) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    # Each token tells the next: there is something to learn.
    starts = random.integers(0, VOCAB, (count, 1))
    return [{"ids": row.astype(np.int32)} for row in (starts + 7 * np.arange(length)) % VOCAB]


def loss_of(config: Any) -> Any:
    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        logits = LLAMA.apply(config, params, batch["ids"][:, :-1])
        return cross_entropy(logits, batch["ids"][:, 1:])

    return loss_fn


def plan_of(deployer: Deployer, config: Any = CONFIG, **options: Any) -> TrainingPlan:
    params = LLAMA.abstract_params(config)
    batch = {"ids": jax.ShapeDtypeStruct((8, options.pop("length", LENGTH)), np.int32)}
    settings = {"global_batch_size": 16, "per_device_batch_size": 8, "max_grad_norm": 1.0}
    return TrainingPlan(
        deployer, loss_fn=loss_of(config), params=params, optimizer=optax.adamw(3e-3),
        batch=batch, **(settings | options),
    )  # fmt: skip


def train(
    deployer: Deployer, *, config: Any = CONFIG, length: int = LENGTH, **options: Any
) -> tuple[list[float], Any]:
    plan = plan_of(deployer, config, length=length, **options)
    trainer = Trainer.from_plan(
        plan, collate_fn=collate, params=LLAMA.init_params(CONFIG, jax.random.key(0))
    )
    losses = Losses()
    trainer.fit(examples(64, length), max_steps=12, log_every_steps=1, callbacks=[losses])
    return losses.found, jax.tree.map(np.asarray, trainer.state["params"])


def test_losses_in_float32_are_the_processors(gpu, cpu):
    found, _ = train(Deployer(devices=[gpu], matmul_precision="highest"))

    expected, _ = train(Deployer(devices=[cpu]))
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


# The model sees one token less: Triton's kernel attends where lengths are odd, else cuDNN's.
BY_BOTH_KERNELS = pytest.mark.parametrize("length", [LENGTH, LENGTH - 1], ids=["triton", "cudnn"])


@BY_BOTH_KERNELS
def test_a_training_in_bfloat16_learns_as_well(length, gpu, cpu):
    config = CONFIG.updated({"dtype": "bfloat16", "remat": "full"})

    found, _ = train(Deployer(devices=[gpu]), config=config, length=length)

    expected, _ = train(Deployer(devices=[cpu]), length=length)
    np.testing.assert_allclose(found, expected, rtol=0.05)


@BY_BOTH_KERNELS
def test_a_training_repeats_to_the_last_bit(length, gpu):
    config = CONFIG.updated({"dtype": "bfloat16"})
    first, expected = train(Deployer(devices=[gpu]), config=config, length=length)
    second, found = train(Deployer(devices=[gpu]), config=config, length=length)

    assert first == second
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_stopped_training_goes_on_bit_for_bit(gpu, tmp_path):
    params = LLAMA.init_params(CONFIG, jax.random.key(0))

    def fit(steps: int, **options: Any) -> Any:
        plan = plan_of(Deployer(devices=[gpu]))
        trainer = Trainer.from_plan(plan, collate_fn=collate, params=params)
        trainer.fit(examples(64), max_steps=steps, **options)
        return jax.tree.map(np.asarray, trainer.state["params"])

    expected = fit(9)
    fit(5, checkpointer=Checkpointer(tmp_path), save_every_steps=5)
    found = fit(9, checkpointer=Checkpointer(tmp_path), save_every_steps=5)

    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("base_dtype", [None, "int8", "nf4"])
def test_factors_beside_each_kind_of_base_learn_as_on_the_processor(base_dtype, gpu, cpu):
    def lora_losses(device: jax.Device) -> list[float]:
        deployer = Deployer(devices=[device], matmul_precision="highest")
        batch = {"ids": jax.ShapeDtypeStruct((2, LENGTH), np.int32)}
        lora = plan_lora(
            LLAMA.abstract_params(CONFIG), loss_of(CONFIG), batch, None, False,
            rank=8, alpha=16.0, targets="layers", base_dtype=base_dtype,
        )  # fmt: skip
        return train(deployer, lora=lora)[0]

    found = lora_losses(gpu)

    assert found[-1] < found[0]
    np.testing.assert_allclose(found, lora_losses(cpu), rtol=2e-3)


def measure_memory(remat: str) -> None:
    """Print what a training in bfloat16 is planned to take and takes, in bytes."""
    device = jax.devices()[0]
    changes = {"dtype": "bfloat16", "remat": remat, "num_hidden_layers": 8}
    config = CONFIG.updated({**changes, "max_position_embeddings": 2048})
    plan = plan_of(Deployer(devices=[device]), config, length=2049)
    planned = plan.memory().total
    trainer = Trainer.from_plan(
        plan, collate_fn=collate, params=LLAMA.init_params(config, jax.random.key(0))
    )
    trainer.fit(examples(16, 2049), max_steps=1)
    jax.block_until_ready(trainer.state["params"])
    print(planned, peak_memory_bytes([device]))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_training_takes_the_memory_that_was_planned(remat):
    """In a process of its own, whose peak is this training's."""
    program = f"from tests.gpu.test_training import *; measure_memory({remat!r})"

    said = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout

    planned, seen = map(int, said.split())
    assert 0.9 < seen / planned < 1.15
