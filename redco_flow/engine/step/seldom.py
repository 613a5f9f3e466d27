"""The mark of a loop that usually does not turn, in a step and in the text of its program.

Imports no JAX: what reads programs may choose JAX's platform first.
"""

from __future__ import annotations

import re

SELDOM = "where_labels_count_differently"
"""The name scope of the loop in `chunked_loss`."""

_LOOP = re.compile(rf'op_name="[^"]*\b{SELDOM}\)*/while"')


def turns_seldom(instruction: str) -> bool:
    """Return whether the text of an instruction in HLO is that of such a loop."""
    return _LOOP.search(instruction) is not None
