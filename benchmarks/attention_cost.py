"""Attention as our models call it ÷ JAX's own kernel called bare, compiled for one TPU chip or GPU.

    python benchmarks/attention_cost.py [--target v5p] [--lengths 2048 8192] [--shape tiny] [--xla]
    python benchmarks/attention_cost.py --target a100 [--window 1024] [--cap 50]

LLaMA-3-8B's attention between its projections (width 4096, 32 heads, 8 key-value heads of 128,
bfloat16, causal), forward and backward, compiled ahead of time by libtpu
(`pip install libtpu==0.0.42.1`) or the CUDA plugin (see compile_targets.py). Bare is JAX's kernel
between projections that give what it takes: on TPUs splash attention with the same blocks, of
(rows, heads, tokens, head dim); on GPUs, of packed rows, its Triton kernel with keys and values
repeated for their heads. It has no window and no cap, which ours takes where they are asked for.
Counted are the bytes of HBM in XLA's cost analysis (of GPUs `step/program.py`'s), which knows
nothing of what happens inside the kernels, temporaries, and arrays as large as the scores; `--xla`
also counts the attention that forms them. Prints a JSON line per length, all of them last.
"""

import argparse
import json
import re
from functools import partial
from typing import Any, NamedTuple

import compile_targets

from redco_flow.engine.step.program import Program

TARGETS = ("v5p", "v5e", "a100", "h100")
KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton")
ROWS = {2048: 2}
HEAD_DIM = 128
COUNTED = ("hbm_bytes", "temp_bytes")


class Shape(NamedTuple):
    """The residual stream's width, query heads and key-value heads of a model."""

    width: int
    heads: int
    groups: int


SHAPES = {"8b": Shape(4096, 32, 8), "tiny": Shape(512, 4, 2)}


def costs(attend: Any, layout: str, shape: Shape, deployer: Any, length: int) -> dict[str, int]:
    """Compile a sublayer and its gradients; `attend` takes and gives heads in this layout."""
    import jax
    import jax.numpy as jnp

    def sublayer(x: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
        heads = (jnp.einsum(f"btd,dhk->{layout}", x, kernel) for kernel in (query, key, value))
        return jnp.einsum(f"{layout},hkd->btd", attend(*heads), out)

    def with_gradients(cotangent: Any, *inputs: Any) -> Any:
        found, pull_back = jax.vjp(sublayer, *inputs)
        return found, pull_back(cotangent)

    width, heads, groups = shape
    x = (ROWS.get(length, 1), length, width)
    kernels = [(width, count, HEAD_DIM) for count in (heads, groups, groups)]
    shapes = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=deployer.named_sharding())
        for size in (x, x, *kernels, (heads, HEAD_DIM, width))
    ]
    compiled = jax.jit(deployer.on_mesh(with_gradients)).lower(*shapes).compile()
    program = compiled.as_text()
    analysis = compiled.cost_analysis()  # which the CUDA plugin has not without its devices
    in_hbm = analysis["bytes accessed"] if analysis else Program(program).hbm_bytes()
    return {
        "hbm_bytes": int(in_hbm),
        "temp_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        "kernels": sum(program.count(f'custom_call_target="{name}"') for name in KERNELS),
        "score_arrays": len(set(re.findall(rf"\w+\[(?:\d+,)*{length},{length}\]", program))),
    }


def bare_splash(num_heads: int, length: int) -> Any:
    """Return the kernel over rows of (heads, tokens, head dim)."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention

    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * num_heads),
        block_sizes=splash_attention.BlockSizes(
            **{f"block_{name}": min(length, 512) for name in names}
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    return lambda query, key, value: jax.vmap(kernel)(query * HEAD_DIM**-0.5, key, value)


def bare_triton(shape: Shape, segments: Any) -> Any:
    """Return the kernel over rows of (tokens, heads, head dim), of packed rows."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import attention

    def attend(query: Any, key: Any, value: Any) -> Any:
        repeats = shape.heads // shape.groups
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
        return attention.mha(query, key, value, segments, HEAD_DIM**-0.5, causal=True)

    return attend


def measure(options: argparse.Namespace, length: int) -> dict[str, Any]:
    import jax.numpy as jnp

    from redco_flow import Deployer
    from redco_flow.models.attention.bias import row_biases
    from redco_flow.models.attention.ring import attend_sequence
    from redco_flow.models.layer_config import AttentionConfig

    deployer = Deployer(devices=compile_targets.find_chips(options.target, 1))
    shape = SHAPES[options.shape]
    config = AttentionConfig(*shape[1:], HEAD_DIM, HEAD_DIM**-0.5, cap=options.cap)
    attend = partial(attend_sequence, config, window=options.window)
    if compile_targets.kind_of(options.target) == "tpu":
        bare = costs(bare_splash(shape.heads, length), "bhtk", shape, deployer, length)
    else:
        places = jnp.arange(length, dtype=jnp.int32) // (length // 3)
        segments = jnp.broadcast_to(places, (ROWS.get(length, 1), length))
        attend = partial(attend, biases=row_biases(None, segments))
        bare = costs(bare_triton(shape, segments), "bthk", shape, deployer, length)
    found = {"ours": costs(attend, "bthk", shape, deployer, length), "bare": bare}
    if options.xla:
        found["xla"] = costs(partial(attend, kernel="xla"), "bthk", shape, deployer, length)
    ratios = {f"{name}_ratio": found["ours"][name] / found["bare"][name] for name in COUNTED}
    return {"target": options.target, "length": length, **found, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="v5p")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--window", type=int, help="tokens that a query looks back")
    parser.add_argument("--cap", type=float, help="soft cap of the scores")
    parser.add_argument("--xla", action="store_true", help="count formed scores, too")
    options = parser.parse_args()
    compile_targets.set_environment(compile_targets.kind_of(options.target), 1)
    records = []
    for length in options.lengths:
        records.append(measure(options, length))
        print(json.dumps(records[-1]), flush=True)
    print(json.dumps({"attention": records}))


if __name__ == "__main__":
    main()
