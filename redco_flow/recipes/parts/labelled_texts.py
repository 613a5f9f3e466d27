"""The functions of a model that gives a text, or a pair of texts, a class or a number.

Brings together a model family with a head of labels, a tokenizer and the engine's three functions.
Dims in this file: B batch, T tokens of a row, C labels, N examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.step.loss import PerExample, cross_entropy
from redco_flow.models import classifier
from redco_flow.models.classifier import ClassifierConfig
from redco_flow.models.families.encoders import BertFamilyConfig
from redco_flow.models.hub.pretrained import save_pretrained
from redco_flow.recipes.parts.model import (
    ChosenModel,
    Row,
    check_class_order,
    checked_ids,
    choose_model,
    decoder_tokens,
    padded,
    rounded_up,
    with_changes,
)
from redco_flow.recipes.recipe import (
    CLASSES,
    LABELS,
    Batch,
    Class,
    Collate,
    Example,
    Recipe,
)
from redco_flow.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths


@dataclass(frozen=True)
class Task:
    """The target of a text: a class or a number.

    Args:
        classes: of which it is one; none: a number.
    """

    classes: tuple[Class, ...]

    def labels(self, examples: Sequence[Example]) -> np.ndarray:
        """Return the examples' classes as numbers (B,) int32, or what they measure, float32.

        Raises:
            ValueError: a class that is none of the model's.
        """
        texts = [example["references"][0] for example in examples]
        if not self.classes:
            return np.array(texts, np.float32)
        numbers = {str(name): number for number, name in enumerate(self.classes)}
        if strange := sorted({*texts} - {*numbers}):
            raise ValueError(f"the model was made for other classes than {', '.join(strange)}.")
        return np.array([numbers[text] for text in texts], np.int32)

    def loss(self, scores: jax.Array, labels: jax.Array) -> PerExample:
        """Return each example's cross-entropy or squared error, and its weight, 1."""
        if self.classes:
            return cross_entropy(scores, labels)
        return jnp.square(scores[:, 0] - labels), jnp.ones_like(labels)

    def predicted(self, scores: jax.Array) -> jax.Array:
        """Return the likeliest class's number, or what is measured, (B,)."""
        return jnp.argmax(scores, axis=-1) if self.classes else scores[:, 0]

    def outputs(self, predicted: Any) -> list[Class | float]:
        """Return names of classes, or numbers."""
        values = np.asarray(predicted).tolist()
        return [self.classes[value] for value in values] if self.classes else values


@dataclass(frozen=True)
class _Rows:
    """Collates examples into rows: the first text with its template, then the second one."""

    config: ClassifierConfig
    task: Task
    vocab_size: int
    source_length: int
    target_length: int

    @property
    def width(self) -> int:
        """T of the longest row."""
        return rounded_up(self.source_length + self.target_length)

    def collate(self, examples: Sequence[Example], width: int) -> Batch:
        """Return input_ids, attention_mask and, of encoders that tell texts apart, token_type_ids.

        All (B, T) int32, padded on the right; and labels (B,).

        Raises:
            ValueError: a token id outside the vocabulary, or more tokens than the batch is wide.
        """
        firsts = [self._ids(example, "source_ids", width) for example in examples]
        seconds = [self._ids(example, "target_ids", width) for example in examples]
        rows = [np.concatenate(pair) for pair in zip(firsts, seconds, strict=True)]
        for example, row in zip(examples, rows, strict=True):
            if len(row) > width:
                name = example.get("row_id", "an example")
                raise ValueError(f"{name} has {len(row)} tokens; batches are {width} wide.")
        starts, ends = (np.array([len(ids) for ids in of])[:, None] for of in (firsts, rows))
        places = np.arange(width)
        batch = {
            "input_ids": padded(rows, width, self.config.inner.filler_token_id),
            "attention_mask": (places < ends).astype(np.int32),
            "labels": self.task.labels(examples),
        }
        if self.config.num_token_types > 1:
            is_second = (places >= starts) & (places < ends)
            batch["token_type_ids"] = is_second.astype(np.int32)
        return batch

    def _ids(self, example: Example, key: str, width: int) -> Row:
        return checked_ids(example, key, width, self.vocab_size)


