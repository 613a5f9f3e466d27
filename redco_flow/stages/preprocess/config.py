"""preprocess: raw rows in, a dataset of token ids with its tokenizer out.

Light at the top, for plans read its Config; the work is in `encode_dataset`, imported when it
runs. Equal inputs give a byte-identical dataset, whatever the number of workers and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redco_flow.local_paths import is_file
from redco_flow.recipes.recipe import (
    RecipeName,
    RecipeSettings,
    RowColumns,
    builds,
    encodes,
    encodes_rows,
    find_own_recipe,
    find_recipe,
    has_no_texts,
    is_conversational,
    is_of_rows,
    kind_of_targets,
    makes_texts,
    takes_conversations,
    takes_messages,
    text_columns,
)
from redco_flow.spec.model import (
    OfTraining,
    OnlyWhereSet,
    Placement,
    PositiveInt,
    Scalar,
    Text,
)
from redco_flow.spec.names import nearest
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.artifacts.tokenizer import template_files, tokenizer_files
from redco_flow.stages.data import source
from redco_flow.stages.data.csv_rows import NO_DIALECT, Dialect
from redco_flow.stages.data.image_folder import ENDINGS
from redco_flow.stages.data.row_files import read_file
from redco_flow.stages.data.rows import BadRow, FileRow, problem_of_field, problem_of_text
from redco_flow.stages.data.source import files_by_split
from redco_flow.text.chat import OnTooLong, TrainOn, template_text
from redco_flow.text.conversations import DEFAULT_KEYS, BadConversation, ChatColumns

_NUM_ROWS = 100
_MAX_CHARACTERS = 4_000_000  # long documents: enough is seen in fewer rows


def text_keys(data: DataSection, *, are_labelled: bool) -> tuple[str, ...]:
    """Return the fields that must be texts, the target last, unless it is a label."""
    if data.text_key:
        return (data.text_key,)
    sources = (data.source_key, *((data.pair_key,) if data.pair_key else ()))
    return sources if are_labelled else (*sources, data.target_key)


@dataclass(frozen=True)
class _Asked:
    """What the rows of a file must have.

    Args:
        keys: the columns.
        texts: those of them that must be texts.
        skips: whether bad rows may be left out.
        num_rows: to look at.
        chats: where each row has a conversation.
        dialect: of csv files.
    """

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    skips: bool
    num_rows: int
    chats: ChatColumns | None = None
    dialect: Dialect = NO_DIALECT

    def problems_of(self, row: FileRow) -> list[tuple[str, str]]:
        """Say what is wrong with a row, as reasons and details."""
        if self.chats is None:
            found = (self.problem_of(row.fields, key) for key in self.keys)
            return [one for one in found if one]
        try:
            self.chats.read(row.fields)
        except BadConversation as error:
            return [(error.reason, error.detail)]
        return []

    def problem_of(self, fields: Mapping[str, Any], key: str) -> tuple[str, str] | None:
        """Say what is wrong with a field of a row."""
        check = problem_of_text if key in self.texts else problem_of_field
        return check(fields, key)

    def skips_file(self, path: Path) -> bool:
        """Say whether a file is an image, whose columns are known."""
        return not self.texts and path.suffix.lower() in ENDINGS


@dataclass(frozen=True)
class _Head:
    """What the head of a file shows; nothing is said of the rows that were not looked at."""

    has_rows: bool
    problems: tuple[str, ...] = ()


def head_problems(
    data: DataSection, columns: Sequence[str] | None = None, *, are_labelled: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the key of `data` and what is wrong with the head of each file that it names.

    Data of the hub and of a module are not looked at; images and files that are not there neither.

    Args:
        columns: that rows must have, of whatever type; None: those of texts.
        are_labelled: whether texts have a label as target, and not a text.
    """
    texts: tuple[str, ...] = ()
    if columns is None:
        part = (data.part_key,) if data.part_key else ()
        texts = (*text_keys(data, are_labelled=are_labelled), *part)
    label = (data.target_key,) if are_labelled and columns is None else ()
    yield from _heads_problems(data, _asked(data, (*texts, *label, *(columns or ())), texts))


