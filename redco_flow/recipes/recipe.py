"""What a recipe is, and how one is found by the name that stands in YAML.

A recipe is one module of this package, or any importable dotted module:

    encode(sources, targets, tokenizer, *, source_prefix, source_suffix, max_source_length,
           max_target_length) -> EncodedPairs; used by preprocessing
    build(model, tokenizer, *, source_length, target_length) -> Recipe
        used by training and prediction

and, where they apply:

    encode_texts(texts, tokenizer, *, max_length) -> EncodedPairs; it takes plain texts too
    FAMILIES, DEFAULT_FAMILY: the model families that it trains, and which where nothing says it
    CAN_PACK: whether several examples can share a row (`Recipe.collate_packed`)
    MEASURES_PERPLEXITY: whether `perplexity` stands beside `eval_loss`

Its top should import nothing heavy (JAX belongs inside `build`), for plans ask it which module
`encode` comes from.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from redco_flow import recipes
from redco_flow.spec.names import import_named

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Lengths = NDArray[np.int64]

Example = Mapping[str, Any]
Batch = dict[str, Any]
Collate = Callable[[Sequence[Example]], Batch]
CollatePacked = Callable[[Sequence[Sequence[Example]]], Batch]


@dataclass(frozen=True)
class RandomChoice:
    """How the model's distribution is changed before a token is drawn from it.

    Args:
        temperature: what logits are divided by; towards 0 the likeliest token wins.
        top_k: only so many of the likeliest tokens may be drawn; None: all.
        top_p: of those, only the fewest likeliest whose probabilities reach this sum.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


@dataclass(frozen=True)
class Generation:
    """How texts are generated.

    Args:
        max_length: tokens to generate at most, the end token included.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
        sampling: draw tokens, by each example's own key, instead of searching.
    """

    max_length: int
    num_beams: int = 1
    length_penalty: float = 1.0
    sampling: RandomChoice | None = None


@dataclass(frozen=True)
class Recipe:
    """A paradigm's three functions around one model.

    Args:
        model: JSON that `build` makes the same model from again, without any file.
        init_params: (key) -> parameters drawn anew; can be jitted.
        abstract_params: () -> their shapes and dtypes, allocating nothing.
        load_params: (shardings) -> parameters read from the model's files, or None where the
            model has none and starts anew.
        collate_fn: examples -> arrays with a leading batch dim, padded to the longest lengths.
        collate_prompts: examples -> what `make_pred_fn`'s functions take, padded to the longest
            length.
        row_widths: (tokens of each source (N,), of each target (N,)) -> (N, D): how wide a batch
            must be for each example, in each of the D dims that are padded.
        collate_to: (D widths) -> a collate_fn that pads to those.
        collate_packed: (width) -> lists of examples -> arrays in which each list shares a row;
            None where examples cannot share one.
        loss_fn: (params, batch, rngs, is_training) -> (totals (B,), weights (B,)), and what else
            is measured as a third, {name: totals (B,)}.
        make_pred_fn: Generation -> (params, batch, rngs) -> token ids (B, T).
        output_fn: token ids (B, T) -> texts.
        save_pretrained: (params, directory): write the model in Hugging Face's format.
        prompt_widths: (tokens of each source (N,)) -> (N, D): how wide a batch of prompts must be
            for each example; None where all such batches are as wide as `collate_prompts`'.
        collate_prompts_to: (D widths) -> a collate_prompts that pads to those; None likewise.
    """

    model: Mapping[str, Any]
    init_params: Callable[[Any], Any]
    abstract_params: Callable[[], Any]
    load_params: Callable[[Any], Any] | None
    collate_fn: Collate
    collate_prompts: Collate
    row_widths: Callable[[Lengths, Lengths], Lengths]
    collate_to: Callable[[Sequence[int]], Collate]
    collate_packed: Callable[[int], CollatePacked] | None
    loss_fn: Callable[[Any, Batch, Any, bool], Any]
    make_pred_fn: Callable[[Generation], Callable[[Any, Batch, Any], Any]]
    output_fn: Callable[[Any], list[str]]
    save_pretrained: Callable[[Any, Path], None]
    prompt_widths: Callable[[Lengths], Lengths] | None = None
    collate_prompts_to: Callable[[Sequence[int]], Collate] | None = None


def find_own_recipe(name: str) -> ModuleType | None:
    """Import a recipe of this package, which is light; None for another's, and for none."""
    if not name.isidentifier() or importlib.util.find_spec(recipe_module(name)) is None:
        return None
    module = importlib.import_module(recipe_module(name))
    return module if hasattr(module, "build") else None


def family_problem(recipe: ModuleType, family: str) -> str | None:
    """Say why a recipe does not train a family, or None where it does."""
    trained = getattr(recipe, "FAMILIES", (family,))
    if family in trained:
        return None
    name = recipe.__name__.removesuffix(".config").rpartition(".")[2]
    others = [
        other
        for other in ("text_to_text", "language_modeling")
        if other != name and family in importlib.import_module(recipe_module(other)).FAMILIES
    ]
    advice = f"; for '{family}' use recipe {others[0]}" if others else ""
    return f"recipe '{name}' trains {', '.join(trained)}, and not '{family}'{advice}."


def recipe_module(name: str) -> str:
    """Return a recipe's dotted module: its name in this package, or `name` when dotted."""
    return name if "." in name else f"{recipes.__name__}.{name}"


def find_recipe(name: str) -> ModuleType:
    """Import a recipe.

    Raises:
        ValueError: there is no such module, or it lacks `encode` or `build`.
    """
    try:
        module = import_named(recipe_module(name))
    except ValueError as error:
        raise ValueError(f"recipe '{name}': {error}") from error
    missing = [function for function in ("encode", "build") if not hasattr(module, function)]
    if missing:
        raise ValueError(f"the recipe module '{name}' lacks {' and '.join(missing)}.")
    return module
