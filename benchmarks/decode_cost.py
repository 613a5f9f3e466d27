"""Bytes of memory that decoding a token moves ÷ the weights and the filled cache, each once.

    python benchmarks/decode_cost.py [--target v5p|v5e|v6e|a100|h100] [--layers 32] [--list 10]

Compiles greedy generation of a LLaMA-3-8B (batch 8, prompt 1024, 256 new tokens, bfloat16) ahead
of time for devices that are not there: by libtpu (`pip install libtpu==0.0.42.1`), or by JAX's CUDA
plugin (see `compile_targets.py`). `hbm_bytes` are what the optimised program moves for a token
(`step/program.py`), the mean over all of them; `weights_bytes` are the parameters in bfloat16 but
for the embedding, of which a token reads a row; `cache_bytes` are the keys and values of the prompt
and the tokens so far, the mean. All are of one device: 8B does not fit one v5e or v6e chip, which
have 8 and 4 model shards. `--list` shows what moves most in each segment. Prints one JSON line
last; its `ratio` is the goal's: at most 1.25.
"""

import argparse
import json
import math
import time
from functools import partial
from typing import Any

import compile_targets

from redco_flow.engine.step.program import Loop, Program

# The target of a chip, and how many of them hold the model.
TARGETS = {"v5p": 1, "v5e": 8, "v6e": 4, "a100": 1, "h100": 1}
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    },
    "tiny": {
        "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1536,
    },
}  # fmt: skip


def compile_decoding(options: argparse.Namespace) -> tuple[Any, dict[str, int]]:
    """Return the compiled program, and what a device holds of weights and cache."""
    import jax
    import jax.numpy as jnp

    from redco_flow import Deployer
    from redco_flow.engine.step.compiled import on_unpadded_params
    from redco_flow.models.find import find_model
    from redco_flow.models.generation.generate import generate

    num_shards = TARGETS[options.target]
    devices = compile_targets.find_chips(options.target, num_shards)
    deployer = Deployer(num_shards, devices=devices)
    module = find_model("llama")
    shape = SHAPES[options.shape] | (
        {"num_hidden_layers": options.layers} if options.layers else {}
    )
    config = module.Config.from_hugging_face(
        {"model_type": "llama", "tie_word_embeddings": False, **shape}
    ).updated({"dtype": "bfloat16"})
    params = module.abstract_params(config)
    rows = jax.ShapeDtypeStruct(
        (options.batch, options.prompt), jnp.int32, sharding=deployer.rows_sharding()
    )
    rules = deployer.get_sharding_rules(params, partial(module.apply, config), rows)
    storage = deployer.params_storage(params, rules)
    search = on_unpadded_params(
        partial(generate, module, config, max_new_tokens=options.new_tokens), storage
    )

    def run(params: Any, ids: Any, mask: Any) -> Any:
        return search(storage.unpad(params), ids, mask)

    stored = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        storage.abstract_stored,
        storage.stored_sharding,
    )
    compiled = jax.jit(deployer.on_mesh(run)).lower(stored, rows, rows).compile()
    read = [leaf for name, leaf in stored.items() if name != "embedding"]
    held = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(read)]
    decoder = config.core
    groups = max(decoder.attention.num_kv_heads // num_shards, 1)
    slot = 2 * 2 * decoder.num_layers * options.batch * groups * decoder.attention.head_dim
    return compiled, {"weights_bytes": 2 * sum(held), "slot_bytes": slot}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    start = time.process_time()
    compiled, held = compile_decoding(options)
    seconds = time.process_time() - start
    loops = Program(compiled.as_text()).open_loops()
    total, position = 0, 0
    for loop in loops:
        total += loop.num_bytes * (loop.limit - position)
        position = loop.limit
        print_largest(loop, options.list)
    if position != options.new_tokens:
        raise SystemExit(f"the loops end at token {position}, not at {options.new_tokens}.")
    weights, filled = held["weights_bytes"], options.prompt + (options.new_tokens + 1) / 2
    cache = filled * held["slot_bytes"]
    memory = compiled.memory_analysis()
    return {
        "target": options.target,
        "shape": options.shape,
        "model_shards": TARGETS[options.target],
        "segments": [loop.limit for loop in loops],
        "hbm_bytes": round(total / position),
        "weights_bytes": weights,
        "cache_bytes": round(cache),
        "temp_bytes": int(memory.temp_size_in_bytes),
        "compile_cpu_seconds": round(seconds, 1),
        "ratio": round(total / position / (weights + cache), 4),
    }


def print_largest(loop: Loop, count: int) -> None:
    if count:
        print(f"to token {loop.limit}: {loop.num_bytes / 1e6:.1f} MB for each")
    for one in sorted(loop.moved, key=lambda one: -one.num_bytes * one.count)[:count]:
        print(f"  {one.count:3} x {one.num_bytes / 1e6:9.3f} MB  {one.instruction.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), default="v5p")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, help="other than the shape's")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--list", type=int, default=0, metavar="N", help="what moves most")
    options = parser.parse_args()
    compile_targets.set_environment(compile_targets.kind_of(options.target), 1)
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
