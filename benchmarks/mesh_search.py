"""The mesh that the search of `plan --fit --search` and `mesh: auto` chooses, against all others.

    python benchmarks/mesh_search.py [CASE ...]

Each case is a small model on a number of GPUs. The search chooses a mesh for it, and then every
mesh is compiled: the chosen one's predicted step ÷ that of the fastest that fits, how many meshes
the search compiled of how many, and the errors of the estimates of their memory. No GPU is needed;
`redco-flow[plan-gpu]` is. Prints a JSON line per case, and one of all last.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from typing import Any

from planned_steps import plan_steps

LENGTH, VOCABULARY = 512, 8192
# Target, rows of a step, family, configuration and other settings. Widths are small, and rows few,
# so that sending takes its share of a step; `wide` has parameters that only many devices can hold.
LLAMA = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
         "intermediate_size": 2816, "max_position_embeddings": LENGTH}  # fmt: skip
WIDE = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
GPT2 = {"n_embd": 768, "n_layer": 4, "n_head": 12, "n_positions": LENGTH}
OPT = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "num_hidden_layers": 2,
       "num_attention_heads": 32, "ffn_dim": 8192, "max_position_embeddings": LENGTH}  # fmt: skip
T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 2, "num_heads": 16,
      "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}  # fmt: skip
LORA = {"lora": {"rank": 16, "alpha": 32.0, "targets": "all-linear"}, "frozen_dtype": "bfloat16"}
CASES: dict[str, tuple[Any, ...]] = {
    "llama-2": ("h100x2", 16, "llama", LLAMA),
    "llama-4": ("a100-80gx4", 32, "llama", LLAMA),
    "llama-few-rows-8": ("h100x8", 8, "llama", LLAMA),
    "llama-many-rows-8": ("h100x8", 512, "llama", LLAMA),
    "llama-16": ("h100x16", 64, "llama", LLAMA),
    "wide-4": ("h200x4", 16, "llama", WIDE),
    "wide-8": ("a100-40gx8", 16, "llama", WIDE),
    "wide-many-rows-8": ("h100x8", 256, "llama", WIDE),
    "gpt2-4": ("a100-40gx4", 32, "gpt2", GPT2),
    "gpt2-6": ("a100-40gx6", 24, "gpt2", GPT2),
    "opt-4": ("h100x4", 8, "opt", OPT),
    "opt-8": ("b200x8", 64, "opt", OPT),
    "t5-4": ("h100x4", 16, "t5", T5),
    "lora-4": ("h100x4", 16, "llama", LLAMA, LORA),
}


def measure(name: str) -> dict[str, Any]:
    """Search for a case's mesh, then compile all."""
    target_name, rows, family, config, *settings = CASES[name]
    sizes = {"vocabulary": VOCABULARY, "length": LENGTH, "rows": rows, "mesh": "auto"}
    config = {**config, "remat": "none"}
    compiler = plan_steps(target_name, family, config, **sizes, **dict(*settings))
    from redco_flow.stages.train.mesh_search import Candidate, Saving, best_of
    from redco_flow.stages.train.mesh_trials import MeshTrials

    compiled: list[str] = []
    trials = MeshTrials("train", compiler, compiled.append)
    begun = time.process_time()
    trials.run()
    seconds, num_compiled = time.process_time() - begun, len(compiled)
    count = compiler.target.num_devices
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    meshes = [
        pair for pair in itertools.product(divisors, repeat=2) if count % (pair[0] * pair[1]) == 0
    ]
    saving = Saving(num_micro=1)
    every = [trials.attempt(Candidate(*mesh, saving)) for mesh in meshes]
    fitting = [one for one in every if one.fits]
    fastest = best_of(fitting) if fitting else None
    assert fastest is not None, f"{name}: no mesh fits"
    chosen = trials.chosen
    is_chosen = [
        (one.candidate.num_model_shards, one.candidate.fsdp)
        == (chosen["num_model_shards"], chosen["fsdp"])
        for one in every
    ]
    of_chosen = next(one for one, found in zip(every, is_chosen, strict=True) if found)
    least = min(one.seconds for one in fitting)
    errors = [_estimate(compiler, one) / one.used_bytes - 1 for one in every if one.seconds]
    return {
        "case": name,
        "target": target_name,
        "chosen": {key: value for key, value in chosen.items() if value is not None},
        "ratio": round(of_chosen.seconds / least, 3),
        "worst": round(max(one.seconds for one in fitting) / least, 2),
        "compiled": num_compiled,
        "meshes": len(meshes),
        "search_cpu_seconds": round(seconds, 1),
        "errors_of_estimates": [round(error, 3) for error in errors],
    }


def _estimate(compiler: Any, trial: Any) -> int:
    """Return the bytes of a device that a compiled step needs by its trace alone."""
    mesh = {name: getattr(trial.candidate, name) for name in ("num_model_shards", "fsdp")}
    return compiler.plan(mesh).estimate_bytes()


def main() -> None:
    """Measure the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    names = parser.parse_args().cases or list(CASES)
    if unknown := set(names) - set(CASES):
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    found = []
    for name in names:
        found.append(measure(name))
        print(json.dumps(found[-1]), flush=True)
    ratios = [one["ratio"] for one in found]
    compiled, meshes = (sum(one[key] for one in found) for key in ("compiled", "meshes"))
    summary = {"worst_ratio": max(ratios), "median_ratio": statistics.median(ratios)}
    summary["worst_error_of_estimates"] = max(
        abs(error) for one in found for error in one["errors_of_estimates"]
    )
    print(json.dumps({"mesh_search": {**summary, "compiled": compiled, "meshes": meshes}}))


if __name__ == "__main__":
    main()
