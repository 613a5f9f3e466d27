"""Check the first rows of a pipeline's data files before anything is submitted.

Each row goes through the checks that preprocessing makes of it, as far as they need no tokenizer:
columns, texts, labels, conversations and the template that renders them, and the `collate_fn` of a
recipe of this package. Imports nothing heavy before a check needs it, and never JAX.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import UnusableRow
from redco_flow.local_paths import expanded, is_file, is_folder
from redco_flow.recipes.declared import RowsRecipe
from redco_flow.recipes.find import find_own_recipe, find_recipe
from redco_flow.spec.names import nearest
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.raw_data import OnBadRow, SkipLimit
from redco_flow.stages.data.csv_rows import Dialect
from redco_flow.stages.data.image_files import ENDINGS
from redco_flow.stages.data.row_files import read_file
from redco_flow.stages.data.rows import BadRow, FileRow, problem_of_field, problem_of_text
from redco_flow.stages.data.source import (
    Source,
    files_by_split,
    is_hidden_label,
    label_columns,
    parts_of,
)
from redco_flow.stages.preprocess.planned_template import PlannedTemplate, planned_template
from redco_flow.text.conversations import ChatColumns

if TYPE_CHECKING:
    from redco_flow.stages.preprocess.labels import Labels

_NUM_ROWS = 100
_MAX_BYTES = 4_000_000  # long documents and large images: enough is seen in fewer rows
_MAX_SECONDS = 5.0  # after the first row; each may use up the time that a chat template has


def text_keys(data: DataSection, *, are_labelled: bool) -> tuple[str, ...]:
    """Return the fields that must be texts, the target last, unless it is a label."""
    if data.text_key:
        return (data.text_key,)
    sources = (data.source_key, *((data.pair_key,) if data.pair_key else ()))
    return sources if are_labelled else (*sources, data.target_key)


def chat_columns(data: DataSection) -> ChatColumns:
    """Return the columns of a pipeline's conversations."""
    return ChatColumns(data.format or "messages", data.messages_key, data.default_system_message)


@dataclass(frozen=True)
class _Check:
    """The checks of each row of a file; hashable, so that equal checks are made once.

    Args:
        recipe: its name.
        settings: the recipe's, as JSON.
        renamed: of a recipe of rows, `data.columns` as pairs.
        keys: the columns that rows must have.
        texts: those of them that must be texts.
        label: the column of the label; None where targets are no labels, or rows have none.
        skips: whether bad rows may be left out, up to a limit or all.
        num_rows: to look at.
        chats: where each row has a conversation.
        template: what renders the conversations.
        only_last: whether the last answer of a conversation alone is learnt.
        dialect: of CSV files.
        folder: the dataset's, below which images may be, too; None of files for each split.
        may_be_hidden: columns whose labels may all be -1 or null: such a split is left out.
    """

    recipe: str
    settings: str
    renamed: tuple[tuple[str, str], ...]
    keys: tuple[str, ...]
    texts: tuple[str, ...]
    label: str | None
    skips: bool
    num_rows: int
    chats: ChatColumns | None
    template: PlannedTemplate
    only_last: bool
    dialect: Dialect
    folder: Path | None = None
    may_be_hidden: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, data: DataSection, recipe: str, settings: Mapping[str, Any], *, only_last: bool
    ) -> _Check:
        """Return what the rows of a stage's data are checked for."""
        keys, texts, label, chats = _columns_of(data, recipe)
        folder = expanded(data.dataset) if data.dataset else None
        return cls(
            recipe=recipe,
            settings=json.dumps(settings, sort_keys=True),
            renamed=tuple(sorted(data.columns.items())),
            keys=keys,
            texts=texts,
            label=label,
            skips=data.on_bad_row != "error",
            num_rows=min(_NUM_ROWS, data.max_examples or _NUM_ROWS),
            chats=chats,
            template=planned_template(data, is_of_chats=find_recipe(recipe).takes_conversations),
            only_last=only_last,
            dialect=Dialect.of(data.csv),
            folder=folder if folder and is_folder(folder) else None,
        )

    def skips_file(self, path: Path) -> bool:
        """Say whether a file is an image, whose columns are known."""
        return not self.texts and path.suffix.lower() in ENDINGS

    def hides_label(self, row: FileRow) -> bool:
        """Say whether a row has only labels that are -1 or null."""
        labels = [row.fields[name] for name in self.may_be_hidden if name in row.fields]
        return bool(labels) and all(map(is_hidden_label, labels))


