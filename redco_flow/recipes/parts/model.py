"""The model that a pipeline's `model` section means: its family, its config, where it lies.

What every recipe does with a model, whatever its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from redco_flow.hub import download_model, is_hub_name
from redco_flow.local_paths import expanded, is_folder
from redco_flow.models.classifier import published_labels
from redco_flow.models.find import FAMILIES, find_model
from redco_flow.models.generation.generate import LogitsProcessing, Sampling, generate
from redco_flow.models.hub.model_files import (
    CONFIG_FILE,
    CONFIG_FILES,
    WEIGHT_PATTERNS,
    has_weights,
)
from redco_flow.models.hub.pretrained import (
    load_pretrained,
    model_type,
    read_model,
    save_pretrained,
)
from redco_flow.recipes.declared import DeclaredRecipe
from redco_flow.recipes.find import family_problem, find_recipe
from redco_flow.recipes.recipe import Example, Generation
from redco_flow.records import read_json
from redco_flow.text.tokenizer import TextTokenizer

_MULTIPLE = 8


@dataclass(frozen=True)
class ChosenModel:
    """A family with one configuration, and where its parameters lie, if they do."""

    family: str
    module: Any  # of `models.find.find_model`
    config: Any
    directory: Path | None

    @property
    def record(self) -> dict[str, Any]:
        """JSON that `choose_model` makes the same model from again, without any file."""
        values = dataclasses.asdict(self.config)
        dtype = values.pop("dtype")
        if values.get("attention") in ("splash", "cudnn", "triton"):
            # Of the devices that trained; what reads the checkpoint may run on others.
            values["attention"] = "auto"
        return {"family": self.family, "config": values, "dtype": dtype}

    @property
    def load_params(self) -> Callable[[Any], Any] | None:
        """(shardings) -> the parameters; None where the model starts with nothing."""
        if self.directory is None:
            return None
        return partial(load_pretrained, self.directory, self.module, self.config)

    def save(self, params: Any, directory: Path) -> None:
        """Write the model in Hugging Face's format."""
        save_pretrained(directory, self.module, self.config, params)


def choose_model(
    model: Mapping[str, Any],
    tokenizer: TextTokenizer,
    *,
    recipe: str,
    special_tokens: Mapping[str, int],
) -> ChosenModel:
    """Find the family and make the config.

    Args:
        model: the keys of a pipeline's `model` section, or a `Recipe.model` of before.
        recipe: a recipe of this package, which has a default family and trains certain ones.
        special_tokens: the token ids of a config that starts with nothing.

    Raises:
        ValueError: an unknown family or config key, a family that the recipe does not train, or a
            vocabulary smaller than the tokenizer's.
    """
    found = choose_sized_model(
        model, recipe=recipe, sizes=sized_for(tokenizer) | dict(special_tokens)
    )
    check_vocabulary(found, tokenizer)
    return found


def choose_sized_model(
    model: Mapping[str, Any], *, recipe: str, sizes: Mapping[str, Any]
) -> ChosenModel:
    """Find the family and make the config of a model of any data.

    Args:
        model, recipe: as of `choose_model`; where the key `only_shapes` is true, no weights are
            needed, nor loaded.
        sizes: what the data ask of a config that starts with nothing.

    Raises:
        ValueError: an unknown family or config key, or a family that the recipe does not train.
    """
    declared = find_recipe(recipe)
    dtype = model.get("dtype") or "float32"
    changes = dict(model.get("config") or {})
    anew = _merged(sizes, changes)
    if not model.get("name_or_path"):
        family = model.get("family") or declared.default_family
        assert family is not None, "a recipe of this package has a default family"
        _check_family(declared, family)
        module = find_model(family)
        config = module.Config(dtype=dtype).updated(anew)
        return ChosenModel(family, module, config, None)
    is_new = bool(model.get("from_scratch"))
    is_loaded = not (is_new or model.get("only_shapes"))
    directory = find_checkpoint(
        str(model["name_or_path"]), revision=model.get("revision"), with_weights=is_loaded
    )
    family = model.get("family") or model_type(directory)
    _check_family(declared, family)
    module, config = read_model(
        directory, family=family, overrides=anew if is_new else changes, dtype=dtype
    )
    return ChosenModel(family, module, config, directory if is_loaded else None)


