"""Notes on what a model learns of a dataset's conversations, from the counts of its splits.

Counted beside the rows of each split: `learnt_tokens`, `cut_targets`, `dropped_rows`,
`double_starts`, `missing_ends` and `parsed_arguments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


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
