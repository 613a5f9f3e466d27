"""Settings and encoding of the text_to_text recipe: texts to token ids."""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.models.find import ENCODER_DECODERS
from redco_flow.text.pairs import (
    EncodedPairs,
    TruncationSide,
    encode_ending,
    own_token_counts,
)
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
    truncation_side: TruncationSide = "right",
) -> EncodedPairs:
    """Encode examples; lengths count the suffix and the end token, which are never cut off.

    Args:
        truncation_side: which end of a source is cut off.
    """
    prefixed = [source_prefix + source for source in sources]
    end = [tokenizer.eos_id]
    suffix = tokenizer.encode_suffix(source_suffix)
    source = encode_ending(
        prefixed,
        tokenizer,
        max_source_length,
        [*suffix, *end],
        truncation_side=truncation_side,
    )
    target = encode_ending(targets, tokenizer, max_target_length, end)
    counts = own_token_counts(source, target)
    return EncodedPairs(source.ids, target.ids, source.is_cut, target.is_cut, counts=counts)


FAMILIES = ENCODER_DECODERS
DEFAULT_FAMILY = "t5"