def _columns_of(
    data: DataSection, recipe: str
) -> tuple[tuple[str, ...], tuple[str, ...], str | None, ChatColumns | None]:
    """Return the columns that rows must have, the texts of them, the label, and conversations."""
    declared = find_recipe(recipe)
    if declared.takes_conversations:
        chats = chat_columns(data)
        return chats.needed, (), None, chats
    if isinstance(declared, RowsRecipe):
        names = declared.columns or ()
        return tuple(data.columns.get(name, name) for name in names), (), None, None
    are_labelled = declared.targets is not None
    part = (data.part_key,) if data.part_key else ()
    texts = (*text_keys(data, are_labelled=are_labelled), *part)
    label = data.target_key if are_labelled else None
    return (*texts, *([label] if label else [])), texts, label, None


def head_problems(
    data: DataSection, recipe: str, settings: Mapping[str, Any], *, only_last: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the key of `data` and what is wrong with the head of each file that it names.

    Data of the hub and of a module are not looked at; images and files that are not there neither.

    Args:
        settings: the recipe's, as written in YAML.
        only_last: whether the last answer of a conversation alone is learnt.
    """
    check = _Check.of(data, recipe, settings, only_last=only_last)
    try:
        files = files_by_split(data)
    except ValueError as error:
        yield "mixture" if data.mixture else "dataset", str(error)
        return
    test = 0.0 if "test" in files else data.test_fraction
    validation = 0.0 if "validation" in files else data.validation_fraction
    if files and test + validation >= 1:
        yield (
            "test_fraction" if test > validation else "validation_fraction",
            f"validation_fraction and test_fraction are {validation:g} and {test:g}, which leaves "
            "no rows to train on; their sum must be below 1",
        )
    found: list[tuple[str, _Head]] = []
    is_whole = not data.mixture or all(map(files_by_split, parts_of(data).values()))
    for split, paths in files.items():
        key = "mixture" if data.mixture else "dataset" if data.dataset else split
        read = [path for path in paths if is_file(path) and not check.skips_file(path)]
        is_left_out = split != "train" and key != split  # where its labels are hidden
        of_split = replace(
            check, may_be_hidden=frozenset(label_columns(data) if is_left_out else ())
        )
        heads = [_head_of_state(path, of_split) for path in read]
        for problem in (problem for head in heads for problem in head.problems):
            yield key, problem
        if heads and not any(head.has_rows or head.problems for head in heads):
            yield key, f"{', '.join(map(str, paths))}: no rows in it"
        found += [(key, head) for head in heads]
        is_whole = is_whole and len(read) == len(paths) and all(head.is_whole for head in heads)
    if data.max_examples is None or len(found) == 1:  # else some of the files may not be read
        yield from _above_limit(data.on_bad_row, found, is_whole=is_whole)


def _above_limit(
    policy: OnBadRow, heads: Sequence[tuple[str, _Head]], *, is_whole: bool
) -> Iterator[tuple[str, str]]:
    """Yield the rows that may be left out, with their keys, where there are more than allowed.

    Args:
        is_whole: whether there are no other rows, of which a share may be bad.
    """
    if not isinstance(policy, SkipLimit) or not (is_whole or isinstance(policy.skip, int)):
        return
    allowed = policy.allowed(sum(head.num_rows for _, head in heads))
    if sum(head.num_bad for _, head in heads) > allowed:
        for key, head in heads:
            for text in head.skippable:
                yield key, f"{text}; data.on_bad_row: {policy} allows {allowed}"


@dataclass(frozen=True)
class _Head:
    """Findings in the first rows of a file; the others are not read.

    Args:
        skippable: problems of rows that may be left out, up to a limit.
        num_rows, num_bad: rows that count for the limit; 0 where no row may be left out.
        is_whole: whether the file has no other rows.
    """

    has_rows: bool
    problems: tuple[str, ...] = ()
    skippable: tuple[str, ...] = ()
    num_rows: int = 0
    num_bad: int = 0
    is_whole: bool = False


def _head_of_state(path: Path, check: _Check) -> _Head:
    """The head of a file as it is now; the points of a sweep read it once."""
    state = path.stat()
    return _head(path, check, state.st_mtime_ns, state.st_size)


@cache
def _head(path: Path, check: _Check, _time: int, _size: int) -> _Head:
    look = _SCHEMAS.get(path.suffix.lower())
    try:
        if look is not None:
            head = _columns_head(path, look(path), check)
            if head.problems or not head.has_rows:
                return head
        return _rows_head(path, check)
    except Exception as error:  # noqa: BLE001 (a damaged file may make a reader raise anything)
        text = str(error)
        return _Head(has_rows=True, problems=(text if str(path) in text else f"{path}: {text}",))


RowProblems = Callable[[FileRow], Iterator[tuple[str, str]]]
"""From a row to what is wrong with it, as reasons and details."""


def _rows_head(path: Path, check: _Check) -> _Head:
    num_rows, num_bytes, num_bad, num_hidden, bad_rows = 0, 0, 0, 0, list[BadRow]()
    problems_of, end = _row_problems(path, check), 0.0
    is_whole = False
    for row in islice(read_file(path, check.dialect), check.num_rows):
        num_rows += 1
        if isinstance(row, BadRow):
            found = [row]
        else:
            where = f"{path}:{row.line}"
            try:
                found = [BadRow(where, *one) for one in problems_of(row)]
            except ValueError as error:  # of the column, which no policy on bad rows skips
                return _Head(has_rows=True, problems=(f"{where}: {error}",))
            num_bytes += sum(map(_size_of, row.fields.values()))
            num_hidden += check.hides_label(row)
        num_bad += bool(found)
        bad_rows += found
        now = time.monotonic()
        end = end or now + _MAX_SECONDS
        if num_bytes > _MAX_BYTES or now > end:
            break
    else:
        is_whole = num_rows < check.num_rows
    reasons = [row.reason for row in bad_rows]
    if num_hidden == num_rows:
        return _Head(num_rows > 0, is_whole=is_whole)
    may_skip = check.skips and all(reasons.count(reason) < num_rows for reason in {*reasons})
    texts = tuple(_by_reason(bad_rows, num_bad, num_rows, check))
    if not may_skip:
        return _Head(has_rows=True, problems=texts)
    return _Head(True, (), texts, num_rows, num_bad, is_whole)


def _size_of(value: Any) -> int:
    """The bytes or characters of a text or an image; little of anything else."""
    if isinstance(value, Mapping):
        return sum(map(_size_of, value.values()))
    return len(value) if isinstance(value, str | bytes) else 0


def _by_reason(
    bad_rows: Sequence[BadRow], num_bad: int, num_rows: int, check: _Check
) -> Iterator[str]:
    """Yield the first row of each reason and how many more there are, and once what can be done."""
    by_reason: dict[str, list[BadRow]] = {}
    for row in bad_rows:
        by_reason.setdefault(row.reason, []).append(row)
    advice = ""
    if num_bad < num_rows:  # where all are bad, no row would be left
        otherwise = "leave them out and count them with data.on_bad_row: skip"
        advice = (
            f"; {num_bad} of the first {num_rows} rows {'are' if num_bad > 1 else 'is'} bad: fix "
            f"them, or {'raise the limit' if check.skips else otherwise}"
        )
    for same in by_reason.values():
        more = f" (so are {len(same) - 1} more of the first {num_rows} rows)"
        yield f"{same[0]}{more if len(same) > 1 else ''}{advice}"
        advice = ""


def _row_problems(path: Path, check: _Check) -> RowProblems:
    if check.chats is not None:
        return _chat_problems(check.chats, check)
    recipe = find_recipe(check.recipe)
    if not isinstance(recipe, RowsRecipe):
        return _text_problems(path, check)
    if find_own_recipe(check.recipe) is not None:
        return _recipe_problems(path, check, recipe)
    # The functions of a user's own recipe may need JAX, which a plan never starts.
    return lambda row: filter(None, (problem_of_field(row.fields, key) for key in check.keys))


def _chat_problems(chats: ChatColumns, check: _Check) -> RowProblems:
    def problems_of(row: FileRow) -> Iterator[tuple[str, str]]:
        try:
            chat = chats.read(row.fields)
            check.template.check(chat, only_last=check.only_last)
        except UnusableRow as error:
            yield error.reason, error.detail

    return problems_of


def _text_problems(path: Path, check: _Check) -> RowProblems:
    labels, source = _labels(check), _source(path, check)

    def problems_of(row: FileRow) -> Iterator[tuple[str, str]]:
        for key in check.texts:
            if found := problem_of_text(row.fields, key):
                yield found
        if labels is not None and check.label is not None:
            try:
                labels.read(row.fields, check.label, source)
            except UnusableRow as error:
                yield error.reason, error.detail

    return problems_of


def _labels(check: _Check) -> Labels | None:
    if check.label is None:
        return None
    from redco_flow.stages.preprocess.labels import labels_for

    return labels_for(find_recipe(check.recipe), json.loads(check.settings))


def _source(path: Path, check: _Check) -> Source:
    """The file as the source of training rows: its labels need not be another file's."""
    folders = (path.parent, *([check.folder] if check.folder else []))
    return Source("train", path.name, str(path), lambda: iter(()), image_folders=folders)


def _recipe_problems(path: Path, check: _Check, recipe: RowsRecipe) -> RowProblems:
    """Return the check of a recipe of rows: what its `collate_fn` raises, and its template."""
    from redco_flow.stages.data.image_files import MissingPillow
    from redco_flow.stages.preprocess.row_reader import row_reader

    source = _source(path, check)
    reader = row_reader(recipe, json.loads(check.settings), dict(check.renamed))
    if recipe.takes_messages and (conversations := recipe.conversations) is not None:

        def rendered(row: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
            for chat in conversations(row):
                check.template.check(chat, only_last=True)
            return {}

        reader = replace(reader, encode=rendered)

    def problems_of(row: FileRow) -> Iterator[tuple[str, str]]:
        try:
            found = reader(row, source, None, 0)
        except MissingPillow:  # the machines that run the stage may have it
            return
        if isinstance(found, BadRow):
            yield found.reason, found.detail

    return problems_of


@dataclass(frozen=True)
class _Schema:
    """The columns of a file: name to type, and whether that is text; num_rows: None if unknown."""

    columns: Mapping[str, tuple[str, bool]]
    num_rows: int | None


def _columns_head(path: Path, schema: _Schema, check: _Check) -> _Head:
    problems = []
    for key in check.keys:
        if key not in schema.columns:
            known = ", ".join(schema.columns) or "(none)"
            hint = nearest(key, schema.columns)
            problems.append(f"{path}: no field '{key}'{hint} Its fields are {known}")
        elif key in check.may_be_hidden and schema.columns[key][0] == "null":
            continue
        elif key in check.texts and not schema.columns[key][1]:
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
