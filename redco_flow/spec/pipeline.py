"""The sections of a pipeline file, and the resources of a stage.

The bodies of stages are typed by their kinds (`stage_kind.py`); here they are plain mappings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from redco_flow.spec.bad_rows import OnBadRow
from redco_flow.spec.model import (
    ContentOrName,
    DataFiles,
    Fraction,
    Name,
    Names,
    NonNegativeInt,
    OnlyWhereSet,
    Placement,
    PositiveFloat,
    PositiveInt,
    Revision,
    Scalar,
    StrictModel,
    Text,
    absolute_template,
)
from redco_flow.spec.notify import NotifySection
from redco_flow.spec.raw_data import CsvDialect, SplitNames
from redco_flow.spec.schedule import ScheduleSection

SECTION_NAMES = ("recipe", "settings", "model", "data")
"""The top-level keys that a stage kind may take over as fields of its Config."""


class ModelSection(StrictModel):
    """The model: its source, its commit and its precision.

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
        from_scratch: take the architecture only, initialise the parameters randomly.
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
        type: the algorithm of the `tokenizers` library; of `character` each token is a character,
            and one that the training split lacks, or that is too rare, is unknown.
    """

    vocab_size: Annotated[int, Field(ge=259)] = 4096
    type: Literal["unigram", "bpe", "character"] = "unigram"


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


class MixturePart(StrictModel):
    """One dataset of a mixture.

    Args:
        dataset: a file, a directory, or `python:module` with files() and rows(files).
        weight: share of the training examples that are drawn from it, relative to the others'.
    """

    dataset: Text
    weight: PositiveFloat = 1.0


class DataSection(StrictModel):
    """The dataset: rows, fields and splits.

    Args:
        dataset: hub id, file, directory (of data files or of images, in a folder for each class),
            or `python:module` with files() and rows(files).
        mixture: several datasets by name, instead of one, of which training draws by weight.
        subset, revision: of a hub dataset; the revision is a branch, tag or commit, None is main.
        train, validation, test: csv, tsv, json, jsonl (each also with .gz or .zst), parquet or
            arrow files: a path, a list of paths, or a pattern such as `logs/*.jsonl`, which is
            replaced by the files that match when the pipeline is planned or run, in the order of
            their paths.
        splits: which split of the dataset is which, where its names are others:
            `{validation: validation_matched, test: none}`; `none` leaves a split out.
        csv: how csv and tsv files are written, where it is not as usual: `{delimiter: ";"}`.
        columns: of a recipe of rows: the data's column by the name that the recipe has for it.
        format: the format of conversations in a row: `messages` (role and content), `sharegpt`,
            `alpaca`, `prompt_completion`; None: messages.
        messages_key: the field of the messages; None: `messages`, or `conversations` of sharegpt.
        chat_template: what renders conversations: `tokenizer_default`, `chatml`, or a FILE.jinja;
            None: the tokenizer's own, and chatml of a trained one.
        chat_template_kwargs: what the template gets besides: `enable_thinking`, `date_string`.
        default_system_message: begins conversations without a system message.
        text_key: the field of plain texts, which have no source; instead of the next two.
        source_key, target_key: the fields of the input text and of the text to be produced, or of
            the label.
        pair_key: the field of a second input text, where a recipe takes pairs of texts.
        part_key: the field of texts that says which part of the data a row is of, such as its
            language: `evaluate` scores each part by itself, too. A mixture's are its datasets.
        source_prefix, source_suffix: put around every source: an instruction, what a prompt ends
            with.
        group_by_source: evaluation splits get one row per source, all its targets as references.
        validation_fraction, test_fraction: share of the sources held out (by a hash of the
            source; of other rows, of the row) where no such split is given.
        on_bad_row: `error` stops at bad rows, with file and line; `skip` leaves them out and counts
            them; `{skip: 1 %}` does so up to a share of the rows, or a number of them
            (`{skip: 20}`), and stops where there are more.
        max_examples: the first ones of each split, of a mixture's datasets each; None: all.
        tokenizer: None means the model's own.
    """

    dataset: Text | None = None
    mixture: Annotated[dict[Name, MixturePart], OnlyWhereSet()] = Field(default_factory=dict)
    subset: Text | None = None
    revision: Revision | None = None
    train: DataFiles | None = None
    validation: DataFiles | None = None
    test: DataFiles | None = None
    splits: Annotated[SplitNames, OnlyWhereSet()] = Field(default_factory=dict)
    csv: Annotated[CsvDialect | None, OnlyWhereSet()] = None
    columns: Annotated[dict[Text, Text], OnlyWhereSet()] = Field(default_factory=dict)
    format: Annotated[
        Literal["messages", "sharegpt", "alpaca", "prompt_completion"] | None, OnlyWhereSet()
    ] = None
    messages_key: Annotated[Text | None, OnlyWhereSet()] = None
    chat_template: Annotated[
        Text | None, AfterValidator(absolute_template), ContentOrName(), OnlyWhereSet()
    ] = None
    chat_template_kwargs: Annotated[dict[Text, Scalar], OnlyWhereSet()] = Field(
        default_factory=dict
    )
    default_system_message: Annotated[Text | None, OnlyWhereSet()] = None
    text_key: Text | None = None
    source_key: Text = "source"
    pair_key: Annotated[Text | None, OnlyWhereSet()] = None
    target_key: Text = "target"
    part_key: Annotated[Text | None, OnlyWhereSet()] = None
    source_prefix: str = ""
    source_suffix: str = ""
    group_by_source: bool = False
    validation_fraction: Fraction = 0.05
    test_fraction: Fraction = 0.0
    on_bad_row: OnBadRow = "error"
    max_examples: PositiveInt | None = None
    tokenizer: TokenizerSection | None = None

    @model_validator(mode="after")
    def _one_kind_of_parts(self) -> DataSection:
        if self.mixture and self.part_key is not None:
            raise ValueError("a mixture's parts are its datasets: leave 'part_key' out")
        return self

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
    """The resources of one stage; never part of a fingerprint.

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
        recipe: the paradigm: text_to_text, language_modeling, chat, preference, classification,
            regression, image_classification, image_to_text, or one's own: python:MODULE or the
            dotted name of a module.
        settings: the recipe's, typed by its `Settings`.
        model: which model, from where, in which precision.
        data: which rows, which of their fields, which splits.
        tags: words for people; `ls` and the Prefect UI show them.
        schedule: when it runs again by itself; `redco-flow schedule add` makes it so.
        notify: whom to tell of failures, promotions and standstill.
        stages: by name; a stage that is named like a kind need not say its kind.
    """

    name: Name
    description: str = ""
    recipe: Text | None = None
    settings: Annotated[dict[str, Any], OnlyWhereSet()] = Field(default_factory=dict)
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    tags: Names = Field(default_factory=list)
    schedule: ScheduleSection | None = None
    notify: NotifySection | None = None
    stages: dict[Name, dict[str, Any] | None] = Field(min_length=1)