def decoder_tokens(tokenizer: TextTokenizer) -> dict[str, int]:
    """Return the special tokens of a decoder-only model that starts with nothing."""
    return {
        "bos_token_id": tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def sized_for(tokenizer: TextTokenizer) -> dict[str, int]:
    """Return the size of a vocabulary that a model which starts with nothing has.

    A multiple of 8 lets up to 8 model shards split the table evenly.
    """
    return {"vocab_size": rounded_up(tokenizer.vocab_size)}


def with_changes(model: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline's `model` section with these changes of the model's config, too."""
    return {**model, "config": {**(model.get("config") or {}), **changes}}


def _merged(sizes: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, of a part's config too; what is said by both is as the second says."""
    parts = {
        key: {**size, **changes[key]}
        for key, size in sizes.items()
        if isinstance(size, Mapping) and isinstance(changes.get(key), Mapping)
    }
    return {**sizes, **changes, **parts}


def _check_family(recipe: DeclaredRecipe, family: str) -> None:
    if family in FAMILIES and (problem := family_problem(recipe, family)):
        raise ValueError(problem)


def check_vocabulary(model: ChosenModel, tokenizer: TextTokenizer) -> None:
    """Raise ValueError if the tokenizer has ids that the model has not."""
    if model.config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {model.config.vocab_size}, and the tokenizer has "
            f"{tokenizer.vocab_size} tokens: give the model its own tokenizer, or a larger "
            "vocab_size when it starts from scratch."
        )


def end_ids(model: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every token that ends a model's texts, of a `Recipe.model`; none where it is unknown.

    Args:
        model: as `ChosenModel.record`, or read from a checkpoint's record.
    """
    config = model.get("config")
    found = config.get("eos_token_id") if isinstance(config, Mapping) else None
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def make_pred_fn(
    module: ModuleType, config: Any, generation: Generation
) -> Callable[[Any, Mapping[str, jax.Array], jax.Array], jax.Array]:
    """Return (params, batch, rngs (B,)) -> token ids (B, T), or (B, N, T) of several sequences.

    Raises:
        ValueError: a number of sampling or of the logits processors out of its range.
    """
    drawn = generation.sampling
    sampling = None
    if drawn is not None:
        sampling = Sampling(drawn.temperature, drawn.top_k, drawn.top_p)
    processing = LogitsProcessing(
        repetition_penalty=generation.repetition_penalty,
        no_repeat_ngram_size=generation.no_repeat_ngram_size,
        min_new_tokens=generation.min_new_tokens,
    )

    def pred_fn(params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array) -> jax.Array:
        return generate(
            module,
            config,
            params,
            batch["input_ids"],
            batch["attention_mask"],
            max_new_tokens=generation.max_length,
            num_beams=generation.num_beams,
            length_penalty=generation.length_penalty,
            early_stopping=generation.early_stopping,
            sampling=sampling,
            processing=processing,
            num_return_sequences=generation.num_return_sequences,
            rngs=rngs,
            on_token=generation.on_token,
        ).tokens

    return pred_fn


Row = NDArray[np.int32]


def rounded_up(size: int) -> int:
    """Return the next multiple of 8: of a vocabulary, or the width of a batch's rows."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def checked_ids(example: Example, key: str, length: int, vocab_size: int) -> Row:
    """Return an example's ids.

    Raises:
        ValueError: a token id outside the vocabulary, or more than `length` tokens.
    """
    ids = np.asarray(example[key], np.int32)
    name = example.get("row_id", "an example")
    if len(ids) > length:
        raise ValueError(f"{name}: {key} has {len(ids)} tokens; batches are {length} wide.")
    # JAX reads the nearest row of a table for an id outside it, silently.
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(
            f"{name}: {key} holds token id {bad}, outside the model's vocabulary of {vocab_size}: "
            "was the data preprocessed with another tokenizer?"
        )
    return ids


def padded(
    rows: Sequence[Row], length: int, fill: int, *, on_the_left: bool = False
) -> NDArray[np.int32]:
    """Return the rows as (B, T) of `length`."""
    found = np.full((len(rows), length), fill, np.int32)
    for row, ids in zip(found, rows, strict=True):
        start = length - len(ids) if on_the_left else 0
        row[start : start + len(ids)] = ids
    return found


def find_checkpoint(
    name_or_path: str, *, revision: str | None = None, with_weights: bool = True
) -> Path:
    """Return the directory of a model, downloading it first where it is a hub id.

    Args:
        revision: the hub's branch, tag or commit; None means main.
        with_weights: False needs the configuration alone.

    Raises:
        ValueError: neither a directory with a config.json nor a model that the hub, or its local
            cache, has.
    """
    path = expanded(name_or_path)
    if is_folder(path):
        if not (path / CONFIG_FILE).is_file():
            raise ValueError(f"model directory {path} has no {CONFIG_FILE}.")
        return path
    if not is_hub_name(name_or_path):
        raise ValueError(f"model directory {name_or_path} does not exist.")
    patterns = [*CONFIG_FILES, *(WEIGHT_PATTERNS if with_weights else ())]

    def is_whole(folder: Path) -> bool:
        return (folder / CONFIG_FILE).is_file() and (not with_weights or has_weights(folder))

    return download_model(name_or_path, revision, patterns, is_whole)


def check_class_order(chosen: ChosenModel, classes: Sequence[str | int]) -> None:
    """Refuse classes that a published head has in another order: its scores would be mixed up.

    Raises:
        ValueError: with both orders.
    """
    if chosen.directory is None:
        return
    labels = published_labels(read_json(chosen.directory / CONFIG_FILE))
    names = list(map(str, classes))
    if labels and labels != names and sorted(labels) == sorted(names):
        raise ValueError(
            f"the model's classes are {', '.join(labels)}, in this order, and the data's "
            f"{', '.join(names)}: give settings.classes in the model's order."
        )
