"""A mesh axis `context` that spans two processes: both read the same rows, one step is taken."""

import jax
import pytest

STEP = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from redco_flow import Deployer, Trainer
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model

def first_step(deployer):
    llama = find_model("llama")
    config = llama.Config.from_hugging_face({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "bos_token_id": 2, "eos_token_id": 1,
    })

    def loss(params, batch, rngs, is_training):
        logits = llama.apply(config, params, batch["ids"])
        return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])

    trainer = Trainer(
        deployer,
        collate_fn=lambda rows: {"ids": np.stack(rows)},
        loss_fn=loss,
        params=llama.init_params(config, jax.random.key(0)),
        optimizer=optax.sgd(1.0),
        global_batch_size=4,
    )
    examples = list(np.random.default_rng(0).integers(0, 64, (4, 13)).astype(np.int32))
    with trainer.read_batches(examples, 0, 1) as batches:
        (batch,) = trainer.device_batches(batches)
        metrics = jax.device_get(trainer.advance(batch))
    return {name: float(metrics[name]) for name in ("total", "weight", "grad_norm")}
"""
PROCESS = """
import sys
rank, num_processes, port = map(int, sys.argv[1:])
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
deployer = Deployer(num_context_shards=4)
share = deployer.data_process
print(json.dumps([[share.index, share.count], first_step(deployer)]), flush=True)
"""


@pytest.mark.slow
def test_context_shards_of_two_processes_take_the_step_of_one_device(run_ranks):
    """Four span both processes, which read the same rows."""
    names: dict = {}
    exec(STEP, names)
    expected = names["first_step"](names["Deployer"](devices=jax.devices()[:1]))

    for share, numbers in run_ranks(STEP + PROCESS, 2, 2):
        assert share == [0, 1]
        assert numbers == pytest.approx(expected, rel=1e-5)
