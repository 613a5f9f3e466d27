"""BLAKE3 of data files and artifacts, remembered as long as a file is surely unchanged.

A file counts as unchanged while path, size, times of change and inode are. The memory is a
cache: it can be deleted at any time, a damaged one is forgotten, one that cannot be written costs
a second reading.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import WorkspaceError
from redco_flow.records import digest_file, digest_json, write_json
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:  # a worker begins without the settings library
    from redco_flow.spec.stage_kind import NamedFiles

NAMED_BY = "images named by"
"""Before the name of a data file: the name of their digest in a stage's ingredients."""

# A file changed twice within one tick of its file system's clock (2 s on some) looks unchanged.
_MIN_AGE_NANOSECONDS = 2_000_000_000
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def digest_files(
    workspace: Workspace,
    paths: Iterable[Path],
    *,
    cache: str = "digests.json",
    now: Callable[[], int] = time.time_ns,
) -> dict[Path, str]:
    """Return each file's BLAKE3, 64 hex digits; reads only files that are new or changed.

    Args:
        workspace: whose cache/ remembers.
        paths: the files.
        cache: the record below cache/ that remembers; it is read whole, so it stays small.
        now: nanoseconds since 1970, by the file system's clock.

    Raises:
        WorkspaceError: a file is missing, unreadable, or changes while it is read.
    """
    cache_path = workspace.cache / cache
    known = _load(cache_path)
    fresh: dict[str, list[Any]] = {}
    found: dict[Path, str] = {}
    for path in paths:
        key = str(path.absolute())
        try:
            found[path], entry = _digest(path, known.get(key), now)
        except OSError as error:
            raise WorkspaceError(f"{path}: cannot be read: {error.strerror}.") from error
        if entry is not None:
            fresh[key] = entry
    if fresh and workspace.root.is_dir():  # a plan makes no workspace
        _remember(cache_path, fresh)
    return found


def digests_of_named_files(
    workspace: Workspace, data_file: Path, named: NamedFiles
) -> dict[Path, str]:
    """Return, by their real paths, the digests of the files that a data file's rows name.

    Raises:
        WorkspaceError: as `digest_files`.
    """
    name = hashlib.sha256(bytes(data_file.absolute())).hexdigest()[:16]
    real = dict.fromkeys(one.real for one in named.values() if one)
    return digest_files(workspace, real, cache=f"images/{name}-digests.json")


def digest_named_files(named: NamedFiles, digests: Mapping[Path, str]) -> str:
    """Return one digest of the files that a data file names, and of their names.

    Args:
        digests: of the files, by their real paths.
    """
    # ascii: a name may have half of a surrogate pair.
    return digest_json({ascii(path): one and digests[one.real] for path, one in named.items()})


def _remember(cache_path: Path, fresh: dict[str, list[Any]]) -> None:
    """Add to the cache, if this user may; a user who may not, or has no space, digests again."""
    try:
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(cache_path.with_name(".digests.lock")):
            write_json(cache_path, {**_load(cache_path), **fresh})
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise


def _digest(
    path: Path, known: list[Any] | None, now: Callable[[], int]
) -> tuple[str, list[Any] | None]:
    """The digest, and what to remember if that is new and the file is not."""
    before = _identity(path)
    if known is not None and known[:-1] == before:
        return str(known[-1]), None
    digest = digest_file(path)
    if _identity(path) != before:
        raise WorkspaceError(f"{path}: changes while it is read; wait until it is written.")
    is_old_enough = now() - max(before[1], before[2]) > _MIN_AGE_NANOSECONDS
    return digest, [*before, digest] if is_old_enough else None


def _identity(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _load(cache_path: Path) -> dict[str, list[Any]]:
    record = unless_damaged(lambda: find_record(cache_path, dict[str, list[Any]])) or {}
    return {key: value for key, value in record.items() if value}
