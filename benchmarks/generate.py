"""Generation against transformers' `generate` (torch, key-value cache on) of the same weights.

    python benchmarks/generate.py [--model t5|gpt2|llama] [--rounds 5] [--new-tokens 64]

Both sides are given the same random weights and prompts, take turns in one process, and must give
the same tokens; ours is compiled before the first round. Needs the extra `reference` (torch).
Prints one JSON line last: new tokens per second, and the medians over rounds of our rate over
transformers', for greedy search and for four beams, at batch 16.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import transformers

try:
    import torch
except ImportError:
    sys.exit("generate.py needs torch: pip install -c constraints.txt -e '.[reference]'")

from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import generate
from redco_flow.models.hub.pretrained import save_pretrained

BATCH, PROMPT = 16, 64
SIZES = {
    "t5": {
        "vocab_size": 8192, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4,
        "num_heads": 8,
    },
    "gpt2": {
        "vocab_size": 8192, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 256,
        "bos_token_id": 1, "eos_token_id": 1,
    },
    "llama": {
        "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 704, "max_position_embeddings": 256,
    },
}  # fmt: skip


def build(name: str, folder: Path):
    """Return our model, its config and parameters, and transformers' model of the same weights."""
    model = find_model(name)
    config = model.Config.from_hugging_face({"model_type": name, **SIZES[name]})
    params = model.init_params(config, jax.random.key(0))
    save_pretrained(folder, model, config, params)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    return model, config, params, auto.from_pretrained(folder).eval()


def measure(name: str, folder: Path, num_rounds: int, num_tokens: int) -> dict:
    model, config, params, reference = build(name, folder)
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (BATCH, PROMPT), dtype=np.int32)
    mask = np.ones_like(ids)
    figures: dict[str, object] = {"model": name}
    for search, num_beams in (("greedy", 1), ("beam", 4)):
        search_ours = jax.jit(
            partial(generate, model, config, max_new_tokens=num_tokens, num_beams=num_beams)
        )

        def ours(search_ours=search_ours):
            return np.asarray(jax.block_until_ready(search_ours(params, ids, mask)).tokens)

        @torch.no_grad()
        def theirs(num_beams=num_beams):
            tokens = reference.generate(
                input_ids=torch.tensor(ids, dtype=torch.int64),
                attention_mask=torch.tensor(mask, dtype=torch.int64),
                max_new_tokens=num_tokens,
                num_beams=num_beams,
                do_sample=False,
                use_cache=True,
            )
            return tokens.numpy()[:, -num_tokens:]

        same = (ours()[:, : theirs().shape[1]] == theirs()).mean()
        rates = [(rate(ours, num_tokens), rate(theirs, num_tokens)) for _ in range(num_rounds)]
        figures[f"{search}_tokens_per_second"] = round(statistics.median(o for o, _ in rates))
        figures[f"{search}_ratio_torch"] = round(statistics.median(o / t for o, t in rates), 2)
        figures[f"{search}_equal_tokens"] = round(float(same), 4)
    return figures


def rate(action, num_tokens: int) -> float:
    start = time.perf_counter()
    action()
    return BATCH * num_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="t5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options.model, Path(folder), options.rounds, options.new_tokens)))


if __name__ == "__main__":
    main()
