"""The sections of a pipeline file, and the resources of a stage.

The bodies of stages are typed by their kinds (`stage_kind.py`); here they are plain mappings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

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
from redco_flow.spec.names import quoted
from redco_flow.spec.notify import NotifySection
from redco_flow.spec.raw_data import CsvDialect, OnBadRow, SplitNames
from redco_flow.spec.schedule import ScheduleSection

SECTION_NAMES = ("recipe", "settings", "model", "data")
"""The top-level keys that a stage kind may take over as fields of its Config."""


class ModelSection(StrictModel):
    """The model: its source, its commit and its precision.

    Args:
        name_or_path: hub id, or a directory with config.json (and model.safetensors, tokenizer).
        revision: the hub's branch, tag or commit; None means main. A run's records have the commit.
        family: the model family, if config.json does not name it: t5, bart, llama, …, or the dotted
            name of a module.
        config: changes to the model's configuration; all of it when there is no name_or_path.
            `remat` selects what the backward pass computes again: `none`, `full` (each layer) or
            `minimal` (all but products with parameters; also called `dots`), or `auto` (the least
            that fits the devices' memory); `activations` what
            differs from it, by name: `layer_input`, `qkv`, `attention`, `attention_out`,
            `mlp_input`, `mlp_in`, `mlp_out`, each `keep`, `recompute`, `offload` (to the
            host's memory; `offload_share` of each device's tokens) or `split` (kept in parts by
            the model shards).
            `attention` is the attention kernel: auto, xla, splash, cudnn or triton.
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
        mixture: several datasets by name, from which training draws by weight; replaces dataset.
        subset, revision: of a hub dataset; the revision is a branch, tag or commit, None is main.
        train, validation, test: csv, tsv, json, jsonl (each also with .gz or .zst), parquet or
            arrow files: a path, a list of paths, or a pattern such as `logs/*.jsonl`, which is
            replaced by the files that match when the pipeline is planned or run, in the order of
            their paths.
        splits: the dataset's names of the splits, if they are different:
            `{validation: validation_matched, test: none}`; `none` leaves a split out.
        csv: the dialect of csv and tsv files, if it is unusual: `{delimiter: ";"}`.
        columns: of a recipe of rows: the data's column for each name in the recipe.
        format: the format of conversations in a row: `messages` (role and content), `sharegpt`,
            `alpaca`, `prompt_completion`; None: messages.
        messages_key: the field of the messages; None: `messages`, or `conversations` of sharegpt.
        chat_template: renders conversations: `tokenizer_default`, `chatml`, or a FILE.jinja;
            None: the tokenizer's template, and chatml for a trained tokenizer.
        chat_template_kwargs: more arguments of the template: `enable_thinking`, `date_string`.
        default_system_message: begins conversations without a system message.
        text_key: the field of plain texts, which have no source; instead of the next two.
        source_key, target_key: the fields of the input text and of the text to be produced, or of
            the label.
        pair_key: the field of a second input text, where a recipe takes pairs of texts.
        part_key: the field that names the part of the data a row belongs to, such as its language:
            `evaluate` also scores each part separately. The parts of a mixture are its datasets.
        source_prefix, source_suffix: added around every source, such as an instruction and the end
            of a prompt.
        group_by_source: evaluation splits get one row per source, all its targets as references.
        validation_fraction, test_fraction: share of the sources held out (by a hash of the
            source; of other rows, of what their recipe names, or else of the row) where no such
            split is given.
        on_bad_row: `error` reports bad rows with file and line, and stops; `skip` leaves them out
            and counts them; `{skip: 1 %}` or `{skip: 20}` limits their share or number.
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
                f"'text_key' is for rows that are plain texts, and {quoted(useless)} for pairs of "
                "source and target; remove one or the other"
            )
        return self


class Resources(StrictModel):
    """The resources of one stage; never part of a fingerprint.

    Args:
        num_hosts: machines of the job; training and prediction alone run on several.
        gpus_per_host: devices of each; 0 uses CPUs, or the devices that JAX finds.
        cpus_per_host, memory_gib: None leaves it to the profile.
        walltime_minutes: time limit, at which the stage saves, stops and continues in a new
            attempt; on Slurm shortly before it. None means the profile's limit.
    """

    num_hosts: Annotated[PositiveInt, Placement()] = 1
    gpus_per_host: Annotated[NonNegativeInt, Placement()] = 0
    cpus_per_host: Annotated[PositiveInt | None, Placement()] = None
    memory_gib: Annotated[PositiveFloat | None, Placement()] = None
    walltime_minutes: Annotated[PositiveInt | None, Placement()] = None


class PipelineSection(StrictModel):
    """The whole file, with the stages' bodies still untyped.

    Args:
        name: the pipeline's name; prefix of run ids.
        description: free text.
        recipe: the paradigm: text_to_text, language_modeling, chat, preference, classification,
            regression, image_classification, image_to_text, text_to_image, or your own:
            python:MODULE or the dotted name of a module.
        settings: of the recipe, checked by its `Settings`.
        model: the model, its source and its precision.
        data: the dataset, its fields and its splits.
        tags: labels, shown by `ls` and the Prefect UI.
        schedule: when it runs repeatedly; registered by `redco-flow schedule add`.
        notify: recipients of notices on failures, promotions and missed runs.
        stages: by name; a stage named like a kind needs no `kind`.
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
