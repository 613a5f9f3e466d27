"""Find the image files that rows of data files name by path, to digest and upload them.

Which files a data file names is remembered in the workspace's cache, by the data file's digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from redco_flow.records import digest_json, write_json
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.stage_kind import NamedFiles
from redco_flow.stages.data.arrow_rows import read_parquet
from redco_flow.stages.data.image_files import IMAGE_KEYS, find_image_files, image_paths
from redco_flow.stages.data.row_files import DIALECTS, ending_of, read_file
from redco_flow.stages.data.rows import BadRow, Rows
from redco_flow.stages.data.source import files_by_split, image_folders, parts_of
from redco_flow.tracking.file_digests import digest_files
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace


def named_images(
    data: DataSection, columns: Sequence[str] | None, workspace: Workspace | None = None
) -> dict[Path, NamedFiles]:
    """Return the image files that the rows of each data file name; only of files that name some.

    The hub's rows are identified by the revision, and a module's by its own files.

    Args:
        columns: by the data's names, those that may have images; None: all.
        workspace: whose cache remembers; None: all rows are read.

    Raises:
        ValueError, UnreadableFile, WorkspaceError: a data file cannot be read.
    """
    found: dict[Path, NamedFiles] = {}
    # Bad rows are not counted where they may be skipped: further rows are read instead.
    limit = data.max_examples if data.on_bad_row == "error" else None
    for part in parts_of(data).values() if data.mixture else [data]:
        for file in dict.fromkeys(path for of in files_by_split(part).values() for path in of):
            folders = image_folders(file, part)
            if paths := _paths(file, columns, limit, workspace):
                found[file] = find_image_files(paths, folders)
    return found


def _paths(
    file: Path, columns: Sequence[str] | None, limit: int | None, workspace: Workspace | None
) -> list[str]:
    if ending_of(file) in (None, *DIALECTS):  # an image, or texts alone
        return []
    if workspace is None:
        return _read_paths(file, columns, limit)
    digest = digest_files(workspace, [file])[file]
    key = digest_json([digest, columns, limit])[:32]
    path = workspace.cache / "images" / f"{key}-paths.json"
    known = unless_damaged(lambda: find_record(path, list[str]))
    if known is None:
        known = _read_paths(file, columns, limit)
        if workspace.root.is_dir():  # a plan makes no workspace
            # A user who may not write, or has no space, reads the rows again.
            with suppress(OSError, ValueError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, known)
    return known


def _read_paths(file: Path, columns: Sequence[str] | None, limit: int | None) -> list[str]:
    rows = islice(_rows_with_images(file, columns), limit)
    found: dict[str, None] = {}
    for row in rows:
        if isinstance(row, BadRow):
            continue
        fields = row.fields if columns is None else {name: row.fields.get(name) for name in columns}
        found.update(dict.fromkeys(image_paths(list(fields.values()))))
    return list(found)


def _rows_with_images(file: Path, columns: Sequence[str] | None) -> Rows:
    """Yield the rows that may name images, as far as a format tells without reading them."""
    if ending_of(file) == ".parquet":
        return read_parquet(file, partial(_part_with_paths, columns=columns))
    return read_file(file)


def _part_with_paths(
    file: Any, columns: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[int]]:
    """Return a Parquet file's columns with images, and the row groups where some lack bytes."""
    names = [
        field.name
        for field in file.schema_arrow
        if (columns is None or field.name in columns) and _may_hold_images(field.type)
    ]
    groups = range(file.num_row_groups)
    return names, [index for index in groups if _lacks_bytes(file.metadata.row_group(index), names)]


def _may_hold_images(type_: Any) -> bool:
    fields = [type_.field(index) for index in range(type_.num_fields)]
    is_image = {field.name for field in fields} == IMAGE_KEYS
    return is_image or any(_may_hold_images(field.type) for field in fields)


def _lacks_bytes(group: Any, names: Sequence[str]) -> bool:
    """Whether an image of a row group may have no bytes, by the statistics of its columns."""
    columns = map(group.column, range(group.num_columns))
    beginnings = tuple(f"{name}." for name in names)
    contents = (one for one in columns if one.path_in_schema.startswith(beginnings))
    return any(
        one.statistics is None or one.statistics.null_count != 0
        for one in contents
        if one.path_in_schema.endswith(".bytes")
    )