def chat_head_problems(data: DataSection) -> Iterator[tuple[str, str]]:
    """Yield the same of files of conversations, each of which is read as it will be."""
    columns = chat_columns(data)
    yield from _heads_problems(data, _asked(data, columns.needed, (), columns))


def _asked(
    data: DataSection,
    keys: Sequence[str],
    texts: Sequence[str],
    chats: ChatColumns | None = None,
) -> _Asked:
    num_rows = min(_NUM_ROWS, data.max_examples or _NUM_ROWS)
    skips, dialect = data.on_bad_row == "skip", Dialect.of(data.csv)
    return _Asked(tuple(keys), tuple(texts), skips, num_rows, chats, dialect)


def _heads_problems(data: DataSection, asked: _Asked) -> Iterator[tuple[str, str]]:
    try:
        files = files_by_split(data)
    except ValueError as error:
        yield "mixture" if data.mixture else "dataset", str(error)
        return
    for split, paths in files.items():
        key = "mixture" if data.mixture else "dataset" if data.dataset else split
        read = [path for path in paths if is_file(path) and not asked.skips_file(path)]
        heads = [_head_of_state(path, asked) for path in read]
        for problem in (problem for head in heads for problem in head.problems):
            yield key, problem
        if heads and not any(head.has_rows or head.problems for head in heads):
            yield key, f"{', '.join(map(str, paths))}: no rows in it"


def _head_of_state(path: Path, asked: _Asked) -> _Head:
    """The head of a file as it is now; the points of a sweep read it once."""
    state = path.stat()
    return _head(path, asked, state.st_mtime_ns, state.st_size)


@cache
def _head(path: Path, asked: _Asked, _time: int, _size: int) -> _Head:
    look = _SCHEMAS.get(path.suffix.lower())
    try:
        return _columns_head(path, look(path), asked) if look else _rows_head(path, asked)
    except Exception as error:  # noqa: BLE001 (a damaged file may make a reader raise anything)
        text = str(error)
        return _Head(has_rows=True, problems=(text if str(path) in text else f"{path}: {text}",))


def _rows_head(path: Path, asked: _Asked) -> _Head:
    """Read the first rows."""
    num_rows, num_characters, bad_rows = 0, 0, list[BadRow]()
    for row in islice(read_file(path, asked.dialect), asked.num_rows):
        num_rows += 1
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        bad_rows += [BadRow(f"{path}:{row.line}", *one) for one in asked.problems_of(row)]
        num_characters += sum(len(v) for v in row.fields.values() if isinstance(v, str))
        if num_characters > _MAX_CHARACTERS:
            break
    if asked.skips and not _is_hopeless(bad_rows, num_rows, asked):
        bad_rows = []
    return _Head(num_rows > 0, tuple(_by_reason(bad_rows, num_rows)))


def _is_hopeless(bad_rows: Sequence[BadRow], num_rows: int, asked: _Asked) -> bool:
    """Whether a file whose bad rows are left out has a column in none of its first rows."""
    reasons = [row.reason for row in bad_rows]
    return any(reasons.count(f"no field '{key}'") == num_rows for key in asked.keys if num_rows)


def _by_reason(bad_rows: Sequence[BadRow], num_rows: int) -> Iterator[str]:
    """Tell the first row of each reason, and how many more there are of it."""
    by_reason: dict[str, list[BadRow]] = {}
    for row in bad_rows:
        by_reason.setdefault(row.reason, []).append(row)
    for same in by_reason.values():
        more = f" (so are {len(same) - 1} more of the first {num_rows} rows)"
        yield f"{same[0]}{more if len(same) > 1 else ''}"


@dataclass(frozen=True)
class _Schema:
    """The columns of a file: name to type, and whether that is text; num_rows: None if unknown."""

    columns: Mapping[str, tuple[str, bool]]
    num_rows: int | None


