"""Windows of one length over all tokens of a split, as if its texts were one.

A window is an example of the recipe: its first token is the source, those after it are learnt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.order import Part
from redco_flow.engine.errors import DataError


class TokenStream:
    """The tokens of many texts one after the other, read where they are asked for.

    Args:
        chunks: int32 arrays, mapped ones too.
    """

    def __init__(self, chunks: Iterable[NDArray[np.int32]]) -> None:
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        self._ends = np.cumsum([0, *map(len, self._chunks)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return a copy of the tokens from `start` to `stop`, which are in the stream."""
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        parts = []
        for chunk, begin in zip(self._chunks[first:], self._ends[first:], strict=False):
            if begin >= stop:
                break
            parts.append(chunk[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True)
class Span:
    """A part of a stream: tokens that windows may have together.

    Args:
        weight: share of the windows that are drawn, where parts are mixed.
    """

    name: str
    start: int
    num_tokens: int
    weight: float = 1.0


class TokenWindows(Sequence[dict[str, Any]]):
    """Windows as examples.

    Args:
        length: tokens that a window predicts; it holds one more, which stands before them.
        at_every_token: whether a window begins at each token that has `length` ones behind it;
            else at each `length`-th, so that windows share no token but that one, and the last
            window of a span may be shorter.

    Raises:
        DataError: a span has no room for a window.
    """

    def __init__(
        self, stream: TokenStream, spans: Sequence[Span], length: int, *, at_every_token: bool
    ) -> None:
        self._stream, self._spans, self._length = stream, tuple(spans), length
        self._stride = 1 if at_every_token else length
        least = length + 1 if at_every_token else 2
        for span in spans:
            if span.num_tokens < least:
                raise DataError(
                    f"{span.name} has {span.num_tokens} tokens, and a window takes {least} at "
                    "least: lower batching.window_length."
                )
        # The last token begins no window.
        room = [span.num_tokens - (length if at_every_token else 1) for span in spans]
        self._ends = np.cumsum([0, *(-(-tokens // self._stride) for tokens in room)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}.")
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        span = self._spans[number]
        start = span.start + self._stride * (int(index) - int(self._ends[number]))
        ids = self._stream.read(start, min(start + self._length + 1, span.start + span.num_tokens))
        return {
            "row_id": f"window at token {start}",
            "source_ids": ids[:1],
            "target_ids": ids[1:],
        }

    @property
    def num_predicted(self) -> int:
        """Tokens that an epoch of windows predicts, where they do not overlap."""
        return sum(span.num_tokens - 1 for span in self._spans)

    def parts(self) -> list[Part]:
        """Return which windows are of which span; an epoch has each token about once."""
        return [
            Part(
                span.name,
                start=int(start),
                num_rows=int(end - start),
                epoch_length=-(-(span.num_tokens - 1) // self._length),
                weight=span.weight,
            )
            for span, start, end in zip(self._spans, self._ends, self._ends[1:], strict=False)
        ]


def stream_of(examples: Iterable[Mapping[str, Any]]) -> TokenStream:
    """Return the tokens of examples of plain texts, in their order."""
    return TokenStream(example["target_ids"] for example in examples)
