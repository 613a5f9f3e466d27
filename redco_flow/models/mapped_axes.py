"""Mesh axes over whose shards a function is mapped already, by name, as by `jax.vmap`.

There an array is one shard's part, so specs must leave the axis out: the map puts it in, for which
a `shard_map` must take it.
"""

from __future__ import annotations

import jax


def mapped_axes() -> frozenset[str]:
    """Return those of the mesh that is being traced for; none without a mesh."""
    return frozenset(filter(_is_mapped, jax.sharding.get_abstract_mesh().axis_names))


def _is_mapped(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True
