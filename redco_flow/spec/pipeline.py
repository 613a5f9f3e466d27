"""What a pipeline file may say: its top-level sections and what a stage asks of a machine.

The bodies of stages are typed by their kinds (`stage_kind.py`); here they are plain mappings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from redco_flow.spec.model import (
    DataFile,
    Fraction,
    Name,
    NonNegativeInt,
    OnlyWhereSet,
    Placement,
    PositiveFloat,
    PositiveInt,
    Revision,
    Scalar,
    StrictModel,
    Text,
)
from redco_flow.spec.schedule import ScheduleSection

SECTION_NAMES = ("recipe", "settings", "model", "data")
"""The top-level keys that a stage kind may take over as fields of its Config."""


class ModelSection(StrictModel):
    """Which model, from where, in which precision.

    Args:
        name_or_path: hub id, or a directory with config.json (and model.safetensors, tokenizer).
        revision: the hub's branch, tag or commit; None means main. A run's records have the commit.
        family: the model family, where config.json does not say it: a module of
            `redco_flow.models` such as t5, bart, llama, or the dotted name of one's own.
        config: changes to the model's configuration; all of it when there is no name_or_path.
            `remat` says what the backward pass computes again: `none`, `full` (each layer) or
            `minimal` (all but products with parameters; also called `dots`), or `auto` (the least
            that fits the devices' memory); `activations` what
            differs from it, by name: `layer_input`, `qkv`, `attention`, `attention_out`,
            `mlp_input`, `mlp_in`, `mlp_out`, each `keep`, `recompute`, `offload` (to the
            host's memory; `offload_share` of each device's tokens) or `split` (kept in parts by
            the model shards).
            `attention` is what computes attention: auto, xla, splash, cudnn or triton.
        dtype: the precision of the computation; parameters stay float32.
        from_scratch: take the architecture only, initialise the parameters anew.
    """

    reads_weights: ClassVar[bool] = True

    name_or_path: Text | None = None
    revision: Revision | None = None
    family: Text | None = None
    config: dict[str, Scalar | dict[str, Scalar]] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    from_scratch: bool = False

    @model_validator(mode="after")
    def _revision_of_something(self) -> ModelSection:
        if self.revision is not None and self.name_or_path is None:
            raise ValueError("'revision' is of a model on the hub, and there is no 'name_or_path'")
        return self


_OF_PAIRS = (
    "source_key",
    "pair_key",
    "target_key",
    "source_prefix",
    "source_suffix",
    "group_by_source",
)


class TokenizerTraining(StrictModel):
    """A tokenizer trained on the training split.

    Args:
        vocab_size: an upper limit; at least the 256 bytes and three special tokens.
        type: the algorithm of the `tokenizers` library.
    """

    vocab_size: Annotated[int, Field(ge=259)] = 4096
    type: Literal["unigram", "bpe"] = "unigram"


class TokenizerSection(StrictModel):
    """Exactly one of: a tokenizer by name or directory, or one trained on the data.

    Args:
        name_or_path: hub id, or a directory with tokenizer.json.
        revision: the hub's branch, tag or commit; None means main.
        train: trained on the training split.
    """

    name_or_path: Text | None = None
    revision: Revision | None = None
    train: TokenizerTraining | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> TokenizerSection:
        if (self.name_or_path is None) == (self.train is None):
            raise ValueError("give either 'name_or_path' or 'train', not both and not neither")
        if self.revision is not None and self.name_or_path is None:
            raise ValueError("'revision' is of a tokenizer on the hub, and this one is trained")
        return self


class DataSection(StrictModel):
    """Which rows, which of their fields, and which split each row belongs to.

    Args:
        dataset: hub id, file, directory (of data files or of images, in a folder for each class),
            or `python:module` with files() and rows(files).
        subset, revision: of a hub dataset; the revision is a branch, tag or commit, None is main.
        train, validation, test: csv, jsonl, parquet or arrow files.
        columns: of a recipe of rows: the data's column by the name that the recipe has for it.
        text_key: the field of plain texts, which have no source; instead of the next two.
        source_key, target_key: the fields of the input text and of the text to be produced, or of
            the label.
        pair_key: the field of a second input text, where a recipe takes pairs of texts.
        source_prefix, source_suffix: put around every source: an instruction, what a prompt ends
            with.
        group_by_source: evaluation splits get one row per source, all its targets as references.
        validation_fraction, test_fraction: share of the sources held out (by a hash of the
            source; of other rows, of the row) where no such split is given.
        on_bad_row: stop at a bad row with its file and line, or skip and count it.
        max_examples: the first ones of each split; None: all.
        tokenizer: None means the model's own.
    """

    dataset: Text | None = None
    subset: Text | None = None
    revision: Revision | None = None
    train: DataFile | None = None
    validation: DataFile | None = None
    test: DataFile | None = None
    columns: Annotated[dict[Text, Text], OnlyWhereSet()] = Field(default_factory=dict)
    text_key: Text | None = None
    source_key: Text = "source"
    pair_key: Annotated[Text | None, OnlyWhereSet()] = None
    target_key: Text = "target"
    source_prefix: str = ""
    source_suffix: str = ""
    group_by_source: bool = False
    validation_fraction: Fraction = 0.05
    test_fraction: Fraction = 0.0
    on_bad_row: Literal["error", "skip"] = "error"
    max_examples: PositiveInt | None = None
    tokenizer: TokenizerSection | None = None

    @model_validator(mode="after")
    def _texts_or_pairs(self) -> DataSection:
        if self.text_key is None:
            return self
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        useless = [name for name in _OF_PAIRS if getattr(self, name) != defaults[name]]
        if useless:
            raise ValueError(
                f"'text_key' says that rows are plain texts, and {', '.join(useless)} belong to "
                "pairs of source and target; give one or the other"
            )
        return self


class Resources(StrictModel):
    """What one stage asks of the machines; never part of a fingerprint.

    Args:
        num_hosts: machines of the job; training and prediction alone run on several.
        gpus_per_host: devices on each of them; 0 computes on CPUs, or on what JAX finds.
        cpus_per_host, memory_gib: None means what the profile's machine has.
        walltime_minutes: then the stage is asked to save and stop, and goes on in a new attempt;
            on Slurm in time before that. None means what the profile says.
    """

    num_hosts: Annotated[PositiveInt, Placement()] = 1
    gpus_per_host: Annotated[NonNegativeInt, Placement()] = 0
    cpus_per_host: Annotated[PositiveInt | None, Placement()] = None
    memory_gib: Annotated[PositiveFloat | None, Placement()] = None
    walltime_minutes: Annotated[PositiveInt | None, Placement()] = None


class PipelineSection(StrictModel):
    """The whole file, with the stages' bodies still untyped.

    Args:
        name: the pipeline's; run ids begin with it.
        description: for people.
        recipe: the paradigm: text_to_text, language_modeling, preference, classification,
            regression, image_classification, image_to_text, or one's own: python:MODULE or the
            dotted name of a module.
        settings: the recipe's, typed by its `Settings`.
        model: which model, from where, in which precision.
        data: which rows, which of their fields, which splits.
        tags: words for people; `ls` and the Prefect UI show them.
        schedule: when it runs again by itself; `redco-flow schedule add` makes it so.
        stages: by name; a stage that is named like a kind need not say its kind.
    """

    name: Name
    description: str = ""
    recipe: Text | None = None
    settings: Annotated[dict[str, Any], OnlyWhereSet()] = Field(default_factory=dict)
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    tags: list[Name] = Field(default_factory=list)
    schedule: ScheduleSection | None = None
    stages: dict[Name, dict[str, Any] | None] = Field(min_length=1)
