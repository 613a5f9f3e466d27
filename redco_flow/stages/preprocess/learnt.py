"""Log what a model learns of a dataset's conversations, and cut examples at the learnt tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from redco_flow.recipes.chat.config import LEARNT
from redco_flow.stages.artifacts.dataset import DatasetSummary
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.row_counts import learnt_notes, learnt_warnings

__all__ = ["LEARNT", "learnt_pieces", "tell_learnt"]

_MAX_TOKENS = 400

logger = logging.getLogger(__name__)


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
