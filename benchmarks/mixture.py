"""A mixture's feed-forward layer: the chosen experts alone, all of them, and `jax.lax.ragged_dot`.

    python benchmarks/mixture.py [--tokens 4096 64 1] [--rounds 5]

One layer of a small Mixtral's proportions (512 wide, 1792 units, 8 experts of which 2 are chosen),
float32, forward and with all gradients. `all` computes every expert for every token and weighs
those that were not chosen by zero; `ragged_dot` sorts tokens by expert and leaves the products to
the compiler. All take turns, so that a busy machine slows each of them. Prints one JSON line per
number of tokens, the largest last: medians in milliseconds, the gradients' temporary memory in MiB,
and ratios of `all` to the chosen alone.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from redco_flow.models.feed_forward.experts import choose_experts, mix_experts, plan_dispatch
from redco_flow.models.layer_config import MixtureConfig
from redco_flow.models.transformer.blocks import activate

WIDTH, UNITS, EXPERTS, CHOSEN = 512, 1792, 8, 2
CONFIG = MixtureConfig(EXPERTS, CHOSEN, UNITS, "silu")


def mix_all(x: jax.Array, router_logits: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
    """Every expert for every token."""
    experts, weights = choose_experts(CONFIG, router_logits)
    shares = jnp.sum(jax.nn.one_hot(experts, EXPERTS) * weights[..., None], axis=-2)
    projected = jnp.einsum("nd,edgf->negf", x, wi)
    return jnp.einsum("nef,efd->nd", activate(projected, "silu") * shares[..., None], wo)


def mix_ragged(x: jax.Array, router_logits: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
    """Sorted by expert, in products that the compiler knows as ragged."""
    experts, weights = choose_experts(CONFIG, router_logits)
    dispatch = plan_dispatch(experts.reshape(-1), EXPERTS)
    sizes = jnp.diff(dispatch.ends, prepend=0)
    rows = dispatch.sorted_by_expert(jnp.repeat(x, CHOSEN, axis=0))
    projected = jax.lax.ragged_dot(rows, wi.reshape(EXPERTS, WIDTH, -1), sizes)
    inner = activate(projected.reshape(-1, 2, UNITS), "silu")
    inner = inner * dispatch.sorted_by_expert(weights.reshape(-1, 1))
    outer = dispatch.sorted_by_token(jax.lax.ragged_dot(inner, wo, sizes))
    return jnp.sum(outer.reshape(-1, CHOSEN, WIDTH), axis=1)


WAYS = {"chosen": partial(mix_experts, CONFIG), "all": mix_all, "ragged_dot": mix_ragged}


def draw(num_tokens: int) -> list[jax.Array]:
    shapes = [
        (num_tokens, WIDTH), (num_tokens, EXPERTS), (EXPERTS, WIDTH, 2, UNITS),
        (EXPERTS, UNITS, WIDTH),
    ]  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def compiled(way: Any, operands: list[jax.Array]) -> dict[str, Any]:
    def total(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(way(*operands)))

    functions = {"forward": way, "gradients": jax.grad(total, argnums=(0, 1, 2, 3))}
    return {name: jax.jit(f).lower(*operands).compile() for name, f in functions.items()}


def seconds(program: Any, operands: list[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    return time.perf_counter() - start


def measure(num_tokens: int, num_rounds: int) -> dict[str, Any]:
    operands = draw(num_tokens)
    programs = {
        (way, kind): program
        for way, function in WAYS.items()
        for kind, program in compiled(function, operands).items()
    }
    for program in programs.values():
        seconds(program, operands)
    turns = [
        {name: seconds(program, operands) for name, program in programs.items()}
        for _ in range(num_rounds)
    ]
    found: dict[str, Any] = {"tokens": num_tokens}
    for way, kind in programs:
        median = statistics.median(turn[way, kind] for turn in turns)
        found[f"{way}_{kind}_ms"] = round(1e3 * median, 2)
    for way in WAYS:
        memory = programs[way, "gradients"].memory_analysis()
        found[f"{way}_mib"] = round(memory.temp_size_in_bytes / 2**20)
    for kind in ("forward", "gradients"):
        ratio = statistics.median(turn["all", kind] / turn["chosen", kind] for turn in turns)
        found[f"ratio_all_{kind}"] = round(ratio, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for num_tokens in sorted(options.tokens):
        found = measure(num_tokens, options.rounds)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
