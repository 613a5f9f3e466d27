"""The mesh that the search of `plan --fit --search` and `mesh: auto` chooses, against all others.

    python benchmarks/mesh_search.py [CASE ...]

Each case is a small model on a number of GPUs. The search chooses a mesh for it, and then every
mesh is compiled: the chosen one's predicted step ÷ that of the fastest that fits, and how many
meshes the search compiled of how many. No GPU is needed; `redco-flow[plan-gpu]` is. Prints a JSON
line per case, and one of all last.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from redco_flow.engine.targets import read_target
from redco_flow.spec.load import load_pipeline

LENGTH, VOCABULARY = 512, 8192
# Target, rows of a step, family and configuration. Widths are small, and rows few, so that sending
# takes its share of a step; `wide` has parameters that only many devices can hold.
LLAMA = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
         "intermediate_size": 2816, "max_position_embeddings": LENGTH}  # fmt: skip
WIDE = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
GPT2 = {"n_embd": 768, "n_layer": 4, "n_head": 12, "n_positions": LENGTH}
OPT = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "num_hidden_layers": 2,
       "num_attention_heads": 32, "ffn_dim": 8192, "max_position_embeddings": LENGTH}  # fmt: skip
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
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
}


def pipeline_of(texts: Path, rows: int, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline with `mesh: auto`, as a user would write it."""
    train = {"mesh": "auto", "max_steps": 10, "global_batch_size": rows, "optimizer": "adamw"}
    windows = {"type": "windows", "window_length": LENGTH}
    tokenizer = {"train": {"vocab_size": VOCABULARY}}
    return {
        "name": "mesh",
        "recipe": "language_modeling",
        "model": {"family": family, "dtype": "bfloat16", "config": {**config, "remat": "none"}},
        "data": {"train": str(texts), "text_key": "text", "tokenizer": tokenizer},
        "stages": {
            "preprocess": {"max_target_length": LENGTH},
            "train": {**train, "keep": {"last": 1}, "batching": windows},
        },
    }


def measure(name: str) -> dict[str, Any]:
    """Search for a case's mesh, then compile all."""
    target_name, rows, family, config = CASES[name]
    target = read_target(target_name)
    target.set_environment()
    # JAX reads its platform when it is imported.
    from redco_flow.stages.train import planned_data
    from redco_flow.stages.train.compiled_steps import StepCompiler
    from redco_flow.stages.train.mesh_search import Candidate, Saving, best_of
    from redco_flow.stages.train.mesh_trials import MeshTrials

    with tempfile.TemporaryDirectory() as folder:
        path, texts = Path(folder) / "mesh.yaml", Path(folder) / "texts.jsonl"
        texts.write_text('{"text": "a text"}\n')
        path.write_text(yaml.safe_dump(pipeline_of(texts, rows, family, config)))
        stages = load_pipeline(path).stages
    train, preprocess = (stages[stage].config for stage in ("train", "preprocess"))
    data = planned_data.of_settings(train, preprocess, ["dataset"])
    devices = target.find_devices()
    compiler = StepCompiler(train, data, target, devices, target.device.limit_bytes(0.92))
    compiled: list[str] = []
    trials = MeshTrials("train", compiler, compiled.append)
    begun = time.process_time()
    trials.run()
    seconds, num_compiled = time.process_time() - begun, len(compiled)
    count = len(devices)
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
    return {
        "case": name,
        "target": target_name,
        "chosen": {key: value for key, value in chosen.items() if value is not None},
        "ratio": round(of_chosen.seconds / least, 3),
        "worst": round(max(one.seconds for one in fitting) / least, 2),
        "compiled": num_compiled,
        "meshes": len(meshes),
        "search_cpu_seconds": round(seconds, 1),
    }


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
    print(json.dumps({"mesh_search": {**summary, "compiled": compiled, "meshes": meshes}}))


if __name__ == "__main__":
    main()
