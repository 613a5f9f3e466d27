"""The loss in chunks beside the loss of whole logits, compiled for one TPU chip or run on this CPU.

    python benchmarks/loss_cost.py [--target v5p | cpu] [--tokens 8192] [--chunks 1 16]

LLaMA-3-8B's head (width 4096, vocabulary 128256) over one row, bfloat16, with the gradients of
head and hidden states; `cpu` runs a head of width 512 and vocabulary 32000 and takes the time.
Compiled ahead of time by libtpu (`pip install libtpu==0.0.42.1`). Temporaries are XLA's; the bytes
of HBM are what the optimised program's instructions read and write, a loop's as often as it turns.
Prints a JSON line per number of chunks, all of them last.
"""

import argparse
import json
import math
import re
import time
from functools import partial
from typing import Any

import compile_targets

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}
WIDTH, VOCABULARY = 4096, 128256
CPU_WIDTH, CPU_VOCABULARY, REPEATS = 512, 32000, 3

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+))\[([\d,]*)\](\{[^}]*\})?")
_LOOP = re.compile(r"body=%?([\w.\-]+)")
# They move nothing.
_FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "after-all",
}  # fmt: skip


def array_bytes(text: str) -> int:
    """Return the bytes of the arrays of a type that lie in HBM: S(1) is on the chip."""
    found = 0
    for _, bits, dims, layout in _ARRAY.findall(text):
        if "S(1)" not in layout:
            found += math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8
    return found


def moved_bytes(text: str, num_turns: int) -> int:
    """Return what a program reads and writes, the bodies of its loops `num_turns` times."""
    types = {m[1]: m[2] for line in text.splitlines() if (m := _INSTRUCTION.match(line))}
    moved: dict[str, int] = {}
    loops: dict[str, list[str]] = {}
    current = entry = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head[2]
            moved[current], loops[current] = 0, []
            entry = current if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            _, result, operation, rest = found.groups()
            if operation == "while":
                loops[current] += _LOOP.findall(rest)
            if operation not in _FREE and not operation.endswith("-done"):
                operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
                moved[current] += array_bytes(result)
                moved[current] += sum(array_bytes(types.get(name, "")) for name in operands)

    def total(name: str) -> int:
        return moved[name] + num_turns * sum(map(total, loops[name]))

    return total(entry)


def make_step(num_chunks: int) -> Any:
    """Return (head, hidden, labels) -> the mean loss, and the gradients of head and hidden."""
    import jax

    from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
    from redco_flow.models.transformer.head import score

    def loss(head: Any, hidden: Any, labels: Any) -> Any:
        totals, weights = chunked_cross_entropy(
            partial(score, None), head, hidden, labels, num_chunks=num_chunks
        )
        return totals.sum() / weights.sum()

    return jax.value_and_grad(loss, (0, 1))


def inputs(width: int, vocabulary: int, num_tokens: int, deployer: Any) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    from redco_flow.models.transformer.head import Head

    whole = deployer.named_sharding()
    array = partial(jax.ShapeDtypeStruct, sharding=whole)
    kernel = array((width, vocabulary), jnp.bfloat16)
    hidden = array((1, num_tokens, width), jnp.bfloat16)
    return Head(kernel, None), hidden, array((1, num_tokens), jnp.int32)


def compile_for_chip(target: str, num_tokens: int, num_chunks: int) -> dict[str, float]:
    import jax
    from jax.experimental import topologies

    from redco_flow import Deployer

    devices = topologies.get_topology_desc(TOPOLOGIES[target], platform="tpu").devices
    deployer = Deployer(devices=devices[:1])
    # Only the loops over chunks are loops.
    step = jax.jit(deployer.on_mesh(make_step(num_chunks)))
    compiled = step.lower(*inputs(WIDTH, VOCABULARY, num_tokens, deployer)).compile()
    return {
        "temp_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
        "hbm_gib": moved_bytes(compiled.as_text(), num_chunks) / 2**30,
    }


def run_here(num_tokens: int, num_chunks: int) -> dict[str, float]:
    """Take the best time of several, and the temporaries."""
    import jax
    import numpy as np

    from redco_flow import Deployer

    deployer = Deployer(devices=jax.devices()[:1])
    shapes = inputs(CPU_WIDTH, CPU_VOCABULARY, num_tokens, deployer)
    rng = np.random.default_rng(0)

    def draw(shape: Any) -> Any:
        if shape.dtype == np.int32:
            return rng.integers(0, CPU_VOCABULARY, shape.shape).astype(np.int32)
        return jax.numpy.asarray(rng.normal(size=shape.shape) * 0.05, np.float32)

    values = jax.tree.map(draw, shapes)
    step = jax.jit(deployer.on_mesh(make_step(num_chunks))).lower(*values).compile()
    jax.block_until_ready(step(*values))
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        jax.block_until_ready(step(*values))
        times.append(time.process_time() - start)
    temporaries = step.memory_analysis().temp_size_in_bytes
    return {"temp_gib": temporaries / 2**30, "cpu_seconds": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=[*sorted(TOPOLOGIES), "cpu"], default="v5p")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    compile_targets.set_environment("cpu" if options.target == "cpu" else "tpu", 1)
    records = []
    for num_chunks in options.chunks:
        if options.target == "cpu":
            found = run_here(options.tokens, num_chunks)
        else:
            found = compile_for_chip(options.target, options.tokens, num_chunks)
        rounded = {name: round(value, 3) for name, value in found.items()}
        records.append({"target": options.target, "tokens": options.tokens, "chunks": num_chunks})
        records[-1] |= rounded
        print(json.dumps(records[-1]), flush=True)
    print(json.dumps({"loss": records}))


if __name__ == "__main__":
    main()
