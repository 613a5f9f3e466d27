"""What a recipe is, and how one is found by the name that stands in YAML.

A recipe is one module of this package, or any importable dotted module:

    encode(sources, targets, tokenizer, *, source_prefix, max_source_length, max_target_length)
        -> EncodedPairs; used by preprocessing
    build(model, tokenizer, *, source_length, target_length) -> Recipe
        used by training and prediction

Its top should import nothing heavy (JAX belongs inside `build`), for plans ask it which module
`encode` comes from.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from redco_flow import recipes

Example = Mapping[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """How texts are generated.

    Args:
        max_length: tokens to generate at most, the end token included.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
    """

    max_length: int
    num_beams: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """A paradigm's three functions around one model.

    Args:
        model: JSON that `build` makes the same model from again, without any file.
        init_params: (key) -> parameters drawn anew; can be jitted.
        abstract_params: () -> their shapes and dtypes, allocating nothing.
        load_params: (shardings) -> parameters read from the model's files, or None where the
            model has none and starts anew.
        collate_fn: examples -> arrays with a leading batch dim.
        loss_fn: (params, batch, rngs, is_training) -> (totals (B,), weights (B,)).
        make_pred_fn: Generation -> (params, batch, rngs) -> token ids (B, T).
        output_fn: token ids (B, T) -> texts.
        save_pretrained: (params, directory): write the model in Hugging Face's format.
    """

    model: Mapping[str, Any]
    init_params: Callable[[Any], Any]
    abstract_params: Callable[[], Any]
    load_params: Callable[[Any], Any] | None
    collate_fn: Callable[[Sequence[Example]], Batch]
    loss_fn: Callable[[Any, Batch, Any, bool], Any]
    make_pred_fn: Callable[[Generation], Callable[[Any, Batch, Any], Any]]
    output_fn: Callable[[Any], list[str]]
    save_pretrained: Callable[[Any, Path], None]


def recipe_module(name: str) -> str:
    """Return a recipe's dotted module: its name in this package, or `name` when dotted."""
    return name if "." in name else f"{recipes.__name__}.{name}"


def find_recipe(name: str) -> ModuleType:
    """Import a recipe.

    Raises:
        ValueError: there is no such module, or it lacks `encode` or `build`.
    """
    try:
        module = importlib.import_module(recipe_module(name))
    except ModuleNotFoundError as error:
        raise ValueError(f"the recipe '{name}' cannot be imported: {error}") from error
    missing = [function for function in ("encode", "build") if not hasattr(module, function)]
    if missing:
        raise ValueError(f"the recipe module '{name}' lacks {' and '.join(missing)}.")
    return module
