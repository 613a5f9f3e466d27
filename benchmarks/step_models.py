"""The models and batches that `train_step.py` and its contenders share: sizes and random ids.

Imports neither JAX nor torch, so that each contender's process can read it.
"""

import numpy as np

VOCAB = 8192
BATCH = {"gpt2": 8, "llama": 8, "t5": 16}
LENGTH = {"gpt2": 128, "llama": 128, "t5": 64}
TARGET = 32  # of T5's targets
# As config.json names them; dropout is off, for frameworks draw it differently.
CONFIGS = {
    "gpt2": {
        "vocab_size": VOCAB, "n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "llama": {
        "vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1408,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    },
    "t5": {
        "vocab_size": VOCAB, "d_model": 256, "d_kv": 32, "num_heads": 8, "d_ff": 1024,
        "num_layers": 4, "num_decoder_layers": 4, "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
}  # fmt: skip


def make_examples(model: str, num_steps: int) -> list[dict[str, np.ndarray]]:
    """Random token ids of full length, so that every contender computes the same tokens."""
    random = np.random.default_rng(0)

    def draw(length: int) -> np.ndarray:
        return random.integers(3, VOCAB, length, dtype=np.int32)

    return [
        {"ids": draw(LENGTH[model]), "target": draw(TARGET)}
        for _ in range(BATCH[model] * num_steps)
    ]


def collate(model: str, examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """input_ids, labels, and T5's decoder_input_ids; nothing is shifted for the others."""
    ids = np.stack([example["ids"] for example in examples])
    if model != "t5":
        return {"input_ids": ids, "labels": ids}
    target = np.stack([example["target"] for example in examples])
    shifted = np.pad(target[:, :-1], ((0, 0), (1, 0)))
    return {"input_ids": ids, "decoder_input_ids": shifted, "labels": target}


def tokens_per_step(model: str) -> int:
    """What counts as a token: each position of the decoder."""
    return BATCH[model] * (TARGET if model == "t5" else LENGTH[model] - 1)
