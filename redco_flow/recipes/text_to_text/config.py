"""text_to_text: a source text in, a target text out, by an encoder-decoder such as T5.

The recipe's face. `encode` is light and runs in preprocessing; `build` brings the model in, and
JAX with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.text.pairs import EncodedPairs, encode_ending
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
    """Encode examples; lengths count the suffix and the end token, which are never cut off."""
    prefixed = [source_prefix + source for source in sources]
    end = [tokenizer.eos_id]
    suffix = tokenizer.encode_suffix(source_suffix)
    source_ids, is_source_cut = encode_ending(
        prefixed, tokenizer, max_source_length, [*suffix, *end]
    )
    target_ids, is_target_cut = encode_ending(targets, tokenizer, max_target_length, end)
    return EncodedPairs(source_ids, target_ids, is_source_cut, is_target_cut)


FAMILIES = ("t5", "bart")
DEFAULT_FAMILY = "t5"
