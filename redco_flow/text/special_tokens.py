"""Start and end tokens once: not before a text that begins with them, nor after one that ends so.

A prompt such as `<s>[INST] … [/INST]` has the start token in its own text, which a tokenizer reads
as that token. A second one is what no published model was trained with.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence


def begins_with(ids: Sequence[int], start: Sequence[int]) -> bool:
    """Whether a text begins with the tokens that are put before every text; False of none."""
    return len(start) > 0 and list(ids[: len(start)]) == list(start)


def with_start(ids: Sequence[int], start: Sequence[int]) -> list[int]:
    """Return a text with the start tokens before it, once."""
    return list(ids) if begins_with(ids, start) else [*start, *ids]


def take_start(ids: MutableSequence[int], start: Sequence[int]) -> bool:
    """Remove a text's own start tokens, and say whether it had them."""
    has_own = begins_with(ids, start)
    if has_own:
        del ids[: len(start)]
    return has_own


def take_end(ids: MutableSequence[int], end_id: int) -> bool:
    """Remove a text's own end token, and say whether it had one."""
    has_own = len(ids) > 0 and ids[-1] == end_id
    if has_own:
        del ids[-1:]
    return has_own
