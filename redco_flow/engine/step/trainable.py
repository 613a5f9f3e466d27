"""Train some parameters and leave the others as they are.

Frozen parameters have neither gradients nor optimizer state, and keep their dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from redco_flow.engine.errors import EngineError
from redco_flow.engine.sharding.rules import join, key_names, named_leaves

# A regex searched in the path, or (path, array or shape) -> whether to train it.
Trainable = str | Callable[[str, Any], bool]
_NUM_PATHS_IN_MESSAGE = 8


def trainable_mask(params: Any, trainable: Trainable) -> Any:
    """Return a tree of bools: True where a parameter is trained.

    Raises:
        EngineError: not a regex, or nothing is left to train.
    """
    decide = _searching(trainable) if isinstance(trainable, str) else trainable

    def is_trained(key_path: tuple[Any, ...], leaf: Any) -> bool:
        return bool(decide(join(key_names(key_path)), leaf))

    mask = jax.tree_util.tree_map_with_path(is_trained, params)
    if not any(jax.tree.leaves(mask)):
        paths = [join(path) for path, _ in named_leaves(params)]
        shown = ", ".join(paths[:_NUM_PATHS_IN_MESSAGE])
        raise EngineError(
            f"trainable={trainable!r} leaves no parameter to train; parameters: {shown}"
            f"{', …' if len(paths) > _NUM_PATHS_IN_MESSAGE else ''}."
        )
    return mask


def select(tree: Any, mask: Any) -> Any:
    """Return the tree with empty nodes where the mask is False."""
    return jax.tree.map(lambda on, leaf: leaf if on else optax.MaskedNode(), mask, tree)


def merge(selected: Any, tree: Any, mask: Any) -> Any:
    """Return the tree with `selected`'s leaves where the mask is True."""
    return jax.tree.map(lambda on, new, old: new if on else old, mask, selected, tree)


def only_trainable(
    optimizer: optax.GradientTransformation, mask: Any
) -> optax.GradientTransformation:
    """Return the optimizer that keeps state where the mask is True alone."""
    masked: optax.GradientTransformation = optax.masked(optimizer, mask)
    return masked


def restrict(
    optimizer: optax.GradientTransformation, params: Any, trainable: Trainable | None
) -> tuple[optax.GradientTransformation, Any]:
    """Return the optimizer for what is trained, and the mask of it; None: everything is.

    Raises:
        EngineError: as `trainable_mask`.
    """
    if trainable is None:
        return optimizer, None
    mask = trainable_mask(params, trainable)
    return only_trainable(optimizer, mask), mask


def _searching(pattern: str) -> Callable[[str, Any], bool]:
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise EngineError(f"trainable={pattern!r} is not a regex: {error}.") from error
    return lambda path, _leaf: found.search(path) is not None
