"""The commit record of a checkpoint: a digest of every file makes its arrays valid.

A step's directory without a whole `commit.json` does not count. The record is written last, after
every file and directory is on the disk, and carries a digest of itself, so a flipped bit is noticed
anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.engine.errors import CheckpointError
from redco_flow.engine.files import (
    copy_file,
    digest_file,
    digest_json,
    read_json,
    sync,
    write_json,
)

COMMIT_FILE = "commit.json"
TREE_FILE = "tree.json"
PARAMS = "params"
TRAINING = "training"

_VERSION = 1
_NUM_READERS = 4


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint as it was when it was committed."""

    bytes: int
    blake3: str


@dataclass(frozen=True)
class Commit:
    """A step's commit record.

    Args:
        step: optimizer steps done.
        metrics: scores of exactly these parameters; None where a score was not finite.
        cursor: where to go on reading the data; JSON.
        files: by path relative to the step's directory, `commit.json` itself left out.
    """

    step: int
    metrics: Mapping[str, float | None]
    cursor: Mapping[str, Any]
    files: Mapping[str, FileRecord]


def is_committed(step_directory: Path) -> bool:
    """Whether the directory has a commit record, without judging it."""
    return (step_directory / COMMIT_FILE).is_file()


def write_commit(step_directory: Path, commit: Commit) -> None:
    """Make the directory a checkpoint, in one rename."""
    record: dict[str, Any] = {
        "version": _VERSION,
        "step": commit.step,
        "metrics": dict(commit.metrics),
        "cursor": dict(commit.cursor),
        "files": [
            {"path": path, "bytes": file.bytes, "blake3": file.blake3}
            for path, file in sorted(commit.files.items())
        ],
    }
    record["digest"] = digest_json(record)
    write_json(step_directory / COMMIT_FILE, record)
    sync(step_directory)
    sync(step_directory.parent)


def read_commit(step_directory: Path) -> Commit:
    """Read a commit record.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version wrote it.
    """
    path = step_directory / COMMIT_FILE
    try:
        record = read_json(path)
        digest = record.pop("digest")
    except FileNotFoundError:
        raise CheckpointError(
            f"{step_directory}: no committed checkpoint here ({COMMIT_FILE} is missing)."
        ) from None
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged: not a commit record ({error}).") from error
    if digest != digest_json(record):
        raise CheckpointError(f"{path}: damaged: its own digest does not match its content.")
    if record["version"] != _VERSION:
        raise CheckpointError(
            f"{path}: written in format {record['version']}, this version reads {_VERSION}."
        )
    files = {file["path"]: FileRecord(file["bytes"], file["blake3"]) for file in record["files"]}
    return Commit(record["step"], record["metrics"], record["cursor"], files)


def digest_tree(step_directory: Path, copy_of: Path | None = None) -> dict[str, FileRecord]:
    """Digest every file below a directory and force it, and the directories, to the disk.

    Each file is read once, right after it was written, so mostly from memory.

    Args:
        copy_of: the directory is made, with the files of this one.
    """
    source, files = copy_of or step_directory, {}
    for folder, _, names in os.walk(source):
        target = step_directory / Path(folder).relative_to(source)
        if copy_of is not None:
            target.mkdir()
        for name in sorted(names):
            path = target / name
            if path == step_directory / COMMIT_FILE:
                continue
            digest = digest_file(path) if copy_of is None else copy_file(Path(folder) / name, path)
            sync(path)
            record = FileRecord(path.stat().st_size, digest)
            files[path.relative_to(step_directory).as_posix()] = record
        sync(target)
    return files


def find_damage(step_directory: Path, commit: Commit, *, params_only: bool = False) -> list[str]:
    """Compare every file with its commit; return what is wrong, one text per file.

    Args:
        params_only: leave the optimizer's files out.
    """
    wanted = {
        path: file for path, file in commit.files.items() if not params_only or _serves_params(path)
    }
    # Sizes first: a cut or missing file is found before gigabytes are read.
    damage = [
        text for path, file in wanted.items() if (text := _size_damage(step_directory, path, file))
    ]
    if damage:
        return damage
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="checkpoint-digest") as pool:
        found = pool.map(lambda path: _digest_damage(step_directory, path, wanted[path]), wanted)
        return [text for text in found if text]


def checkpoint_files(step_directory: Path, *, params_only: bool = False) -> dict[str, str]:
    """Return path -> BLAKE3 of a checkpoint's files, from its commit: nothing big is read again.

    Args:
        params_only: only what `restore_params` needs; without the optimizer a third of the bytes.

    Raises:
        CheckpointError: no commit, or a damaged one.
    """
    commit = read_commit(step_directory)
    files = {
        path: file.blake3
        for path, file in commit.files.items()
        if not params_only or _serves_params(path)
    }
    return files | {COMMIT_FILE: digest_file(step_directory / COMMIT_FILE)}


def _serves_params(path: str) -> bool:
    return "/" not in path or path.startswith(f"{PARAMS}/")


def _size_damage(step_directory: Path, path: str, file: FileRecord) -> str | None:
    try:
        size = (step_directory / path).stat().st_size
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None if size == file.bytes else f"{path}: {size} bytes, committed were {file.bytes}"


def _digest_damage(step_directory: Path, path: str, file: FileRecord) -> str | None:
    try:
        digest = digest_file(step_directory / path)
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None if digest == file.blake3 else f"{path}: its BLAKE3 differs from the commit's"
