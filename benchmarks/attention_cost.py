"""Attention as our models call it ÷ splash attention called bare, compiled for one TPU chip.

    python benchmarks/attention_cost.py [--target v5p] [--lengths 2048 8192] [--xla]

LLaMA-3-8B's attention between its projections (width 4096, 32 heads, 8 key-value heads of 128,
bfloat16, causal), forward and backward, compiled ahead of time by libtpu
(`pip install libtpu==0.0.42.1`). Bare is JAX's kernel with the same blocks between projections that
give what it takes, (rows, heads, tokens, head dim). Counted are the bytes of HBM in XLA's cost
analysis, which knows nothing of what happens inside the kernels, and temporaries; `--xla` also
counts the attention that forms the scores. Prints a JSON line per length, all of them last.
"""

import argparse
import json
from functools import partial
from typing import Any

import compile_targets

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}
ROWS = {2048: 2}
WIDTH, HEADS, GROUPS, HEAD_DIM = 4096, 32, 8, 128
COUNTED = ("hbm_bytes", "temp_bytes")


def costs(attend: Any, layout: str, deployer: Any, length: int) -> dict[str, int]:
    """Compile a sublayer and its gradients; `attend` takes and gives heads in this layout."""
    import jax
    import jax.numpy as jnp

    def sublayer(x: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
        heads = (jnp.einsum(f"btd,dhk->{layout}", x, kernel) for kernel in (query, key, value))
        return jnp.einsum(f"{layout},hkd->btd", attend(*heads), out)

    def with_gradients(cotangent: Any, *inputs: Any) -> Any:
        found, pull_back = jax.vjp(sublayer, *inputs)
        return found, pull_back(cotangent)

    x = (ROWS.get(length, 1), length, WIDTH)
    kernels = [(WIDTH, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=deployer.named_sharding())
        for shape in (x, x, *kernels, (HEADS, HEAD_DIM, WIDTH))
    ]
    compiled = jax.jit(deployer.on_mesh(with_gradients)).lower(*shapes).compile()
    return {
        "hbm_bytes": int(compiled.cost_analysis()["bytes accessed"]),
        "temp_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


def bare_attention(length: int) -> Any:
    """Return the kernel over rows of (heads, tokens, head dim)."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention

    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * HEADS),
        block_sizes=splash_attention.BlockSizes(
            **{f"block_{name}": min(length, 512) for name in names}
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    return lambda query, key, value: jax.vmap(kernel)(query * HEAD_DIM**-0.5, key, value)


def measure(target: str, length: int, *, with_xla: bool) -> dict[str, Any]:
    from jax.experimental import topologies

    from redco_flow import Deployer
    from redco_flow.models.attention.ring import attend_sequence
    from redco_flow.models.config import AttentionConfig

    devices = topologies.get_topology_desc(TOPOLOGIES[target], platform="tpu").devices
    deployer = Deployer(devices=devices[:1])
    attend = partial(attend_sequence, AttentionConfig(HEADS, GROUPS, HEAD_DIM, HEAD_DIM**-0.5))
    found = {
        "ours": costs(attend, "bthk", deployer, length),
        "bare": costs(bare_attention(length), "bhtk", deployer, length),
    }
    if with_xla:
        found["xla"] = costs(partial(attend, kernel="xla"), "bthk", deployer, length)
    ratios = {f"{name}_ratio": found["ours"][name] / found["bare"][name] for name in COUNTED}
    return {"target": target, "length": length, **found, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TOPOLOGIES), default="v5p")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--xla", action="store_true", help="count formed scores, too")
    options = parser.parse_args()
    compile_targets.set_environment("tpu", 1)
    records = []
    for length in options.lengths:
        records.append(measure(options.target, length, with_xla=options.xla))
        print(json.dumps(records[-1]), flush=True)
    print(json.dumps({"attention": records}))


if __name__ == "__main__":
    main()
