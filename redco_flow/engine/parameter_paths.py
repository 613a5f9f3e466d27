"""Name the leaves of a pytree: `encoder/layers/qkv`.

Knows how JAX spells keys.
"""

from __future__ import annotations

from typing import Any

import jax

Path = tuple[str, ...]


def key_names(key_path: tuple[Any, ...]) -> Path:
    """Return one name per key: dict keys, attribute names and indices alike."""
    names = []
    for key in key_path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                names.append(str(getattr(key, attribute)))
                break
        else:
            names.append(str(key))
    return tuple(names)


def named_leaves(tree: Any) -> list[tuple[Path, Any]]:
    """List (path, leaf) in the tree's own order."""
    return [(key_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def join(path: Path) -> str:
    """Spell a path as text; the root itself is `.`."""
    return "/".join(path) or "."
