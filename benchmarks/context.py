"""Memory of attention over sequences that are split, against one device that holds them whole.

    python benchmarks/context.py [--sequence-length 8192] [--num-context-shards 4]

Compiles causal attention with grouped queries, forward and backward, scanned over layers that are
rematerialised, for CPU devices and from shapes alone, and asks the compiler for each device's
temporaries. On one device the scores are formed whole; over context shards keys and values go
round a ring and scores exist for one chunk of queries and keys at a time. Prints one JSON line per
number of shards from 1, the one asked for last; `ratio` is one device's bytes against theirs.
"""

import argparse
import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow import Deployer
from redco_flow.models.attention.ring import attend_sequence
from redco_flow.models.config import AttentionConfig

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


if __name__ == "__main__":
    main()
