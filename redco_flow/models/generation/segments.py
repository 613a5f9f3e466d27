"""Decode in segments: loops one after another, each over a cache of one block more.

A token attends to all slots that there are: one loop over a cache of the final length would read
all of it for every token. Segments are parts of one compiled program, and in each the step is
compiled once more: there are few, and a single one where new tokens are few beside what was read.
Dims in this file: N beams, T new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

StateT = TypeVar("StateT", bound=Any)

_MAX_SEGMENTS = 4
# Fewer slots, or a smaller part of what was read, save less than a segment costs to compile.
_MIN_SLOTS = 128
_MIN_SHARE = 1 / 8


class Growth(NamedTuple):
    """The growth of a cache.

    Attributes:
        room: for how many new tokens there is room at first, and how many more each time.
        grow: (cache, number of tokens) to a cache with room for that number.
    """

    room: int
    grow: Callable[[Any, int], Any]


def segment_length(max_new_tokens: int, num_beams: int, num_read: int) -> int:
    """Return how many new tokens a segment has; only the last one may have fewer.

    Args:
        num_read: tokens of the prompt or source, which every new token attends to.
    """
    least = max(_MIN_SLOTS, math.ceil(num_read * _MIN_SHARE))
    num_segments = min(max(max_new_tokens * num_beams // least, 1), _MAX_SEGMENTS)
    return math.ceil(max_new_tokens / num_segments)


def run_segments(
    is_open: Callable[[StateT], jax.Array],
    advance: Callable[[StateT], StateT],
    state: StateT,
    max_new_tokens: int,
    growth: Growth | None,
) -> StateT:
    """Advance a search while it is open and has fewer tokens, and let its cache grow on the way.

    Args:
        state: a named tuple with `position`, the number of tokens so far, and `cache`.
        growth: None: the cache has room for all tokens.
    """

    def run_to(end: int, state: StateT) -> StateT:
        return jax.lax.while_loop(
            lambda state: (state.position < end) & is_open(state), advance, state
        )

    if growth is None:
        return run_to(max_new_tokens, state)
    for end in range(growth.room, max_new_tokens, growth.room):
        state = run_to(end, state)
        next_end = min(end + growth.room, max_new_tokens)
        state = state._replace(cache=growth.grow(state.cache, next_end))
    return run_to(max_new_tokens, state)
