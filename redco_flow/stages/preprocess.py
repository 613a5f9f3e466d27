"""preprocess: raw rows in, a dataset of token ids with its tokenizer out.

Light at the top, for plans read its Config; the work is in `encode_dataset`, imported when it
runs. Equal inputs give a byte-identical dataset, whatever the number of workers and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from redco_flow.recipes.recipe import find_own_recipe, find_recipe
from redco_flow.spec.model import Placement, PositiveInt, Scalar, Text
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.spec.stage_kind import StageConfig
from redco_flow.stages import data_source
from redco_flow.stages.context import Shard, StageContext, StageOutputs
from redco_flow.stages.data_heads import head_problems
from redco_flow.stages.local_model import tokenizer_files

SECTIONS = ("recipe", "model", "data")
OUTPUTS = {"dataset": "dataset"}


class TokenizerModel(ModelSection):
    """The model section as preprocessing sees it: only whose tokenizer it is."""

    reads_weights: ClassVar[bool] = False

    family: Annotated[Text | None, Placement()] = None
    config: Annotated[dict[str, Scalar], Placement()] = Field(default_factory=dict)
    dtype: Annotated[Literal["float32", "bfloat16"], Placement()] = "float32"
    from_scratch: Annotated[bool, Placement()] = False


class Config(StageConfig):
    """Preprocessing.

    Args:
        recipe: the pipeline's own where the stage does not say it.
        model, data: the pipeline's sections of these names, with changes for this stage.
        max_source_length, max_target_length: in tokens, the end token included; more is cut off.
            Plain texts are cut into pieces of max_target_length, of which each is an example.
        num_workers: processes that encode.
        num_shards: parts that are encoded by tasks of their own where the executor has job arrays
            (Slurm); elsewhere one job encodes all.
    """

    recipe: Text = "text_to_text"
    model: TokenizerModel = TokenizerModel()
    data: DataSection
    max_source_length: Annotated[int, Field(ge=2)] = 512
    max_target_length: Annotated[int, Field(ge=2)] = 128
    num_workers: Annotated[PositiveInt, Placement()] = 1
    num_shards: Annotated[PositiveInt, Placement()] = 1

    @field_validator("data")
    @classmethod
    def _can_be_read(cls, data: DataSection, info: ValidationInfo) -> DataSection:
        recipe = find_own_recipe(info.data.get("recipe", ""))
        problem = data_source.problem_of(data) or (recipe and problem_of_texts(data, recipe))
        if problem:
            raise ValueError(problem)
        model = info.data.get("model")
        if model is not None and model.name_or_path is None and data.tokenizer is None:
            raise ValueError(
                "there is no tokenizer: give data.tokenizer: {train: {vocab_size: 4096}}, or "
                "data.tokenizer.name_or_path, or a model.name_or_path that has one."
            )
        return data


def problem_of_texts(data: DataSection, recipe: ModuleType) -> str | None:
    """Say that a recipe takes no plain texts, where it is to."""
    if data.text_key is None or hasattr(recipe, "encode_texts"):
        return None
    name = recipe.__name__.rpartition(".")[2]
    return (
        f"'data.text_key' gives plain texts, and recipe '{name}' takes pairs: use recipe "
        "language_modeling, or data.source_key and data.target_key."
    )


def code_modules(config: Config) -> list[str]:
    """The module that encodes, and the one that makes rows, if one does."""
    encoder = find_recipe(config.recipe).encode.__module__
    return [str(encoder), *data_source.data_modules(config.data)]


def data_files(config: Config) -> list[Path]:
    """The raw data, and a tokenizer that lies in a local directory."""
    return [*data_source.data_files(config.data), *tokenizer_files(config.model, config.data)]


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what the first rows of the data files show to be wrong, and the key that names them."""
    for key, problem in head_problems(config.data):
        yield ("data", key), problem


def data_identity(config: Config) -> dict[str, Any]:
    """What identifies data that is no file."""
    return data_source.data_identity(config.data)


def run(context: StageContext, config: Config) -> StageOutputs:
    """Read, check, split and encode the data."""
    return run_shard(context, config, Shard())()


def run_shard(context: StageContext, config: Config, shard: Shard) -> Callable[[], StageOutputs]:
    """Read and check all the data, encode a part of it; return what joins all parts."""
    from redco_flow.stages.encode_dataset import encode_shard

    return encode_shard(context, config, shard)
