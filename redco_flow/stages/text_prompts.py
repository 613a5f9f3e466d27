"""Begin a plain text for a model to continue: its first tokens are given, the rest is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.recipes.text_tokenizer import TextTokenizer


def begun(example: Mapping[str, Any], length: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the example as a prompt of at most `length` tokens and what comes after it."""
    ids = example["target_ids"]
    # At least the last token is left to generate.
    cut = min(length, len(ids) - 1)
    prompt, rest = tokenizer.decode_batch([ids[:cut], ids[cut:]])
    return {
        "row_id": example["row_id"],
        "source": prompt,
        "references": [rest],
        "source_ids": ids[:cut],
        "target_ids": ids[cut:],
    }
