"""Settings and encoding of the text_to_text recipe: texts to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
    """Encode examples in the tokenizer's own template, as published models were trained.

    Of BART that is `<s> text </s>`, of T5 `text </s>`. Lengths count these tokens and the suffix,
    which are never cut off.

    Args:
        truncation_side: which end of a source is cut off.
    """
    prefixed = [source_prefix + source for source in sources]
    suffix = tokenizer.encode_suffix(source_suffix)
    encoded = partial(
        encode_ending, tokenizer=tokenizer, start=tokenizer.prefix_ids, with_start=True
    )
    source = encoded(
        prefixed,
        max_length=max_source_length,
        ending=[*suffix, *(tokenizer.suffix_ids or [tokenizer.eos_id])],
        truncation_side=truncation_side,
    )
    target = encoded(targets, max_length=max_target_length, ending=[tokenizer.eos_id])
    counts = own_token_counts(source, target)
    return EncodedPairs(source.ids, target.ids, source.is_cut, target.is_cut, counts=counts)


FAMILIES = ENCODER_DECODERS
DEFAULT_FAMILY = "t5"
