"""The functions of an encoder-decoder trained on pairs of texts.

Brings together a model family, a tokenizer and the engine's three functions. Refuses to know
devices, files of data and training schedules.
Dims in this file: B batch, S source, T target, V vocabulary.
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

from redco_flow.engine.loss import IGNORED_LABEL, PerExample, cross_entropy
from redco_flow.models.find import find_model
from redco_flow.models.generation import generate
from redco_flow.models.pretrained import (
    find_checkpoint,
    load_pretrained,
    read_model,
    save_pretrained,
)
from redco_flow.recipes.recipe import Batch, Example, Generation, Recipe
from redco_flow.recipes.text_tokenizer import TextTokenizer

DEFAULT_FAMILY = "t5"
_VOCAB_MULTIPLE = 8


@dataclass(frozen=True)
class _Model:
    """A family with one configuration, and where its parameters lie, if they do."""

    family: str
    module: ModuleType
    config: Any
    directory: Path | None


def build_encoder_decoder(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make the recipe; see `text_to_text.build`."""
    found = _find_model(model, tokenizer)
    module, config = found.module, found.config
    _check_tokenizer(config, tokenizer)
    return Recipe(
        model={
            "family": found.family,
            "config": _plain_config(config),
            "dtype": config.dtype,
        },
        init_params=partial(module.init_params, config),
        abstract_params=partial(module.abstract_params, config),
        load_params=_loader(found),
        collate_fn=partial(
            collate,
            source_length=source_length,
            target_length=target_length,
            vocab_size=config.vocab_size,
            pad_id=config.pad_token_id,
            start_id=config.decoder_start_token_id,
        ),
        loss_fn=partial(_loss, module, config),
        make_pred_fn=partial(_make_pred_fn, module, config),
        output_fn=partial(_texts, tokenizer),
        save_pretrained=partial(_save, module, config),
    )


def collate(
    examples: Sequence[Example],
    *,
    source_length: int,
    target_length: int,
    vocab_size: int,
    pad_id: int,
    start_id: int,
) -> Batch:
    """Pad examples to one shape and shift the targets right, once.

    Returns:
        input_ids, attention_mask (B, S); decoder_input_ids, labels (B, T), int32. Labels are the
        target ids as they are, IGNORED_LABEL after them; decoder inputs are the start token and
        all labels but the last.

    Raises:
        ValueError: a token id outside the vocabulary, or more tokens than the batch is wide.
    """
    sources = [_checked(example, "source_ids", source_length, vocab_size) for example in examples]
    targets = [_checked(example, "target_ids", target_length, vocab_size) for example in examples]
    labels = _padded(targets, target_length, IGNORED_LABEL)
    shifted = np.full_like(labels, start_id)
    shifted[:, 1:] = np.where(labels[:, :-1] == IGNORED_LABEL, pad_id, labels[:, :-1])
    lengths = np.array([len(ids) for ids in sources])
    return {
        "input_ids": _padded(sources, source_length, pad_id),
        "attention_mask": (np.arange(source_length) < lengths[:, None]).astype(np.int32),
        "decoder_input_ids": shifted,
        "labels": labels,
    }


def _checked(example: Example, key: str, length: int, vocab_size: int) -> NDArray[np.int32]:
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


def _padded(rows: Sequence[NDArray[np.int32]], length: int, fill: int) -> NDArray[np.int32]:
    padded = np.full((len(rows), length), fill, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded


def _loss(
    module: ModuleType,
    config: Any,
    params: Any,
    batch: Mapping[str, jax.Array],
    rngs: jax.Array,
    is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
) -> PerExample:
    """Summed cross-entropy and number of target tokens of each example."""
    logits = module.apply(
        config,
        params,
        batch["input_ids"],
        batch["attention_mask"],
        batch["decoder_input_ids"],
        rngs=rngs if is_training else None,
    )
    return cross_entropy(logits, batch["labels"])


def _make_pred_fn(
    module: ModuleType, config: Any, generation: Generation
) -> Callable[[Any, Mapping[str, jax.Array], jax.Array], jax.Array]:
    def pred_fn(params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array) -> jax.Array:
        del rngs  # greedy and beam search draw nothing
        return generate(
            module,
            config,
            params,
            batch["input_ids"],
            batch["attention_mask"],
            max_new_tokens=generation.max_length,
            num_beams=generation.num_beams,
            length_penalty=generation.length_penalty,
        ).tokens

    return pred_fn


def _texts(tokenizer: TextTokenizer, tokens: NDArray[np.int32]) -> list[str]:
    """Decode (B, T) ids up to each row's end token; ids that are no token say nothing."""
    rows = []
    for row in np.asarray(tokens).tolist():
        end = row.index(tokenizer.eos_id) if tokenizer.eos_id in row else len(row)
        rows.append([token for token in row[:end] if token < tokenizer.vocab_size])
    return tokenizer.decode_batch(rows)


def _find_model(model: Mapping[str, Any], tokenizer: TextTokenizer) -> _Model:
    dtype = model.get("dtype") or "float32"
    changes = dict(model.get("config") or {})
    if not model.get("name_or_path"):
        family = model.get("family") or DEFAULT_FAMILY
        module = find_model(family)
        config = module.Config(dtype=dtype).updated(_anew(changes, tokenizer))
        return _Model(family, module, config, None)
    directory = find_checkpoint(str(model["name_or_path"]))
    is_new = bool(model.get("from_scratch"))
    if is_new:
        changes = _anew(changes, tokenizer)
    module, config = read_model(
        directory, family=model.get("family"), overrides=changes, dtype=dtype
    )
    family = model.get("family") or module.__name__.rpartition(".")[2]
    return _Model(family, module, config, None if is_new else directory)


def _anew(changes: Mapping[str, Any], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The config of a model that starts with nothing: its vocabulary is the tokenizer's."""
    # A multiple of 8 lets up to 8 model shards split the table evenly.
    size = -(-tokenizer.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return {
        "vocab_size": size,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.pad_id,
        **changes,
    }


def _check_tokenizer(config: Any, tokenizer: TextTokenizer) -> None:
    if config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {config.vocab_size}, and the tokenizer has "
            f"{tokenizer.vocab_size} tokens: give the model its own tokenizer, or a larger "
            "vocab_size when it starts from scratch."
        )
    for name, token in (("pad_token_id", tokenizer.pad_id), ("eos_token_id", tokenizer.eos_id)):
        if getattr(config, name) != token:
            raise ValueError(
                f"the model's {name} is {getattr(config, name)}, the tokenizer's is {token}: "
                "the data was preprocessed with a tokenizer that is not this model's."
            )


def _plain_config(config: Any) -> dict[str, Any]:
    """The config as `_find_model` takes it back: every field but what `dtype` says."""
    values = dataclasses.asdict(config)
    del values["dtype"]
    return values


def _loader(model: _Model) -> Callable[[Any], Any] | None:
    if model.directory is None:
        return None
    return partial(load_pretrained, model.directory, model.module, model.config)


def _save(module: ModuleType, config: Any, params: Any, directory: Path) -> None:
    save_pretrained(directory, module, config, params)
