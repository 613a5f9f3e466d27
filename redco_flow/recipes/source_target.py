"""Turn pairs of source and target text into token ids, as encoder-decoders read them.

Both sides end with the end token. Light: runs in preprocessing.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.recipes.encoded_pairs import EncodedPairs, encode_ending
from redco_flow.recipes.text_tokenizer import TextTokenizer


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
