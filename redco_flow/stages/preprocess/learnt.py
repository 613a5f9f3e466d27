"""What a model learns of a dataset's conversations: its share, and what is wrong with it, told.

Counted beside the rows of each split: `learnt_tokens`, `cut_targets`, `dropped_rows`,
`double_starts`, `missing_ends` and `parsed_arguments`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from redco_flow.recipes.chat.config import LEARNT
from redco_flow.stages.artifacts.dataset import DatasetSummary
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["LEARNT", "learnt_notes", "learnt_pieces", "tell_learnt"]

_MAX_TOKENS = 400

logger = logging.getLogger(__name__)


def learnt_notes(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield what is to be known of a split of conversations, the share that is learnt first.

    Args:
        counts: of `DatasetSummary.splits`.
    """
    share = counts["learnt_tokens"] / max(1, counts["target_tokens"])
    yield (
        f"{counts['rows']:,} conversations, {counts['target_tokens']:,} tokens, of which "
        f"{share:.1%} are learnt"
    )
    if counts["cut_targets"]:
        yield f"{counts['cut_targets']:,} are cut at max_length"
    if counts["dropped_rows"]:
        yield f"{counts['dropped_rows']:,} are dropped: longer than max_length"
    if counts.get("parsed_arguments"):
        yield (
            f"{counts['parsed_arguments']:,} have tool calls whose arguments were JSON in a text: "
            "the template gets them as mappings"
        )
    yield from learnt_warnings(counts)


def learnt_warnings(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield what is likely to be a mistake."""
    if counts["double_starts"]:
        yield (
            f"{counts['double_starts']:,} begin with the start token (BOS) twice: once by the "
            "template, once by their own text"
        )
    if counts["missing_ends"]:
        yield (
            f"{counts['missing_ends']:,} have an answer without the tokenizer's end token (EOS): "
            "the template ends turns with another token than the tokenizer's eos_token. A model "
            "that learns it does not stop, unless its config.json or generation_config.json, or "
            "model.config.eos_token_id, has that token among its end tokens"
        )


def tell_learnt(summary: DatasetSummary) -> None:
    """Log it for each split of a dataset of conversations."""
    for split, counts in summary.splits.items():
        if "learnt_tokens" not in counts:
            continue
        warnings = list(learnt_warnings(counts))
        for note in learnt_notes(counts):
            logger.log(logging.WARNING if note in warnings else logging.INFO, "%s: %s", split, note)


def learnt_pieces(example: Mapping[str, Any], tokenizer: TextTokenizer) -> list[list[Any]]:
    """Return an encoded conversation's text in pieces, and whether each is learnt.

    Of a long one the beginning: 400 tokens.
    """
    ids = [int(token) for token in example["target_ids"]]
    edges = [0, *map(int, example[LEARNT]), len(ids)]
    pieces = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        part = ids[begin : min(end, _MAX_TOKENS)]
        if part:
            text = tokenizer.backend.decode(part, skip_special_tokens=False)
            pieces.append([text, number % 2 == 1])
    return pieces
