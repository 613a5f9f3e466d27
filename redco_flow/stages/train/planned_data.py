"""The recipe and the widest batch of a training before any weights are read.

Of a dataset that is published they are those of the training. Without one, rows are as long as the
settings allow, and the vocabulary of a tokenizer that preprocessing trains has its largest size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redco_flow.errors import RedcoFlowError
from redco_flow.recipes.declared import DEFAULT_MAX_LENGTH, DeclaredRecipe
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import CLASSES, Class, Recipe, TokenLengths
from redco_flow.spec.recipe_settings import values_of
from redco_flow.stages.artifacts.arrow_split import Added
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.reference_scores import ANSWERS
from redco_flow.stages.artifacts.tokenizer import save_pretrained_tokenizer, tokenizer_source
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.data import read_training_data
from redco_flow.stages.train.run import model_with_settings, row_lengths, validation_examples
from redco_flow.text.tokenizer import TextTokenizer

ONLY_SHAPES = {"only_shapes": True}
_WIDTH_MULTIPLE = 8


class CannotPlan(RedcoFlowError):
    """A training's rows or vocabulary are not known before its dataset is made."""

    exit_code = 2

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: run the pipeline with --until up to its dataset, then plan.")


@dataclass(frozen=True)
class PlannedData:
    """A recipe without weights, and a batch of one row.

    Args:
        batch, widest_batch: as of `plan_training`.
        num_steps: of the training; None where it is not known.
        notes: what is assumed.
        is_pretrained: whether the training begins with parameters that were trained.
    """

    recipe: Recipe
    batch: Mapping[str, Any]
    widest_batch: Mapping[str, Any]
    num_steps: int | None
    notes: tuple[str, ...] = ()
    is_pretrained: bool = False


def of_dataset(path: Path, config: Config, inputs: Collection[str] = ()) -> PlannedData:
    """Read what a published dataset says.

    Args:
        inputs: names of the training's inputs.
    """
    dataset = DatasetArtifact(path)
    if "reference_scores" in inputs:
        dataset = DatasetArtifact(path, _scores_of(dataset))
    model = model_with_settings(config, dataset.summary.classes) | ONLY_SHAPES
    texts = dataset.texts(*row_lengths(dataset, config))
    recipe = find_recipe(config.recipe).make(model, texts)
    data = read_training_data(dataset, recipe, config, validation_examples(dataset, config))
    num_steps = config.max_steps or config.num_epochs * data.steps_per_epoch(config)
    batches = (data.first_batch(recipe), data.widest_batch())
    known = _is_pretrained(config, inputs)
    is_bucketed = config.batching.type == "bucketed"
    notes = ("rows are as long as in the widest bucket",) if is_bucketed else ()
    return PlannedData(recipe, *batches, num_steps, notes, is_pretrained=known)


def _scores_of(dataset: DatasetArtifact) -> dict[str, Added]:
    """Return columns like those of `reference_scores`; only that they are there matters."""
    splits = {name: len(dataset.split(name)) for name in dataset.summary.splits}
    return {
        split: {f"reference_{answer}": [0.0] * number for answer in ANSWERS}
        for split, number in splits.items()
    }


def _is_pretrained(config: Config, inputs: Collection[str]) -> bool:
    is_published = config.model.name_or_path is not None and not config.model.from_scratch
    return is_published or "start_from" in inputs


def of_settings(config: Config, preprocessing: Any, inputs: Collection[str] = ()) -> PlannedData:
    """Take the settings' maxima of a dataset that is still to be made.

    Args:
        preprocessing: the Config of the stage that makes it.
        inputs: names of the training's inputs.

    Raises:
        CannotPlan: the settings are not enough.
    """
    declared = find_recipe(config.recipe)
    if declared.is_of_rows or not hasattr(preprocessing, "max_target_length"):
        raise CannotPlan(f"the rows of recipe '{config.recipe}' are known from the dataset alone")
    tokenizer, notes = _tokenizer(preprocessing)
    lengths = _lengths(config, declared, preprocessing)
    classes, more = _classes(config, declared)
    notes += more
    model = model_with_settings(config, classes) | ONLY_SHAPES
    recipe = declared.make(model, TokenLengths(tokenizer, *lengths))
    end = [tokenizer.eos_id]
    example = {
        "row_id": "planned",
        "source_ids": end if lengths[0] else [],
        "target_ids": end * min(2, lengths[1]),
        "references": [str(classes[0]) if classes else "0"],
    }
    widths = _widths(recipe, config, lengths)
    if config.batching.type == "packed":
        if recipe.collate_packed is None:
            raise CannotPlan(f"recipe '{config.recipe}' cannot put several examples into one row")
        widest: Mapping[str, Any] = recipe.collate_packed(widths[0])([[example]])
    else:
        widest = recipe.collate_wide(widths)([example])
    notes += (f"rows are as long as the settings allow: {' + '.join(map(str, widths))} tokens",)
    first = recipe.collate_fn([example])
    known = _is_pretrained(config, inputs)
    return PlannedData(recipe, first, widest, config.max_steps, notes, is_pretrained=known)


def _tokenizer(preprocessing: Any) -> tuple[TextTokenizer, tuple[str, ...]]:
    """Return the tokenizer that preprocessing will take, or one of the size that it will train."""
    section = preprocessing.data.tokenizer
    if section is not None and section.train is not None:
        size = section.train.vocab_size
        note = f"the vocabulary has its largest size, {size:,} tokens"
        return _tokenizer_of_size(size), (note,)
    source = tokenizer_source(preprocessing.model, preprocessing.data)
    if source is None:
        raise CannotPlan("the tokenizer comes from another stage (tokenizer_of)")
    revision = (section or preprocessing.model).revision
    with tempfile.TemporaryDirectory(prefix="redco-flow-tokenizer-") as folder:
        save_pretrained_tokenizer(source, Path(folder), revision=revision)
        return TextTokenizer.load(Path(folder)), ()


def _tokenizer_of_size(size: int) -> TextTokenizer:
    from tokenizers import Tokenizer, models

    vocabulary = {str(number): number for number in range(size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="2"))  # noqa: S106 (a number)
    return TextTokenizer(backend, pad_id=0, eos_id=1)


def _lengths(config: Config, declared: DeclaredRecipe, preprocessing: Any) -> tuple[int, int]:
    """Return the most tokens that a source and a target can have."""
    if config.batching.window_length is not None:
        return 1, config.batching.window_length  # as of a dataset's windows
    if declared.takes_conversations:
        longest = _rounded_up(preprocessing.max_length or DEFAULT_MAX_LENGTH)
        return longest, longest
    source, target = preprocessing.max_source_length, preprocessing.max_target_length
    if preprocessing.data.text_key is not None:
        source = 0
    return _rounded_up(source), _rounded_up(target) if declared.makes_texts else 0


def _classes(
    config: Config, declared: DeclaredRecipe
) -> tuple[list[Class] | None, tuple[str, ...]]:
    if declared.targets != CLASSES:
        return None, ()
    if named := values_of(config.settings).get(CLASSES):
        return list(named), ()
    return ["0", "1"], ("the data name the classes; the head has two here",)


def _widths(recipe: Recipe, config: Config, lengths: tuple[int, int]) -> list[int]:
    """Return how wide the widest batch is."""
    if config.batching.packed_length is not None:
        return [config.batching.packed_length]
    named = dict(zip(("source_ids", "target_ids"), lengths, strict=True))
    found = recipe.widths_of(lambda column: np.array([named[column]]))
    return [_rounded_up(width) for width in found[0].tolist()]


def _rounded_up(length: int) -> int:
    return -(-length // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
