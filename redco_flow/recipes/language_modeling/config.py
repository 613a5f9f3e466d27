"""Settings and encoding of the language_modeling recipe: texts to token ids."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from redco_flow.models.find import DECODERS
from redco_flow.text.pairs import (
    EncodedPairs,
    TruncationSide,
    Windows,
    encode_ending,
    own_token_counts,
)
from redco_flow.text.special_tokens import take_end, take_start
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
    """Encode examples; a prompt's suffix and a target's end token are never cut off.

    Args:
        truncation_side: which end of a prompt is cut off.

    Returns:
        Prompts without the tokenizer's start tokens, which rows begin with, and targets with one
        end token, also where a text itself has these; `own_starts` and `own_ends` are counted.
    """
    prefixed = [source_prefix + source for source in sources]
    suffix = tokenizer.encode_suffix(source_suffix)
    source = encode_ending(
        prefixed,
        tokenizer,
        max_source_length,
        suffix,
        start=tokenizer.prefix_ids,
        truncation_side=truncation_side,
    )
    target = encode_ending(targets, tokenizer, max_target_length, [tokenizer.eos_id])
    counts = own_token_counts(source, target)
    return EncodedPairs(source.ids, target.ids, source.is_cut, target.is_cut, counts=counts)


def encode_texts(
    texts: Sequence[str], tokenizer: TextTokenizer, *, max_length: int
) -> EncodedPairs:
    """Encode plain texts: every token and the end token once, at most max_length to an example.

    Start tokens that a text begins with are left out, for every row begins with them anyway.
    """
    windows: list[array[int]] = []
    text_of: list[int] = []
    begin = tokenizer.prefix_ids or (tokenizer.eos_id,)
    counts: Counter[str] = Counter()
    for number, ids in enumerate(tokenizer.encode_each(texts)):
        counts["own_starts"] += take_start(ids, begin)
        counts["own_ends"] += take_end(ids, tokenizer.eos_id)
        ids.append(tokenizer.eos_id)
        for start in range(0, len(ids), max_length):
            windows.append(ids[start : start + max_length])
            text_of.append(number)
    nothing = [False] * len(windows)
    said = tokenizer.decode_batch(windows)
    return EncodedPairs(
        [[] for _ in windows],
        windows,
        nothing,
        nothing,
        Windows(text_of, said),
        counts={name: count for name, count in counts.items() if count},
    )


FAMILIES = DECODERS
DEFAULT_FAMILY = "gpt2"
