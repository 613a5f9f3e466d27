"""How messages show a value, a place in a pipeline, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from redco_flow.spec.secrets import hide_secrets

_SHOWN_CHARACTERS = 60


def shown(value: Any) -> str:
    """Return a value as one short printable line, without any secret in it."""
    text = hide_secrets(repr(value))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as a person types it: `stages.train.keep.best[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known name, or "."."""
    names = sorted(known)
    matches = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if not matches and len(given) >= 3:
        matches = [name for name in names if name.startswith(given)]  # `gpus` for `gpus_per_host`
    return f"; did you mean '{matches[0]}'?" if matches else "."


def listed(names: Iterable[str]) -> str:
    """Return names joined by commas, or "none"."""
    return ", ".join(names) or "none"
