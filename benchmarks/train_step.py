"""Our trainer's whole loop against a hand-written JAX step of the same T5.

    python benchmarks/train_step.py [--rounds 7] [--steps 12]

The bare loop is what one would write by hand: one jitted, donated step (same model, loss, AdamW)
on a batch that is on the device already, nothing fetched before its end. Ours is `Trainer.fit`:
shuffling, collating, padding, transfers, per-example dropout keys, masked token mean, gradient
norm, logging. Both take turns in one process, so that a busy machine slows both. Prints one JSON
line last; `ratio_bare_jax` is the median over rounds of our tokens/s over the bare loop's.
"""

import argparse
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_flow import Deployer, Trainer
from redco_flow.models import t5
from redco_flow.models.t5_config import T5Config

BATCH, SOURCE, TARGET = 16, 64, 32
CONFIG = T5Config(
    vocab_size=4096, d_model=256, d_kv=32, num_heads=8, d_ff=1024, num_layers=4,
    num_decoder_layers=4, dropout_rate=0.0,
)  # fmt: skip


def make_examples(num_examples: int) -> list[dict[str, np.ndarray]]:
    """Random token ids of full length, so that both loops compute the same tokens."""
    random = np.random.default_rng(0)
    return [
        {
            "source": random.integers(3, CONFIG.vocab_size, SOURCE, dtype=np.int32),
            "target": random.integers(3, CONFIG.vocab_size, TARGET, dtype=np.int32),
        }
        for _ in range(num_examples)
    ]


def collate(examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    target = np.stack([example["target"] for example in examples])
    return {
        "input_ids": np.stack([example["source"] for example in examples]),
        "decoder_input_ids": np.pad(target[:, :-1], ((0, 0), (1, 0))),
        "labels": target,
    }


def per_example_losses(params, batch, rngs, is_training):
    mask = jnp.ones_like(batch["input_ids"])
    logits = t5.apply(CONFIG, params, batch["input_ids"], mask, batch["decoder_input_ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.sum(-1), jnp.full(losses.shape[0], losses.shape[1], jnp.float32)


def make_bare_loop(params, examples):
    """Return a function that runs n hand-written steps and returns the seconds they took."""
    optimizer = optax.adamw(1e-3)

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        def mean_loss(params):
            totals, weights = per_example_losses(params, batch, None, True)
            return totals.sum() / weights.sum()

        loss, gradients = jax.value_and_grad(mean_loss)(state[0])
        updates, opt_state = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    state = (jax.tree.map(jnp.copy, params), optimizer.init(params))
    batch = jax.device_put(collate(examples[:BATCH]))

    def run(num_steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(num_steps):
            state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        return time.perf_counter() - start

    return run


def make_trainer_loop(params, num_steps):
    """Return a function that trains one more epoch of `num_steps` steps and times it."""
    examples = make_examples(BATCH * num_steps)
    schedule = optax.constant_schedule(1e-3)
    trainer = Trainer(
        Deployer(devices=jax.devices()[:1]),
        collate_fn=collate,
        loss_fn=per_example_losses,
        params=params,
        optimizer=optax.adamw(schedule),
        lr_schedule=schedule,
        global_batch_size=BATCH,
    )
    epochs = 0

    def run() -> float:
        nonlocal epochs
        epochs += 1
        start = time.perf_counter()
        trainer.fit(examples, num_epochs=epochs, log_every_steps=10)
        jax.block_until_ready(trainer.state)
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps a round")
    options = parser.parse_args()
    params = jax.jit(partial(t5.init_params, CONFIG))(jax.random.key(0))
    bare = make_bare_loop(params, make_examples(BATCH))
    ours = make_trainer_loop(params, options.steps)
    bare(options.steps)
    ours()  # both have compiled now
    bare_seconds, our_seconds = [], []
    for _ in range(options.rounds):
        bare_seconds.append(bare(options.steps))
        our_seconds.append(ours())
    tokens = options.steps * BATCH * (SOURCE + TARGET)
    ratios = [theirs / own for theirs, own in zip(bare_seconds, our_seconds, strict=True)]
    print(f"bare JAX  {tokens / statistics.median(bare_seconds):8.0f} tokens/s")
    print(f"ours      {tokens / statistics.median(our_seconds):8.0f} tokens/s")
    print(
        json.dumps(
            {
                "model": "t5",
                "tokens_per_second": round(tokens / statistics.median(our_seconds)),
                "ratio_bare_jax": round(statistics.median(ratios), 3),
                "rounds": options.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
