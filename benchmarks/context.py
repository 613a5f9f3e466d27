"""Memory of attention over sequences that are split, and what splitting parameters costs there.

    python benchmarks/context.py [--sequence-length 8192] [--num-context-shards 4]

Compiles causal attention with grouped queries, forward and backward, scanned over layers that are
rematerialised, for CPU devices and from shapes alone, and asks the compiler for each device's
temporaries. On one device the scores are formed whole; over context shards keys and values go
round a ring and scores exist for one chunk of queries and keys at a time. Prints one JSON line per
number of shards from 1, the one asked for last; `ratio` is one device's bytes against theirs.

Then a small LLaMA's step, with a copy of the parameters on each context shard and with parameters
split over them (`fsdp_over_context`): bytes of parameters, gradients and optimizer state on a
device, and bytes that it sends in a step, by kind of collective. `reduced_as_scattered` counts an
all-reduce whose result is split as the reduce-scatter that TPUs and GPUs make of it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.engine.traffic
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.attention.ring import attend_sequence
from redco_flow.models.find import find_model
from redco_flow.models.layer_config import AttentionConfig
from tests.engine.traffic import read_collectives

llama = find_model("llama")

BATCH, LAYERS = 1, 2
CONFIG = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64, scale=64**-0.5)


def temporaries(sequence_length: int, num_context_shards: int) -> int:
    """Return the bytes of temporaries on each device."""
    devices = jax.devices()[:num_context_shards]
    deployer = Deployer(num_context_shards=num_context_shards, devices=devices)
    split = NamedSharding(deployer.mesh, PartitionSpec(None, "context"))
    query, key = (
        jax.ShapeDtypeStruct(
            (BATCH, sequence_length, heads, CONFIG.head_dim), jnp.float32, sharding=split
        )
        for heads in (CONFIG.num_heads, CONFIG.num_kv_heads)
    )

    def layers(query, key, value):
        @jax.checkpoint
        def layer(query, _):
            return attend_sequence(CONFIG, query, key, value), None

        return jax.lax.scan(layer, query, None, length=LAYERS)[0]

    def gradients(query, key, value, cotangent):
        return jax.vjp(layers, query, key, value)[1](cotangent)

    jitted = jax.jit(deployer.on_mesh(gradients), out_shardings=split)
    compiled = jitted.lower(query, key, key, query).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


MODEL = llama.Config.from_hugging_face(
    {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "bos_token_id": 2, "eos_token_id": 1,
    }
)  # fmt: skip


def step_bytes(num_context_shards: int, *, over_context: bool) -> dict[str, object]:
    """Return what a device holds and sends in a training step of one row of 1024 tokens."""
    deployer = Deployer(
        num_context_shards=num_context_shards,
        fsdp_over_context=over_context,
        devices=jax.devices()[:num_context_shards],
    )

    def loss_fn(params, batch, rngs, is_training):
        logits = llama.apply(MODEL, params, batch["ids"])
        return cross_entropy(logits, batch["labels"])

    params = llama.abstract_params(MODEL)
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    batch = {"ids": ids, "labels": ids}
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=1,
    )
    sent: dict[str, float] = {}
    for one in read_collectives(plan.compile(batch).as_text()):
        sent[one.kind] = sent.get(one.kind, 0) + one.wire_bytes
    reduced = sent.get("all-reduce", 0)
    return {
        "num_context_shards": num_context_shards,
        "fsdp_over_context": over_context,
        "state_bytes": plan.bytes_per_device,
        "wire_bytes": sent,
        "reduced_as_scattered": reduced / 2 if over_context else reduced,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--num-context-shards", type=int, default=4, choices=(1, 2, 4, 8))
    options = parser.parse_args()
    whole = temporaries(options.sequence_length, 1)
    for count in (1, 2, 4, 8):
        if count <= options.num_context_shards:
            found = whole if count == 1 else temporaries(options.sequence_length, count)
            record = {
                "sequence_length": options.sequence_length,
                "num_context_shards": count,
                "temp_bytes": found,
                "ratio": round(whole / found, 2),
            }
            print(json.dumps(record), flush=True)
    if options.num_context_shards > 1:
        for over in (False, True):
            record = step_bytes(options.num_context_shards, over_context=over)
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
