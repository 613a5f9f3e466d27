"""language_modeling: the next token, by a decoder-only model such as GPT-2 or LLaMA.

Of plain texts (`data.text_key`), or of a target after a prompt (`data.source_key` and
`data.target_key`), where the target's tokens alone are learnt: instruction tuning. The recipe's
face. `encode` and `encode_texts` are light and run in preprocessing; `build` brings the model in,
and JAX with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from redco_flow.text.pairs import EncodedPairs, Windows, encode_ending
from redco_flow.text.tokenizer import TextTokenizer


def encode(
    sources: Sequence[str],
    targets: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    source_prefix: str,
    source_suffix: str,
    max_source_length: int,
    max_target_length: int,
) -> EncodedPairs:
    """Encode examples; a prompt's suffix and a target's end token are never cut off."""
    prefixed = [source_prefix + source for source in sources]
    suffix = tokenizer.encode_suffix(source_suffix)
    source_ids, is_source_cut = encode_ending(prefixed, tokenizer, max_source_length, suffix)
    end = [tokenizer.eos_id]
    target_ids, is_target_cut = encode_ending(targets, tokenizer, max_target_length, end)
    return EncodedPairs(source_ids, target_ids, is_source_cut, is_target_cut)


def encode_texts(
    texts: Sequence[str], tokenizer: TextTokenizer, *, max_length: int
) -> EncodedPairs:
    """Encode plain texts: every token and the end token once, at most max_length to an example."""
    windows: list[array[int]] = []
    text_of: list[int] = []
    for number, ids in enumerate(tokenizer.encode_each(texts)):
        ids.append(tokenizer.eos_id)
        for start in range(0, len(ids), max_length):
            windows.append(ids[start : start + max_length])
            text_of.append(number)
    nothing = [False] * len(windows)
    said = tokenizer.decode_batch(windows)
    return EncodedPairs([[] for _ in windows], windows, nothing, nothing, Windows(text_of, said))


FAMILIES = (
    "gpt2",
    "gptj",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "olmo2",
    "phi3",
    "smollm3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
)
DEFAULT_FAMILY = "gpt2"
CAN_PACK = True
MEASURES_PERPLEXITY = True
