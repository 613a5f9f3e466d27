"""Memory that a LLaMA's train step takes on each of eight devices, by the devices' own compiler.

    python benchmarks/step_memory.py [--target v5p|v5e|v6e|a100|h100] [--mesh "model 8"]
                                     [--length 8192] [--rows 8] [--remat full]
    python benchmarks/step_memory.py --model llama-7b --mesh "context 8" --length 1048576 --rows 1
                                     --offload layer_input attention --mlp-chunks 8
    python benchmarks/step_memory.py --target h100 --mesh "one device" --length 4096 --rows 2
                                     --remat none --lora 16
    python benchmarks/step_memory.py --target h100 --mesh "one device" --model llama-3.2-1b
                                     --layers 16 --length 2048 --remat none

Compiles the whole train step (loss in chunks, gradients, clipping, AdamW in float32, products in
bfloat16) ahead of time for devices that need not be there (`compile_targets.py` says what must be
installed); the peak is arguments + outputs − aliased + temporaries. Beside it: what the trace alone
says of it (`estimated_gib`), what is offloaded (`host_gib`) and the operations of products, without
those inside of attention's kernels. GPU compilers lower cuDNN's attention only where there is one:
for those not there it is Triton's. Prints a JSON line per mesh, all of them last.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import compile_targets

from redco_flow.engine.step.program import Program, UnknownLoop

GIB = 2**30
NUM_DEVICES = 8
MESHES = {
    "fsdp 8": {"num_fsdp_shards": 8},
    "model 8": {"num_model_shards": 8},
    "model 4 x fsdp 2": {"num_model_shards": 4, "num_fsdp_shards": 2},
}
ONE_DEVICE = {"one device": {}}
LONG_TEXTS = {"context 8": {"num_context_shards": 8, "fsdp_over_context": True}}
LAYERS = 32
LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}  # fmt: skip
LLAMA_7B = {
    "vocab_size": 32000, "hidden_size": 4096, "num_attention_heads": 32,
    "intermediate_size": 11008, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "vocab_size": 2048, "hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 1536,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64,
    "num_key_value_heads": 8, "intermediate_size": 8192, "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}  # fmt: skip
MODELS = {
    "llama-3-8b": LLAMA_3_8B, "llama-7b": LLAMA_7B, "llama-3.2-1b": LLAMA_1B, "tiny": TINY
}  # fmt: skip


def plan(options: argparse.Namespace, mesh: str) -> Any:
    """Return the training's plan."""
    import jax
    import jax.numpy as jnp
    import optax

    from redco_flow import Deployer, TrainingPlan
    from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
    from redco_flow.engine.step.lora import plan_lora
    from redco_flow.engine.step.lora_targets import ALL_LINEAR
    from redco_flow.models.find import find_model

    module = find_model("llama")
    given = {"num_hidden_layers": options.layers, "max_position_embeddings": options.length}
    config = module.Config.from_hugging_face(
        {"model_type": "llama", **MODELS[options.model], **given}
    )
    config = config.updated(
        {
            "remat": options.remat,
            "activations": dict.fromkeys(options.offload, "offload")
            | {"offload_share": options.offload_share},
            "num_mlp_chunks": options.mlp_chunks,
            "dtype": "bfloat16",
        }
    )

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        hidden, head, _ = module.apply_before_head(config, params, batch["input_ids"])

        def score(head: Any, hidden: Any) -> Any:
            return module.score(config, head, hidden)

        return chunked_cross_entropy(score, head, hidden, batch["labels"])

    devices = compile_targets.find_chips(options.target, NUM_DEVICES)
    devices = devices[:1] if mesh in ONE_DEVICE else devices
    deployer = Deployer(devices=devices, **(MESHES | LONG_TEXTS | ONE_DEVICE)[mesh])
    params = module.abstract_params(config)
    row = jax.ShapeDtypeStruct((1, options.length), jnp.int32)
    batch = {"input_ids": row, "labels": row}
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    lora = None
    if options.lora:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
        traced = (params, loss_fn, batch, None, False)
        lora = plan_lora(
            *traced, rank=options.lora, alpha=2.0 * options.lora, targets=ALL_LINEAR,
            dropout=options.dropout,
        )  # fmt: skip
    optimizer = optax.adamw(1e-4)
    return TrainingPlan(
        deployer, loss_fn=loss_fn, params=params, optimizer=optimizer, sharding_rules=rules,
        global_batch_size=options.rows, max_grad_norm=1.0, batch=batch, lora=lora,
    )  # fmt: skip


def bytes_per_device(state: Any) -> int:
    import jax

    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )


def measure(options: argparse.Namespace, mesh: str) -> dict[str, Any]:
    from redco_flow.engine.training_plan import step_memory

    started = time.perf_counter()
    found = plan(options, mesh)
    compiled = found.compile()
    memory = step_memory(compiled)
    if options.hlo:
        options.hlo.write_text(compiled.as_text())
    return {
        **{name: value for name, value in vars(options).items() if name != "hlo"},
        "mesh": mesh,
        "device_gib": compile_targets.MEMORY_GIB[options.target],
        "peak_gib": rounded(memory.total),
        "estimated_gib": rounded(found.estimate_bytes()),
        "state_gib": rounded(bytes_per_device(found.state)),
        "temporaries_gib": rounded(memory.temporaries),
        "host_gib": rounded(memory.host_temporaries),
        "product_tflop": product_tflop(compiled.as_text()),
        "fits": memory.total <= compile_targets.MEMORY_GIB[options.target] * GIB,
        "seconds": round(time.perf_counter() - started),
    }


def product_tflop(text: str) -> float | None:
    """Return the operations of a program's products; None where a loop's turns are not known."""
    try:
        return round(Program(text).flops() / 1e12, 1)
    except UnknownLoop:
        return None


def rounded(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(compile_targets.MEMORY_GIB), default="v5p")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-8b")
    parser.add_argument("--mesh", choices=sorted(MESHES | LONG_TEXTS | ONE_DEVICE), help="one only")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--remat", choices=("full", "minimal", "none"), default="full")
    parser.add_argument("--offload", nargs="*", default=[], metavar="NAME", help="of `activations`")
    parser.add_argument("--offload-share", type=float, default=1.0)
    parser.add_argument("--mlp-chunks", type=int, default=1)
    parser.add_argument("--lora", type=int, metavar="RANK", help="beside a base in bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0, help="of what --lora's factors read")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hlo", type=Path, help="where the program's text goes")
    options = parser.parse_args()
    compile_targets.set_environment(compile_targets.kind_of(options.target), NUM_DEVICES)
    records = []
    for mesh in [options.mesh] if options.mesh else MESHES:
        records.append(measure(options, mesh))
        print(json.dumps(records[-1]), flush=True)
    print(json.dumps({"step_memory": records}))


if __name__ == "__main__":
    main()