def _columns_head(path: Path, schema: _Schema, asked: _Asked) -> _Head:
    problems = []
    for key in asked.keys:
        if key not in schema.columns:
            known = ", ".join(schema.columns) or "(none)"
            hint = nearest(key, schema.columns)
            problems.append(f"{path}: no field '{key}'{hint} Its fields are {known}")
        elif key in asked.texts and not schema.columns[key][1]:
            problems.append(f"{path}: field '{key}' is not text: it is {schema.columns[key][0]}")
    return _Head(schema.num_rows != 0, tuple(problems))


def _parquet_schema(path: Path) -> _Schema:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return _Schema(_columns(file.schema_arrow), file.metadata.num_rows)


def _arrow_schema(path: Path) -> _Schema:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        try:
            return _Schema(_columns(pa.ipc.open_stream(file).schema), None)
        except pa.ArrowInvalid:
            file.seek(0)
            return _Schema(_columns(pa.ipc.open_file(file).schema), None)


def _columns(schema: Any) -> Mapping[str, tuple[str, bool]]:
    import pyarrow as pa

    def is_text(type_: Any) -> bool:
        if pa.types.is_dictionary(type_):
            return is_text(type_.value_type)
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        return any(is_kind(type_) for is_kind in kinds)

    return {field.name: (str(field.type), is_text(field.type)) for field in schema}


_SCHEMAS: Mapping[str, Callable[[Path], _Schema]] = {
    ".parquet": _parquet_schema,
    ".arrow": _arrow_schema,
}

SECTIONS = ("recipe", "settings", "model", "data")
INPUTS = {
    "tokenizer_of": InputSlot(kind="", is_optional=True),
    "curation": InputSlot(kind="curation", is_optional=True),
}
OUTPUTS = {"dataset": "dataset"}


class TokenizerModel(ModelSection):
    """The model section as preprocessing sees it: only whose tokenizer it is."""

    reads_weights: ClassVar[bool] = False

    family: Annotated[Text | None, Placement()] = None
    config: Annotated[dict[str, Scalar | dict[str, Scalar]], Placement()] = Field(
        default_factory=dict
    )
    dtype: Annotated[Literal["float32", "bfloat16"], Placement()] = "float32"
    from_scratch: Annotated[bool, Placement()] = False


