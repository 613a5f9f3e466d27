"""Table 1 of Redco (arXiv 2310.16355): large models, and the servers on which they are finetuned.

    python benchmarks/table1.py [ROW ...] [--markdown]

For each row a pipeline with `num_model_shards` and nothing else about parallelism is written, as a
user would write it, and `redco-flow plan --fit` compiles its train step for the row's devices:
float32 parameters and products, AdamW, `remat: full`, 8 rows of the length at once. No weights, no
data and no accelerator are needed; `redco-flow[plan-gpu]` and `[plan-tpu]` are. The 10 GiB cards
are compiled as A100s: far from a card's limit, XLA's memory depends on the shapes alone. Prints a
JSON line per row, or a table in Markdown.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

GIB = 2**30
ROWS_AT_ONCE = 8
SMALL_CARD_GIB = 0.92 * 10
# Of one model: family, vocabulary, configuration, length of a row.
MODELS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "BART-large": ("bart", 50265, {
        "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
    }, 1024),
    "GPT2-large": ("gpt2", 50257, {
        "n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024,
    }, 512),
    "LLaMA-7B": ("llama", 32000, {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }, 1024),
    "GPT-J-6B": ("gptj", 50400, {
        "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "n_positions": 2048,
    }, 1024),
    "T5-11B": ("t5", 32128, {
        "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24,
    }, 512),
    "OPT-13B": ("opt", 50272, {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480,
        "word_embed_proj_dim": 5120, "max_position_embeddings": 2048,
    }, 1024),
    "OPT-66B": ("opt", 50272, {
        "hidden_size": 9216, "num_hidden_layers": 64, "num_attention_heads": 72, "ffn_dim": 36864,
        "word_embed_proj_dim": 9216, "max_position_embeddings": 2048,
    }, 512),
}  # fmt: skip
# The paper's devices; the target that is compiled for; model shards; GiB of a device, if smaller.
SERVERS: dict[str, tuple[str, str, dict[str, Any], float | None]] = {
    "BART-large": ("2 × 10 GiB", "a100-40gx2", {"num_model_shards": 2}, SMALL_CARD_GIB),
    "GPT2-large": ("2 × 10 GiB", "a100-40gx2", {"num_model_shards": 2}, SMALL_CARD_GIB),
    "LLaMA-7B": ("4 × A100-40G", "a100-40gx4", {"num_model_shards": 4}, None),
    "GPT-J-6B": ("4 × A100-40G", "a100-40gx4", {"num_model_shards": 4}, None),
    "T5-11B": ("8 × TPU v4", "v4x8", {"num_model_shards": 8}, None),
    "OPT-13B": ("8 × TPU v4", "v4x8", {"num_model_shards": 8}, None),
    "OPT-66B": ("64 × TPU v4", "v4x64", {"num_model_shards": 8, "fsdp": 8}, None),
}


def pipeline(name: str) -> dict[str, Any]:
    """Return a row's pipeline file."""
    family, vocabulary, config, length = MODELS[name]
    is_decoder = family not in ("t5", "bart")
    keys = {"text_key": "text"} if is_decoder else {"source_key": "text", "target_key": "text"}
    lengths = {"max_target_length": length} | ({} if is_decoder else {"max_source_length": length})
    windows = {"batching": {"type": "windows", "window_length": length}} if is_decoder else {}
    return {
        "name": "table1",
        "recipe": "language_modeling" if is_decoder else "text_to_text",
        "model": {"family": family, "dtype": "float32", "config": {**config, "remat": "full"}},
        "data": {
            "train": "texts.jsonl",
            **keys,
            "tokenizer": {"train": {"vocab_size": vocabulary}},
        },
        "stages": {
            "preprocess": lengths,
            "train": {
                "max_steps": 1000,
                "global_batch_size": ROWS_AT_ONCE,
                "optimizer": "adamw",
                **windows,
                **SERVERS[name][2],
            },
        },
    }


def plan(name: str) -> dict[str, Any]:
    """Return what `plan --fit` says of a row."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts.jsonl").write_text('{"text": "a"}\n')
        (Path(folder) / "table1.yaml").write_text(yaml.safe_dump(pipeline(name)))
        words = ["plan", "table1.yaml", "--fit", "--target", SERVERS[name][1], "--json"]
        words += ["--workspace", folder]  # with no earlier answer in it
        done = subprocess.run(
            [sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=folder, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    (fit,) = json.loads(done.stdout.splitlines()[-1])["fit"].values()
    if "error" in fit:
        sys.exit(f"{name}: {fit['error']}")
    limit_gib = SERVERS[name][3] or fit["limit_bytes"] / GIB
    return {
        "model": name, "length": MODELS[name][3], "devices": SERVERS[name][0], "rows": ROWS_AT_ONCE,
        "mesh": fit["mesh"], "parameters": fit["num_parameters"],
        "gib": round(fit["used_bytes"] / GIB, 2), "limit_gib": round(limit_gib, 2),
        "fits": fit["used_bytes"] / GIB <= limit_gib,
        "planning_cpu_seconds": fit["planning_cpu_seconds"],
        "planning_gib": round(fit["planning_memory_bytes"] / GIB, 2),
    }  # fmt: skip


def markdown(record: dict[str, Any]) -> str:
    """Return a row of the table."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in record["mesh"].items())
    fits = "yes" if record["fits"] else "no"
    cells = (
        f"{record['model']} ({record['length']})", record["devices"], mesh, fits,
        f"{record['gib']:.2f} of {record['limit_gib']:.2f}",
        f"{record['planning_cpu_seconds']:.0f}", f"{record['planning_gib']:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - MODELS.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    for name in arguments.rows or MODELS:
        record = plan(name)
        print(markdown(record) if arguments.markdown else json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
