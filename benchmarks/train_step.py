"""Our trainer's whole loop against a hand-written JAX step, upstream Redco and torch.

    python benchmarks/train_step.py [--model gpt2|t5|llama] [--num-model-shards 1|2|4]
        [--redco-python redco-env/bin/python] [--rounds 7] [--steps 8]

All contenders train models of one config on batches of one size and take turns, so that a busy
machine slows all of them. Ours is `Trainer.fit`: shuffling, collating, transfers, per-example keys,
token mean, gradient norm, logging. The bare loop is what one would write by hand: one jitted,
donated step of our model on a batch that is on the device already, nothing fetched before its end
(one model shard only). `ratio_torch` is against transformers' eager torch model on the same cores
(extra `reference`); `ratio_redco` needs `--redco-python` (see `step_redco.py`) and is left out
without it. Prints one JSON line last; ratios are medians over rounds of our tokens/s over theirs.
With `gemm_*` stand the rates of float32 products and which share of it each step's own products
(six operations per parameter and token) reach.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--model", choices=("gpt2", "t5", "llama"), default="t5")
PARSER.add_argument("--num-model-shards", type=int, choices=(1, 2, 4), default=1)
PARSER.add_argument("--redco-python", help="a Python with redco==0.4.23, transformers==4.57.6")
PARSER.add_argument("--rounds", type=int, default=7)
PARSER.add_argument("--steps", type=int, default=8, help="optimizer steps a round")
OPTIONS = PARSER.parse_args()
os.environ["JAX_PLATFORMS"] = "cpu"
if OPTIONS.num_model_shards > 1:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={OPTIONS.num_model_shards}"

import jax
import jax.numpy as jnp
import optax
from step_models import BATCH, CONFIGS, collate, make_examples, tokens_per_step

from redco_flow import Deployer, Trainer
from redco_flow.engine.step.loss import IGNORED_LABEL, cross_entropy
from redco_flow.models.find import find_model

MODULE = find_model(OPTIONS.model)
CONFIG = MODULE.Config.from_hugging_face({"model_type": OPTIONS.model, **CONFIGS[OPTIONS.model]})
COLLATE = partial(collate, OPTIONS.model)


def loss_fn(params, batch, rngs, is_training):
    """The summed cross-entropy and the number of tokens of each example."""
    if OPTIONS.model == "t5":
        mask = jnp.ones_like(batch["input_ids"])
        logits = MODULE.apply(CONFIG, params, batch["input_ids"], mask, batch["decoder_input_ids"])
        return cross_entropy(logits, batch["labels"])
    # The labels move, not the logits: a slice of those would be a copy of the largest array.
    labels = jnp.pad(batch["labels"][:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED_LABEL)
    return cross_entropy(MODULE.apply(CONFIG, params, batch["input_ids"]), labels)


class BareLoop:
    """Hand-written steps on a batch that stays on the device."""

    def __init__(self, params, examples) -> None:
        optimizer = optax.adamw(1e-3)

        @partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            def mean_loss(params):
                totals, weights = loss_fn(params, batch, None, True)
                return totals.sum() / weights.sum()

            loss, gradients = jax.value_and_grad(mean_loss)(state[0])
            updates, opt_state = optimizer.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt_state), loss

        self.step, self.batch = step, jax.device_put(COLLATE(examples))
        self.state = (jax.tree.map(jnp.copy, params), optimizer.init(params))

    def run(self, num_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - start


class OurLoop:
    """`Trainer.fit`, one epoch more each time."""

    def __init__(self, params, examples) -> None:
        deployer = Deployer(OPTIONS.num_model_shards)
        sample = COLLATE(examples[:2])
        schedule = optax.constant_schedule(1e-3)
        self.trainer = Trainer(
            deployer,
            collate_fn=COLLATE,
            loss_fn=loss_fn,
            params=params,
            optimizer=optax.adamw(schedule),
            sharding_rules=deployer.get_sharding_rules(params, loss_fn, sample, None, True),
            lr_schedule=schedule,
            global_batch_size=BATCH[OPTIONS.model],
        )
        self.examples, self.epochs = examples, 0

    def run(self, num_steps: int) -> float:
        assert len(self.examples) == num_steps * BATCH[OPTIONS.model]
        self.epochs += 1
        start = time.perf_counter()
        self.trainer.fit(self.examples, num_epochs=self.epochs, log_every_steps=10)
        jax.block_until_ready(self.trainer.state["params"])
        return time.perf_counter() - start


class RedcoLoop:
    """Upstream's loop in its own environment, on demand."""

    def __init__(self, python: str) -> None:
        words = [OPTIONS.model, str(OPTIONS.num_model_shards), str(OPTIONS.steps)]
        script = str(Path(__file__).with_name("step_redco.py"))
        self.process = subprocess.Popen(
            [python, script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, num_steps: int) -> float:
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        while True:
            line = self.process.stdout.readline()
            if not line:
                sys.exit("upstream Redco's process ended; see its messages above.")
            try:
                return float(line)
            except ValueError:
                continue  # what it says to people


def gemm_rate(size: int = 1024, repeats: int = 20) -> float:
    """GFLOP/s of a float32 product of two square matrices."""
    a = jax.random.uniform(jax.random.key(0), (size, size))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    start = time.perf_counter()
    for _ in range(repeats):
        b = product(a, a)
    b.block_until_ready()
    return 2 * size**3 * repeats / (time.perf_counter() - start) / 1e9


def main() -> None:
    params = MODULE.init_params(CONFIG, jax.random.key(0))
    examples = make_examples(OPTIONS.model, OPTIONS.steps)
    loops = {"ours": OurLoop(params, examples)}
    if OPTIONS.num_model_shards == 1:
        loops["bare_jax"] = BareLoop(params, examples[: BATCH[OPTIONS.model]])
        if importlib.util.find_spec("torch"):
            from step_torch import TorchLoop

            loops["torch"] = TorchLoop(OPTIONS.model, examples[: BATCH[OPTIONS.model]])
    if OPTIONS.redco_python:
        loops["redco"] = RedcoLoop(OPTIONS.redco_python)
    for loop in loops.values():
        loop.run(OPTIONS.steps)  # compiles
    seconds = [
        {name: loop.run(OPTIONS.steps) for name, loop in loops.items()}
        for _ in range(OPTIONS.rounds)
    ]
    print(json.dumps(figures(params, seconds)))


def figures(params, seconds: list[dict[str, float]]) -> dict[str, object]:
    tokens = tokens_per_step(OPTIONS.model) * OPTIONS.steps
    medians = {name: statistics.median(one[name] for one in seconds) for name in seconds[0]}
    found: dict[str, object] = {
        "model": OPTIONS.model,
        "num_model_shards": OPTIONS.num_model_shards,
        "tokens_per_second": round(tokens / medians["ours"]),
    }
    for name in medians:
        if name != "ours":
            ratio = statistics.median(one[name] / one["ours"] for one in seconds)
            found[f"ratio_{name}"] = round(ratio, 3)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    gflop = 6 * num_parameters * tokens / 1e9
    rates = {"jax": gemm_rate()}
    if "torch" in medians:
        from step_torch import gemm_rate as torch_gemm_rate

        rates["torch"] = torch_gemm_rate()
        found["torch_gemm_share"] = round(gflop / medians["torch"] / rates["torch"], 2)
    found["our_gemm_share"] = round(gflop / medians["ours"] / rates["jax"], 2)
    found |= {f"{name}_gemm_gflops": round(rate) for name, rate in rates.items()}
    return found | {"rounds": OPTIONS.rounds}


if __name__ == "__main__":
    main()