class Config(StageConfig):
    """Preprocessing; the input `tokenizer_of` takes the tokenizer of a dataset or checkpoint, and
    `curation` leaves out the rows that a stage of kind curate found.

    Args:
        recipe: the pipeline's own where the stage does not say it.
        settings: the recipe's.
        model, data: the pipeline's sections of these names, with changes for this stage.
        max_source_length, max_target_length: in tokens, the end token included; more is cut off.
            Plain texts are cut into pieces of max_target_length, of which each is an example.
        max_length: of conversations: all of one, in tokens; None: 2048.
        on_too_long: of conversations beyond that: `truncate` their end (None), `drop` them, both
            counted; or `error`: such a row is a bad one.
        train_on: of conversations: learn the `assistant`'s turns (None), the `last` of them, or
            `all` tokens.
        num_workers: processes that encode.
        num_shards: parts that are encoded by tasks of their own where the executor has job arrays
            (Slurm); elsewhere one job encodes all.
    """

    LEFT_OUT: ClassVar[tuple[type, ...]] = (Placement, OfTraining)

    recipe: RecipeName = "text_to_text"
    settings: RecipeSettings = Field(default_factory=dict)
    model: TokenizerModel = TokenizerModel()
    data: DataSection
    max_source_length: Annotated[int, Field(ge=2)] = 512
    max_target_length: Annotated[int, Field(ge=2)] = 128
    max_length: Annotated[Annotated[int, Field(ge=2)] | None, OnlyWhereSet()] = None
    on_too_long: Annotated[OnTooLong | None, OnlyWhereSet()] = None
    train_on: Annotated[TrainOn | None, OnlyWhereSet()] = None
    num_workers: Annotated[PositiveInt, Placement()] = 1
    num_shards: Annotated[PositiveInt, Placement()] = 1

    @field_validator("data")
    @classmethod
    def _can_be_read(cls, data: DataSection, info: ValidationInfo) -> DataSection:
        name = info.data.get("recipe", "")
        problem = source.problem_of(data)
        if is_of_rows(name):
            problem = problem or problem_of_rows(data, name)
        elif recipe := find_own_recipe(name):
            problem = problem or problem_of_texts(data, recipe)
        if problem:
            raise ValueError(problem)
        return data

    @model_validator(mode="after")
    def _says_what_its_rows_have(self) -> Config:
        if is_conversational(self.recipe):
            names: tuple[str, ...] = ("max_source_length", "max_target_length")
            why = "use max_length."
        else:
            names = ("max_length", "on_too_long", "train_on")
            why = "they are of recipe chat."
        fields = type(self).model_fields
        given = [name for name in names if getattr(self, name) != fields[name].default]
        if given:
            raise ValueError(
                f"{', '.join(given)} would change nothing for recipe '{self.recipe}': {why}"
            )
        return self

    @model_validator(mode="after")
    def _cuts_what_has_tokens(self) -> Config:
        fields = type(self).model_fields
        lengths = ("max_source_length", "max_target_length")
        given = [name for name in lengths if getattr(self, name) != fields[name].default]
        if given and is_of_rows(self.recipe):
            raise ValueError(
                f"recipe '{self.recipe}' takes rows as they are, and {', '.join(given)} would "
                "change nothing"
            )
        if "max_source_length" in given and self.data.text_key is not None:
            raise ValueError(
                "plain texts (data.text_key) have no source, and max_source_length would change "
                "nothing; their pieces have max_target_length tokens"
            )
        if "max_target_length" in given and not makes_texts(self.recipe):
            raise ValueError(
                f"the targets of recipe '{self.recipe}' are no texts, and max_target_length would "
                "change nothing"
            )
        return self


_OF_TEXTS = (
    "text_key",
    "source_key",
    "pair_key",
    "target_key",
    "mixture",
    "part_key",
    "source_prefix",
    "source_suffix",
    "group_by_source",
    "tokenizer",
)


def problem_of_rows(data: DataSection, name: str) -> str | None:
    """Say which keys have no meaning to a recipe of rows, or name a column that it has not."""
    recipe = find_recipe(name)
    used = ["data.tokenizer"] if text_columns(recipe) else []
    used += ["data.source_prefix", "data.source_suffix"] if encodes_rows(recipe) else []
    if takes_messages(recipe):
        used += ["data.chat_template", "data.chat_template_kwargs"]
    useless = [key for key in _changed(data, (*_OF_TEXTS, *_OF_CHATS)) if key not in used]
    if useless:
        return (
            f"recipe '{name}' takes rows as they are, and {', '.join(useless)} would change "
            "nothing; which column is which say data.columns."
        )
    names = RowColumns.of(find_recipe(name)).names
    for key in data.columns:
        if names is not None and key not in names:
            return (
                f"recipe '{name}' reads no column '{key}'{nearest(key, names)} Its columns: "
                f"{', '.join(names)}."
            )
    return None


_OF_CHATS = (
    "format",
    "messages_key",
    "chat_template",
    "chat_template_kwargs",
    "default_system_message",
)
DEFAULT_MAX_LENGTH = 2048


def chat_columns(data: DataSection) -> ChatColumns:
    """Return where a pipeline's conversations stand in their rows."""
    return ChatColumns(data.format or "messages", data.messages_key, data.default_system_message)