def build_labelled_texts(
    model: Mapping[str, Any],
    tokenizer: TextTokenizer,
    task: Task,
    *,
    source_length: int,
    target_length: int,
) -> Recipe:
    """Make the recipe; see `recipes.classification.build`."""
    special_tokens = decoder_tokens(tokenizer)
    chosen = choose_model(model, tokenizer, recipe="classification", special_tokens=special_tokens)
    chosen = _padded_apart(chosen, tokenizer)
    check_class_order(chosen, task.classes)
    config = ClassifierConfig.of(chosen.family, chosen.config, task.classes)
    rows = _Rows(config, task, chosen.config.vocab_size, source_length, target_length)
    _check_positions(config, source_length + target_length)

    settings = {"settings": {CLASSES: list(task.classes)}} if task.classes else {}

    def collate_to(widths: Sequence[int]) -> Collate:
        (width,) = widths
        return partial(rows.collate, width=width)

    def scores(params: Any, batch: Batch, _rngs: Any) -> jax.Array:
        return _scores(config, params, batch, None)

    def pred_fn(params: Any, batch: Batch, rngs: Any) -> jax.Array:
        return task.predicted(scores(params, batch, rngs))

    def with_config(changes: Mapping[str, Any]) -> Recipe:
        lengths = {"source_length": source_length, "target_length": target_length}
        return build_labelled_texts(with_changes(model, changes), tokenizer, task, **lengths)

    return Recipe(
        model={**chosen.record, LABELS: list(task.classes), **settings},
        init_params=partial(classifier.init_params, config),
        abstract_params=partial(classifier.abstract_params, config),
        load_params=_load_params(chosen, config),
        head_parts=classifier.head_parts(config, chosen.directory),
        drawn_parts=_drawn_parts(chosen, config),
        collate_fn=collate_to((rows.width,)),
        row_widths=_row_widths,
        collate_to=collate_to,
        loss_fn=partial(_loss, config, task),
        make_pred_fn=lambda _generation: pred_fn,
        output_fn=task.outputs,
        class_scores=scores if task.classes else None,
        save_pretrained=lambda params, directory: save_pretrained(
            directory, classifier, config, params
        ),
        with_config=with_config,
    )


def _load_params(chosen: ChosenModel, config: ClassifierConfig) -> Callable[[Any], Any] | None:
    if chosen.directory is None:
        return None
    return partial(classifier.load_params, config, chosen.directory)


def _drawn_parts(chosen: ChosenModel, config: ClassifierConfig) -> tuple[str, ...]:
    if chosen.directory is None:
        return ()
    return tuple(classifier.drawn_parts(config, chosen.directory))


def _row_widths(source_lengths: Lengths, target_lengths: Lengths) -> Lengths:
    """Both texts are in one row: (N, 1)."""
    return (source_lengths + target_lengths)[:, None]


def _scores(
    config: ClassifierConfig, params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array | None
) -> jax.Array:
    """Return (B, C)."""
    types = batch.get("token_type_ids")
    return classifier.apply(
        config, params, batch["input_ids"], batch["attention_mask"], types, rngs
    )


def _loss(
    config: ClassifierConfig,
    task: Task,
    params: Any,
    batch: Mapping[str, jax.Array],
    rngs: jax.Array,
    is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
) -> PerExample:
    """Return each example's loss and its weight, 1."""
    scores = _scores(config, params, batch, rngs if is_training else None)
    return task.loss(scores, batch["labels"])


def _padded_apart(chosen: ChosenModel, tokenizer: TextTokenizer) -> ChosenModel:
    """Return a decoder whose padding is not a token that texts end with.

    transformers scores the last token that is not padding, so there such an end would not count.
    """
    config, ids = chosen.config, tokenizer.backend.encode("a").ids
    is_encoder = isinstance(config, BertFamilyConfig)
    if is_encoder or not ids or config.filler_token_id != ids[-1] or tokenizer.pad_id == ids[-1]:
        return chosen
    return replace(chosen, config=config.updated({"pad_token_id": tokenizer.pad_id}))


def _check_positions(config: ClassifierConfig, length: int) -> None:
    """Refuse rows beyond a learned table of positions, whose last would be read for all."""
    if length > config.max_length:
        raise ValueError(
            f"the texts have up to {length} tokens, and the model's learned positions reach "
            f"{config.max_length}: lower max_source_length."
        )
