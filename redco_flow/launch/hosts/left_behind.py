"""What attempts whose launcher lost them left in their directories on this host.

Described for a launcher, which brings it home; marked as a copy once the launcher shows that it
has all of it: every byte of logs and metrics, by digest, and every record. What it does not know
stays, and so does what a process still writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from redco_flow.launch.call import read_call
from redco_flow.launch.hosts.copies import Copies, mark_made
from redco_flow.launch.hosts.follow import is_mirrored
from redco_flow.launch.hosts.ranks import runners_of
from redco_flow.records import digest_file, read_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

_RESULT = "result.json"
_OWN = re.compile(r"(call|cancel|job)\.json|ranks/\d+/(lock|runner\.json)|(.*/)?\.[^/]+")
"""Files of this host's, and of writes that were cut short: they are missed nowhere else."""


class LeftBehind(TypedDict):
    """What one attempt left.

    Args:
        sizes: of growing files, by name in the attempt's directory.
        records: small JSON files, by name.
    """

    sizes: dict[str, int]
    records: dict[str, Any]


class BroughtHome(TypedDict):
    """What a launcher has of one attempt.

    Args:
        digests: BLAKE3 of growing files, by name.
        records: as in `LeftBehind`.
        has_result: whether what the attempt was to make is made, there or elsewhere, so that
            no attempt goes on from here.
    """

    digests: dict[str, str]
    records: dict[str, Any]
    has_result: bool


def describe(directory: Path, attempt: AttemptDirectory) -> LeftBehind | None:
    """Return what lies in an attempt's directory; None where it is a copy, or not here.

    Args:
        directory: of this host.
    """
    if not attempt.call_path.exists() or Copies(directory).is_copy(_run_of(attempt)):
        return None
    sizes: dict[str, int] = {}
    records: dict[str, Any] = {}
    for name, path in _files(attempt):
        if is_record(name):
            records |= _record(name, path)
        elif is_mirrored(name):
            sizes[name] = path.stat().st_size
    return LeftBehind(sizes=sizes, records=records)


def settle(directory: Path, attempt: AttemptDirectory, home: BroughtHome) -> bool:
    """Mark an attempt's run directory as a copy if all of it stands at home; say whether it does.

    What it made is marked too where the stage has its result.

    Args:
        directory: of this host.

    Raises:
        UsageError: its call.json is damaged.
        OSError: the disk is full or read-only, or a file cannot be read; names the path.
    """
    if any(runner.is_alive() for _, runner in runners_of(attempt)):
        return False
    if not all(_is_home(name, path, home) for name, path in _files(attempt)):
        return False
    copies, run = Copies(directory), _run_of(attempt)
    with copies.locked():
        if home["has_result"]:
            workspace = Workspace(directory / "workspace")
            mark_made(copies, workspace, run, read_call(attempt.call_path).fingerprint)
        copies.mark([run])
    return True


def is_record(name: str) -> bool:
    """Say whether a launcher takes a file as a record; the result has its own way home."""
    return is_mirrored(name) and name.endswith(".json") and name != _RESULT


def _is_home(name: str, path: Path, home: BroughtHome) -> bool:
    if is_record(name):
        return name in home["records"] and _record(name, path) == {name: home["records"][name]}
    return name in home["digests"] and home["digests"][name] == digest_file(path)


def _files(attempt: AttemptDirectory) -> Iterator[tuple[str, Path]]:
    """Everything that may be missed elsewhere."""
    for path in sorted(attempt.path.rglob("*")):
        name = path.relative_to(attempt.path).as_posix()
        if not path.is_dir() and not _OWN.fullmatch(name) and name != _RESULT:
            yield name, path


def _record(name: str, path: Path) -> dict[str, Any]:
    """The record by its name; nothing if it is damaged."""
    try:
        return {name: read_json(path)}
    except ValueError:
        return {}


def _run_of(attempt: AttemptDirectory) -> Path:
    return attempt.path.parents[3]