def problem_of_texts(data: DataSection, recipe: ModuleType) -> str | None:
    """Say which keys have no meaning to a recipe of texts."""
    if takes_conversations(recipe):
        return problem_of_chats(data)
    if given := _changed(data, _OF_CHATS):
        return f"{', '.join(given)}: they are of conversations: use recipe chat."
    if data.columns:
        return (
            "'data.columns' are of recipes of rows; of texts data.source_key and data.target_key."
        )
    name = recipe.__name__.rpartition(".")[2]
    if data.pair_key is not None and not getattr(recipe, "TAKES_PAIRS", False):
        return f"'data.pair_key' gives pairs of source texts, and recipe '{name}' takes one text."
    if data.text_key is None or hasattr(recipe, "encode_texts"):
        return None
    return (
        f"'data.text_key' gives plain texts, and recipe '{name}' takes pairs: use recipe "
        "language_modeling, or data.source_key and data.target_key."
    )


def _changed(data: DataSection, names: Sequence[str]) -> list[str]:
    defaults = type(data)()
    return [f"data.{key}" for key in names if getattr(data, key) != getattr(defaults, key)]


def problem_of_chats(data: DataSection) -> str | None:
    """Say what of the section has no meaning to conversations, or names no template."""
    useless = _changed(data, ("columns", *(key for key in _OF_TEXTS if key != "tokenizer")))
    if useless:
        return (
            f"{', '.join(useless)} would change nothing: of conversations data.format and "
            "data.messages_key say where they stand."
        )
    if data.messages_key is not None and data.format not in (None, *DEFAULT_KEYS):
        return f"data.messages_key would change nothing: rows of format '{data.format}' have none."
    name = data.chat_template
    if name is not None and "/" not in name:
        try:
            template_text(name)
        except ValueError as error:
            return str(error)
    is_trained = data.tokenizer is not None and data.tokenizer.train is not None
    if is_trained and name not in (None, "chatml"):
        return (
            "a trained tokenizer has the special tokens of chatml alone: leave data.chat_template "
            "out, or give data.tokenizer.name_or_path."
        )
    return None


def input_problems(config: Config, given: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield that there is no tokenizer, or that there are two."""
    data, is_taken = config.data, "tokenizer_of" in given
    if is_taken and data.tokenizer is not None:
        yield (
            ("data", "tokenizer"),
            "the stage takes its tokenizer from `tokenizer_of`: leave one of the two out",
        )
    has_one = is_taken or data.tokenizer is not None or config.model.name_or_path is not None
    if not has_one and not has_no_texts(config.recipe):
        yield (
            ("data",),
            "there is no tokenizer: give data.tokenizer: {train: {vocab_size: 4096}}, or "
            "data.tokenizer.name_or_path, or a model.name_or_path that has one, or another "
            "stage's by `tokenizer_of`.",
        )


def code_modules(config: Config) -> list[str]:
    """The module that encodes, or checks rows, and the one that makes rows, if one does."""
    recipe = find_recipe(config.recipe)
    own = recipe.__name__
    if builds(recipe):  # the model behind it makes no difference
        own = (recipe.encode if encodes(recipe) else recipe.collate_fn).__module__
    return [str(own), *source.data_modules(config.data)]


def data_files(config: Config) -> list[Path]:
    """The raw data, and a tokenizer that lies in a local directory."""
    files = [*source.data_files(config.data), *tokenizer_files(config.model, config.data)]
    recipe = find_recipe(config.recipe)
    if takes_conversations(recipe) or takes_messages(recipe):
        files += template_files(config.model, config.data)
    return files


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what the first rows of the data files show to be wrong, and the key that names them."""
    recipe = find_recipe(config.recipe)
    if takes_conversations(recipe):
        for key, problem in chat_head_problems(config.data):
            yield ("data", key), problem
        return
    columns = None
    if not encodes(recipe):
        names = RowColumns.of(recipe).names or ()
        columns = [config.data.columns.get(name, name) for name in names]
    are_labelled = kind_of_targets(recipe) is not None
    for key, problem in head_problems(config.data, columns, are_labelled=are_labelled):
        yield ("data", key), problem


def data_identity(config: Config) -> dict[str, Any]:
    """What identifies data that is no file."""
    return source.data_identity(config.data)
