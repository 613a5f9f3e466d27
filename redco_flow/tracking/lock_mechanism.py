"""Record in a workspace whether its locks are flocks or hard links, so that all nodes agree.

Some file systems have no flock (Lustre without the mount option), or one that ends at the node
(Lustre's localflock, BeeGFS by default). The first process that opens a workspace tries flock and
records what it finds; `redco-flow doctor` compares nodes and corrects the record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from redco_flow.errors import UsageError
from redco_flow.records import write_json, write_new_json
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.typed_records import find_record

FLOCK = "flock"
LINKS = "links"
RECORD = ".locks.json"
SETTING = "REDCO_FLOW_LOCKS"
STALE_SETTING = "REDCO_FLOW_LOCK_STALE_SECONDS"
_MAX_STALE_SECONDS = 86400.0
IS_ABSENT = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of a file system that has no flock."""

_REMEDY = "Restore it, or delete it while no run is in progress; `redco-flow doctor` writes it."


class MechanismRecord(TypedDict):
    """.locks.json: the mechanism, why it was chosen, and by which host when.

    stale_seconds: a link lock whose heartbeat another process sees unchanged for this long is free.
    Longer than the 60 s for which NFS clients may remember a file's times.
    """

    mechanism: str
    stale_seconds: float
    why: str
    host: str
    time: str


def mechanism_of(path: Path) -> str:
    """Return the mechanism of a lock: that of the nearest record above it; FLOCK without one.

    Raises:
        DamagedRecord: the record is damaged.
    """
    record = find_mechanism(path)
    return FLOCK if record is None else record["mechanism"]


def find_mechanism(path: Path) -> MechanismRecord | None:
    """Return the record beside a lock, or that of the workspace that it is in.

    Raises:
        DamagedRecord: it is damaged.
    """
    beside, *above = path.absolute().parents
    if (record := _read(beside)) is not None:
        return record
    # Others' directories, as /tmp, have no say.
    root = next((one for one in above if (one / RECORD).exists() and _is_workspace(one)), None)
    return None if root is None else _read(root)


def establish(root: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the mechanism of a workspace; record it if it has none yet.

    Args:
        environment: REDCO_FLOW_LOCKS chooses it instead of a trial; of a workspace without a
            record, REDCO_FLOW_LOCK_STALE_SECONDS sets `stale_seconds`.

    Raises:
        UsageError: REDCO_FLOW_LOCKS is neither `flock` nor `links`, or contradicts the record.
        OSError: the record cannot be written; names it.
    """
    requested = environment.get(SETTING, "")
    if requested not in ("", FLOCK, LINKS):
        raise UsageError(f"{SETTING} is {requested!r}: set it to {FLOCK} or {LINKS}, or unset it.")
    record = _read(root)
    if record is None:
        problem = "" if requested else flock_problem(root)
        why = f"{SETTING} was set" if requested else problem or "flock works"
        record = _record_once(root, requested or (LINKS if problem else FLOCK), why)
    if requested and requested != record["mechanism"]:
        raise UsageError(
            f"{SETTING} is {requested}, but the locks of workspace {root} are "
            f"{record['mechanism']} ({record['why']}). Unset it, or delete {root / RECORD} while "
            f"no run is in progress in that workspace."
        )
    return record["mechanism"]


def switch_to_links(path: Path, error: OSError) -> MechanismRecord:
    """Record links for a lock whose flock failed, unless its workspace records that flock works.

    Returns:
        The record.

    Raises:
        OSError: it does: then this node differs from the one that recorded it.
    """
    folders = path.absolute().parents
    root = next((one for one in folders if _is_workspace(one)), folders[0])
    record = find_mechanism(path)
    if record is None:
        record = _record_once(root, LINKS, f"flock failed: {error.strerror}")
    if record["mechanism"] != LINKS:
        raise OSError(
            error.errno,
            f"{error.strerror}: flock does not work on {os.uname().nodename}, but worked on "
            f"{record['host']}, where the workspace was made. Run `redco-flow doctor -p PROFILE` "
            f"while no run is in progress: it has the workspace use locks that need no flock",
            str(path),
        ) from error
    return record


def record_links(root: Path, why: str) -> None:
    """Have a workspace use link locks from now on; call it while no process holds a lock.

    Raises:
        OSError: the record cannot be written; names it.
    """
    write_json(root / RECORD, _new_record(LINKS, why))


def flock_problem(folder: Path) -> str:
    """Return why flock does not work in a directory on this node; "" where it does."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        try:
            fcntl.flock(trial, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in IS_ABSENT:
                raise
            return f"flock failed: {error.strerror}"
    return ""


def _record_once(root: Path, mechanism: str, why: str) -> MechanismRecord:
    """Write the record, unless another process is faster; return the one that is there."""
    if write_new_json(root / RECORD, _new_record(mechanism, why)):
        with contextlib.suppress(OSError):  # for all who may use the workspace
            (root / RECORD).chmod(0o600 | root.stat().st_mode & 0o666)
    record = _read(root)
    assert record is not None
    return record


def _new_record(mechanism: str, why: str) -> MechanismRecord:
    return MechanismRecord(
        mechanism=mechanism,
        stale_seconds=_stale_seconds(),
        why=why,
        host=os.uname().nodename,
        time=utc_now(),
    )


def _stale_seconds() -> float:
    text = os.environ.get(STALE_SETTING, "90")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < _MAX_STALE_SECONDS:
        raise UsageError(f"{STALE_SETTING} is {text!r}: set it to seconds, 90 by default.")
    return seconds


def _read(folder: Path) -> MechanismRecord | None:
    return find_record(folder / RECORD, MechanismRecord, remedy=_REMEDY)


def _is_workspace(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in ("runs", "results", "work"))
