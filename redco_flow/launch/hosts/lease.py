"""The lease of a host, in the host's file system: one attempt at a time.

A lease lives as long as one of its runners' processes does; before there are any, for a minute
from its last renewal by the launcher. Times are this host's own, counted from boot, so neither a
jump of the clock nor another host's clock matters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from redco_flow.errors import WorkspaceError
from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity

_SECONDS_WITHOUT_RUNNERS = 60.0


def acquire(directory: Path, owner: Mapping[str, Any], uses: Iterable[str] = ()) -> str:
    """Take the host for an attempt, or renew what it has.

    Args:
        directory: of this host; may be seen by others too.
        owner: `attempt`, unique in the world, and words for people: run, stage, launcher.
        uses: paths that it needs, added to those that the lease names already.

    Returns:
        "" if the host is the attempt's now; else who has it.

    Raises:
        OSError: the directory cannot be written; names the path.
    """
    path = _path(directory)
    with exclusive(path.with_suffix(".lock")):
        present = _read(path)
        if present is not None and _is_live(present) and not _is_of(present, owner):
            return _describe(present)
        own = present if present is not None and _is_of(present, owner) else {}
        _write(path, owner, own.get("runners", []), sorted({*own.get("uses", []), *uses}))
    return ""


def hand_to_runners(
    directory: Path, owner: Mapping[str, Any], runners: list[dict[str, Any]]
) -> None:
    """Let the lease live as long as these processes."""
    path = _path(directory)
    with exclusive(path.with_suffix(".lock")):
        present = _read(path)
        is_own = present is not None and _is_of(present, owner)
        _write(path, owner, runners, present.get("uses", []) if present and is_own else [])


def release(directory: Path, owner: Mapping[str, Any]) -> None:
    """Give the host back; nothing happens if it is another's by now."""
    path = _path(directory)
    with exclusive(path.with_suffix(".lock")):
        present = _read(path)
        if present is not None and _is_of(present, owner):
            path.unlink()


def holder(directory: Path) -> str:
    """Say who has the host; "" if it is free."""
    present = _read(_path(directory))
    return _describe(present) if present is not None and _is_live(present) else ""


def in_use(directory: Path) -> set[str]:
    """Return the paths that a live lease names, of this host or of another that sees the directory.

    Raises:
        WorkspaceError: a lease is damaged.
    """
    used: set[str] = set()
    for path in (directory / "leases").glob("*.json"):
        record = _read(path)
        if record is None and path.exists():
            raise WorkspaceError(
                f"{path} is damaged: the files in use in {directory} are unknown, so nothing "
                f"is removed. If no job runs there, delete the file."
            )
        if record is not None and _is_live(record):
            used |= set(record.get("uses", []))
    return used


def _path(directory: Path) -> Path:
    folder = directory / "leases"
    folder.mkdir(exist_ok=True)
    return folder / f"{os.uname().nodename}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json_if_present(path)
    except ValueError:  # damaged: no process can show that it is its own
        return None
    return record if isinstance(record, dict) and {"owner", "runners"} <= record.keys() else None


def _write(
    path: Path, owner: Mapping[str, Any], runners: list[dict[str, Any]], uses: list[str]
) -> None:
    boot_id = ProcessIdentity.current().boot_id
    renewed = {"boot_id": boot_id, "seconds_since_boot": _seconds_since_boot()}
    record = {"owner": dict(owner), "runners": runners, "uses": uses, "renewed": renewed}
    write_json(path, record)


def _is_of(record: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return bool(record["owner"].get("attempt") == owner["attempt"])


def _is_live(record: Mapping[str, Any]) -> bool:
    if record["runners"]:
        return any(ProcessIdentity.from_json(one).is_alive() for one in record["runners"])
    renewed = record.get("renewed", {})
    age = _seconds_since_boot() - float(renewed.get("seconds_since_boot", 0))
    is_same_boot = renewed.get("boot_id") == ProcessIdentity.current().boot_id
    return is_same_boot and 0 <= age < _SECONDS_WITHOUT_RUNNERS


def _describe(record: Mapping[str, Any]) -> str:
    owner = record["owner"]
    return f"run {owner.get('run')} (stage {owner.get('stage')}) of {owner.get('launcher')}"


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
