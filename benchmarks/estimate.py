"""What a train step needs of a device's memory by its trace alone, and by the devices' compiler.

    python benchmarks/estimate.py [POINT ...] [--markdown]

Each point is a model, a mesh and a target. `plan --fit` and the search for a mesh compile no step
that clearly does not fit by the estimate. No GPU is needed; `redco-flow[plan-gpu]` is. Prints a
JSON line per point, or a table in Markdown, and one line of all last.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

from planned_steps import plan_steps

GIB = 2**30
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
            "max_position_embeddings": 4096}  # fmt: skip
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
            "tie_word_embeddings": True, "max_position_embeddings": 4096}  # fmt: skip
LLAMA = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
         "intermediate_size": 2816, "max_position_embeddings": 4096}  # fmt: skip
GPT2 = {"n_embd": 1280, "n_layer": 12, "n_head": 20, "n_positions": 1024}
OPT = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "num_hidden_layers": 8,
       "num_attention_heads": 32, "ffn_dim": 8192, "max_position_embeddings": 2048}  # fmt: skip
T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16,
      "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}  # fmt: skip
BART = {"d_model": 1024, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024}  # fmt: skip
MIXTRAL = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
           "num_key_value_heads": 4, "intermediate_size": 3584, "num_local_experts": 8,
           "num_experts_per_tok": 2, "max_position_embeddings": 2048}  # fmt: skip
# Family, configuration, vocabulary.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama-3-8b of 4 layers": ("llama", LLAMA_8B, 128256),
    "llama-3.2-1b": ("llama", LLAMA_1B, 128256),
    "llama": ("llama", LLAMA, 32000),
    "gpt2": ("gpt2", GPT2, 50257),
    "opt": ("opt", OPT, 50272),
    "t5": ("t5", T5, 32128),
    "bart": ("bart", BART, 50265),
    "mixtral": ("mixtral", MIXTRAL, 32000),
}
LORA = {"lora": {"rank": 16, "alpha": 32.0, "targets": "all-linear"}, "frozen_dtype": "bfloat16"}
NARROW = {"param_dtype": "bfloat16"}
# Target, model, rows and tokens of a step, remat, other settings of the stage.
POINTS: dict[str, tuple[str, str, int, int, str, dict[str, Any]]] = {
    "llama none": ("h100x1", "llama", 16, 1024, "none", {}),
    "llama full": ("h100x1", "llama", 16, 1024, "full", {}),
    "llama minimal": ("h100x1", "llama", 16, 1024, "minimal", {}),
    "llama data 4": ("a100-40gx4", "llama", 32, 1024, "none", {}),
    "llama fsdp 4": ("a100-40gx4", "llama", 32, 1024, "none", {"fsdp": 4}),
    "llama model 2": ("h100x2", "llama", 16, 1024, "none", {"num_model_shards": 2}),
    "llama context 4": ("h100x4", "llama", 4, 4096, "full", {"num_context_shards": 4}),
    "llama-3-8b fsdp 8 full": ("h100x8", "llama-3-8b of 4 layers", 16, 2048, "full", {"fsdp": 8}),
    "llama-3-8b fsdp 8 none": ("h100x8", "llama-3-8b of 4 layers", 16, 2048, "none", {"fsdp": 8}),
    "llama-3-8b bf16 fsdp 8 full": ("h100x8", "llama-3-8b of 4 layers", 16, 2048, "full",
                           {"fsdp": 8, **NARROW}),
    "llama-3-8b model 8 full": ("h100x8", "llama-3-8b of 4 layers", 16, 2048, "full",
                       {"num_model_shards": 8}),
    "llama-3-8b fsdp 2 model 4 minimal": ("h100x8", "llama-3-8b of 4 layers", 16, 2048, "minimal",
                        {"num_model_shards": 4, "fsdp": 2}),
    "llama-3-8b fsdp 4 model 2 micro 2 full": ("h100x8", "llama-3-8b of 4 layers", 16, 2048, "full",
                            {"num_model_shards": 2, "fsdp": 4, "per_device_batch_size": 2}),
    "llama-3-8b lora": ("h100x1", "llama-3-8b of 4 layers", 2, 4096, "none", LORA),
    "llama-3-8b lora full fsdp 2": ("h100x2", "llama-3-8b of 4 layers", 4, 4096, "full",
                           {"fsdp": 2, **LORA}),
    "llama-3.2-1b none": ("h100x1", "llama-3.2-1b", 8, 2048, "none", {}),
    "llama-3.2-1b lora": ("a100-40gx1", "llama-3.2-1b", 4, 2048, "minimal", LORA),
    "gpt2 none": ("a100-40gx1", "gpt2", 8, 1024, "none", {}),
    "gpt2 data 4 full": ("a100-40gx4", "gpt2", 32, 1024, "full", {}),
    "gpt2 model 2": ("a100-40gx2", "gpt2", 8, 512, "full", {"num_model_shards": 2}),
    "opt fsdp 4": ("h100x4", "opt", 16, 1024, "full", {"fsdp": 4}),
    "opt model 2": ("h100x2", "opt", 16, 1024, "minimal", {"num_model_shards": 2}),
    "opt micro 4": ("h100x2", "opt", 64, 1024, "full", {"per_device_batch_size": 8}),
    "t5 none": ("h100x1", "t5", 8, 512, "none", {}),
    "t5 full fsdp 4": ("h100x4", "t5", 32, 512, "full", {"fsdp": 4}),
    "t5 model 2": ("a100-40gx2", "t5", 8, 512, "full", {"num_model_shards": 2}),
    "bart none": ("h100x1", "bart", 8, 1024, "none", {}),
    "bart full model 2": ("a100-40gx2", "bart", 8, 1024, "full", {"num_model_shards": 2}),
    "bart data 2": ("a100-40gx2", "bart", 16, 512, "minimal", {}),
    "mixtral none": ("h100x1", "mixtral", 4, 1024, "none", {}),
    "mixtral fsdp 4 full": ("h100x4", "mixtral", 16, 1024, "full", {"fsdp": 4}),
    "mixtral model 2": ("h100x2", "mixtral", 8, 1024, "full", {"num_model_shards": 2}),
}  # fmt: skip
FLOAT32 = frozenset({"bart full model 2"})


def measure(name: str) -> dict[str, Any]:
    """Estimate a point's step, then compile it."""
    target, model, rows, length, remat, settings = POINTS[name]
    family, config, vocabulary = MODELS[model]
    dtype = "float32" if name in FLOAT32 else "bfloat16"
    sizes = {"vocabulary": vocabulary, "length": length, "rows": rows, "dtype": dtype}
    config = {**config, "remat": remat}
    plan = plan_steps(target, family, config, **sizes, **settings).plan({})
    begun = time.process_time()
    estimated = plan.estimate_bytes()
    estimating = time.process_time() - begun
    compiled = plan.memory().total
    return {
        "point": name,
        "target": target,
        "estimated_gib": round(estimated / GIB, 2),
        "compiled_gib": round(compiled / GIB, 2),
        "error": round(estimated / compiled - 1, 3),
        "estimating_cpu_seconds": round(estimating, 1),
        "compiling_cpu_seconds": round(time.process_time() - begun - estimating, 1),
    }


def markdown(record: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = (
        record["point"], record["target"], f"{record['estimated_gib']:.2f}",
        f"{record['compiled_gib']:.2f}", f"{record['error']:+.1%}".replace("%", " %"),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure the named points, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("points", nargs="*", metavar="POINT", help=f"of: {', '.join(POINTS)}")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    names = arguments.points or list(POINTS)
    if unknown := set(names) - set(POINTS):
        sys.exit(f"no such point: {', '.join(sorted(unknown))}; known: {', '.join(POINTS)}")
    found = []
    for name in names:
        found.append(measure(name))
        print(markdown(found[-1]) if arguments.markdown else json.dumps(found[-1]), flush=True)
    errors = [one["error"] for one in found]
    summary = {
        "highest_error": max(errors),
        "lowest_error": min(errors),
        "median_error": round(statistics.median(map(abs, errors)), 3),
    }
    print(json.dumps({"estimate": {**summary, "points": len(found)}}))


if __name__ == "__main__":
    main()
