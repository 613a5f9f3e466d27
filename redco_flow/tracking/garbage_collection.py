"""Decide by the workspace's records what can be deleted, and delete it.

A pass holds the lock under which artifacts get their names. A run that reuses a result first
records its fingerprint and then looks at the artifacts under that lock (`results.claim_result`), so
that either the pass sees the record or the run sees the deletion and computes the result again.
What is deleted is first renamed into `<workspace>/trash/`; a pass that was killed is completed by
the next one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.records import refuse_link, who_may_write
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import (
    DeletionRecord,
    find_deletion,
    write_deletion,
)
from redco_flow.tracking.disk_usage import DiskSize, InodeCount, log_directories
from redco_flow.tracking.file_lock import LockRequest
from redco_flow.tracking.locks import exclusive, is_locked
from redco_flow.tracking.needs import Needs, RunReferences, find_needs
from redco_flow.tracking.publishing import clean_after_dead_publishers
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

SECONDS_IN_USE = 3600.0
"""An artifact or a file of rows that no run refers to yet is kept so long after its last use: it is
published, or written, before the run that refers to it."""

WORK = "work directory"
# Of work directories, of rows for `predict`, and in the trash: whatever else is there is not ours.
_OWN_NAME = re.compile(r"[0-9a-f]{16}")
_REMOVED_NAME = re.compile(r"\.[0-9a-f]{16}\..+")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Selection:
    """A choice among the things that are not needed.

    Args:
        runs: ids of runs whose artifacts, work and logs go, whatever state the runs are in.
        keep_last: release all completed runs of a pipeline but this number; a sweep counts once.
        older_than: release completed runs that ended longer ago; and cache files unused so long.
            With `keep_last`, a run must fulfil both.
        unreferenced: everything that no run, alias or schedule refers to.
    """

    runs: frozenset[str] = frozenset()
    keep_last: int | None = None
    older_than: timedelta | None = None
    unreferenced: bool = False


@dataclass(frozen=True)
class Garbage:
    """A directory or file to delete.

    Args:
        what: its kind, for people.
        artifact: whose files these are.
        fingerprints: results that have the artifact.
    """

    path: Path
    what: str
    artifact: Artifact | None = None
    fingerprints: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Survey:
    """The consequences of a selection.

    Args:
        released: runs whose references count no longer.
        garbage: what is deleted.
        kept: artifacts of the selected runs that are needed: id to the reason.
    """

    released: tuple[RunReferences, ...]
    garbage: tuple[Garbage, ...]
    kept: Mapping[str, str]

    def size(self) -> DiskSize:
        """Return what deleting it frees."""
        count = InodeCount()
        count.add(*(one.path for one in self.garbage))
        return count.freed()


@dataclass(frozen=True)
class Deleted:
    """The result of a deletion.

    Args:
        size: what that freed, leftovers of earlier passes included.
        problems: what could not be deleted, and why.
    """

    survey: Survey
    size: DiskSize
    problems: list[str] = field(default_factory=list)


def survey(
    workspace: Workspace, selection: Selection, *, now: Callable[[], float] = time.time
) -> Survey:
    """Return what the selection would delete; changes nothing.

    Raises:
        DamagedRecord: a run, alias, schedule or sweep has a damaged record, so that it is not known
            what is needed.
        UsageError: a selected run, or something that only it has, is in use; or what would be
            deleted is behind a symbolic link.
    """
    needs = find_needs(workspace, selection.runs)
    if selection.runs:
        _refuse_needed(needs, selection.runs)
    moment = now()
    released = [
        one
        for one in needs.runs
        if one.run.id in selection.runs or _is_old(one, needs, selection, moment)
    ]
    needs.release(released)
    garbage = list(_Search(needs, [*released, *needs.deleted], selection, moment).garbage())
    _refuse_links(workspace, {one.path.parent for one in garbage})
    chosen = {one for run in released if run.run.id in selection.runs for one in run.artifacts}
    kept = {one: why for one in sorted(chosen) if (why := needs.why(one))}
    return Survey(tuple(released), tuple(garbage), kept)


def _refuse_needed(needs: Needs, runs: frozenset[str]) -> None:
    for one in needs.runs:
        if one.run.id not in runs:
            continue
        if reason := needs.held.get(one.run.id):
            raise UsageError(f"run {one.run.id} is not deleted: {reason}. Nothing was changed.")
        for artifact_id in sorted(one.artifacts):
            if artifact_id in needs.named and not needs.is_used(artifact_id, but_by=runs):
                raise UsageError(
                    f"run {one.run.id} is not deleted: {needs.named[artifact_id]} needs "
                    f"{artifact_id[:12]}, which no other run has. Nothing was changed."
                )


def _is_old(one: RunReferences, needs: Needs, selection: Selection, now: float) -> bool:
    """Tell whether --keep-last and --older-than release a run."""
    if selection.keep_last is None and selection.older_than is None:
        return False
    is_ours = os.access(one.run.path, os.W_OK)  # in a shared workspace, of a group that may write
    if not one.has_ended or one.run.id in needs.held or not is_ours:
        return False
    if selection.older_than is not None:
        ended = str(one.run.read_state().get("ended_at") or one.run.record["created_at"])
        age = datetime.fromtimestamp(now, UTC) - datetime.fromisoformat(ended)
        if age <= selection.older_than:
            return False
    return selection.keep_last is None or needs.rank(one) >= selection.keep_last


def _refuse_links(workspace: Workspace, folders: Iterable[Path]) -> None:
    """Raise where one of the folders is behind a link: what is there may be another workspace's."""
    root = workspace.root.resolve()
    for folder in folders:
        if folder.resolve() != root / folder.relative_to(workspace.root):
            raise UsageError(
                f"{folder} is behind a symbolic link (its place is {folder.resolve()}), where "
                f"nothing is deleted, for it may belong to another workspace. Nothing was changed."
            )


@dataclass(frozen=True)
class _Search:
    """A search for garbage in one workspace.

    Args:
        needs: without those of `gone`.
        gone: runs that are released, or were deleted before.
        now: seconds since 1970.
    """

    needs: Needs
    gone: Sequence[RunReferences]
    selection: Selection
    now: float

    def garbage(self) -> Iterator[Garbage]:
        """Yield it; artifacts last."""
        artifacts = list(self._artifacts())
        yield from self._work()
        yield from self._predict_files()
        yield from self._cache_files(artifacts)
        for one in self.gone:
            yield from (Garbage(path, "log directory") for path in log_directories(one.run))
        yield from artifacts

    @property
    def _workspace(self) -> Workspace:
        return self.needs.workspace

    def _artifacts(self) -> Iterator[Garbage]:
        ids = {one for run in self.gone for one in self.needs.outputs_of(run)}
        for artifact in ArtifactStore(self._workspace).list():
            if self.needs.why(artifact.id) or not os.path.lexists(artifact.path):
                continue
            if artifact.id in ids or self._is_unused(artifact.directory):
                made_by = str(artifact.produced_by.get("fingerprint", ""))
                fingerprints = self.needs.fingerprints_of(artifact.id) | ({made_by} - {""})
                yield Garbage(artifact.path, f"{artifact.kind} artifact", artifact, fingerprints)

    def _work(self) -> Iterator[Garbage]:
        names = {one[:SHORT_DIGITS] for run in self.gone for one in run.fingerprints}
        runs = {run.run.id for run in self.gone}
        for path in sorted(self._workspace.work.glob("*")):
            if not path.is_dir() or path.is_symlink():
                continue
            if _REMOVED_NAME.fullmatch(path.name):  # or left by a process that was killed
                is_garbage = self._is_unused(path)
            elif not _OWN_NAME.fullmatch(path.name):
                continue
            else:
                holder = _last_holder(path)
                is_chosen = self.selection.unreferenced or path.name in names or holder in runs
                is_garbage = is_chosen and not self.needs.needs_work(path.name, holder)
            if is_garbage:
                yield Garbage(path, WORK)

    def _predict_files(self) -> Iterator[Garbage]:
        # By name: a run may have been started through another path to the workspace.
        chosen = {Path(one.run.record.get("pipeline_path", "")).parent.name for one in self.gone}
        for path in sorted(self._workspace.predict.glob("*")):
            if not _OWN_NAME.fullmatch(path.name) or path.name in self.needs.folders:
                continue
            if path.name in chosen or self._is_unused(path):
                yield Garbage(path, "predict directory")

    def _cache_files(self, artifacts: Iterable[Garbage]) -> Iterator[Garbage]:
        """Yield digests of artifacts that are gone, and files that were not used for long."""
        gone = {one.artifact.id for one in artifacts if one.artifact}
        digests, store = self._workspace.cache / "artifacts", ArtifactStore(self._workspace)
        older_than = self.selection.older_than
        for path in sorted(self._workspace.cache.rglob("*")):
            if not path.is_file() or path.name[0] == "." or path.parent.suffix == ".holders":
                continue
            is_garbage = path.parent == digests and path.stem in gone
            if self.selection.unreferenced and path.parent == digests:
                found = store.find(path.stem)
                is_garbage |= found is None or find_deletion(found) is not None
            if older_than is not None:
                is_garbage |= _age(path, self.now) > older_than.total_seconds()
            if is_garbage:
                yield Garbage(path, "cache file")

    def _is_unused(self, path: Path) -> bool:
        """Whether the selection takes what no run refers to, and this was not used lately."""
        return self.selection.unreferenced and _age(path, self.now) > SECONDS_IN_USE


def _last_holder(work_directory: Path) -> str:
    """The run whose worker held the directory's lock last; runs ahead record no fingerprint."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((work_directory / "lock").read_bytes())["run"])
    return ""


def _age(path: Path, now: float) -> float:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0.0
    is_file = path.is_file()  # the time of access of a directory is that of its last listing
    return now - max(status.st_mtime, status.st_atime if is_file else 0.0)


def delete(
    workspace: Workspace,
    selection: Selection,
    deletion: DeletionRecord,
    *,
    now: Callable[[], float] = time.time,
) -> Deleted:
    """Delete what the selection names and what is left of passes that were killed.

    Args:
        deletion: the record that is kept.

    Raises:
        DamagedRecord, UsageError: as `survey`; nothing was deleted.
        OSError: the disk is read-only or has no room for a record; names the path.
    """
    trash = _Trash(workspace, deletion)
    size = trash.empty()
    with exclusive(workspace.artifacts_lock) as held:
        for folder in (workspace.artifacts, *workspace.artifacts.glob("[!.]*")):
            clean_after_dead_publishers(folder)
        found = survey(workspace, selection, now=now)
        runs = [one.run.path for one in found.released]
        unmarked = [path for path in runs if not trash.mark(path)]
        deleted = []
        for one in found.garbage:
            held.check()
            if trash.take(one):
                deleted.append(one)
        for path in unmarked:
            write_deletion(path, deletion)
    size += trash.empty()
    return Deleted(Survey(found.released, tuple(deleted), found.kept), size, trash.problems)


class _Trash:
    """`<workspace>/trash/`, and the record that is written of what goes there."""

    def __init__(self, workspace: Workspace, deletion: DeletionRecord) -> None:
        self._workspace, self._deletion = workspace, deletion
        self._folder = workspace.root / "trash"
        self.problems: list[str] = []

    def mark(self, folder: Path) -> bool:
        """Write the record, or return False where the disk is full and nothing can be written."""
        try:
            write_deletion(folder, self._deletion)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return False
        return True

    def take(self, garbage: Garbage) -> bool:
        """Move something here; return False where it is in use or another user's."""
        try:
            if garbage.artifact is not None:
                return self._take_artifact(garbage.artifact, garbage.fingerprints)
            if garbage.what == WORK and garbage.path.name[0] != ".":
                return self._take_work(garbage.path)
            self._move(garbage.path)
        except PermissionError as error:
            path = error.filename or garbage.path
            self.problems.append(f"{garbage.path}: {error.strerror}. {who_may_write(path)}.")
            return False
        return True

    def _take_artifact(self, artifact: Artifact, fingerprints: Iterable[str]) -> bool:
        works = [self._workspace.work_directory(one) for one in fingerprints]
        if any(is_locked(one / "lock") or is_locked(one.with_suffix(".claim")) for one in works):
            return False  # a worker or launcher reuses or publishes it at this moment
        is_marked = self.mark(artifact.directory)
        self._move(artifact.path)
        if not is_marked:  # on a full disk: its files make room for the record
            self.empty()
            write_deletion(artifact.directory, self._deletion)
        return True

    def _take_work(self, path: Path) -> bool:
        """Hold the locks of launchers and workers, so that no job begins in the directory."""
        claim = LockRequest(path.with_suffix(".claim")).try_once()
        if claim is None:
            return False
        try:
            lock = LockRequest(path / "lock").try_once()
            if lock is None:
                return False
            try:
                self._move(path)
            finally:
                lock.release()
        finally:
            claim.release()
        return True

    def _move(self, path: Path) -> None:
        refuse_link(self._folder)
        self._folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # caches may be deleted at any time
            path.rename(self._folder / secrets.token_hex(8))

    def empty(self) -> DiskSize:
        """Delete what is here, also what an earlier pass left; return what that frees."""
        refuse_link(self._folder)
        found = (one for one in self._folder.glob("*") if _OWN_NAME.fullmatch(one.name))
        count, entries = InodeCount(), sorted(found)
        for path in entries:
            with suppress(PermissionError):  # noted below
                count.add(path)
        for path in entries:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, onerror=self._note)
            else:
                path.unlink(missing_ok=True)
        return count.freed()

    def _note(self, function: object, path: str, info: tuple[Any, Any, Any]) -> None:
        error = info[1]
        if isinstance(error, PermissionError):
            self.problems.append(f"{path}: {error.strerror}. {who_may_write(path)}.")
        elif not isinstance(error, FileNotFoundError) and error.errno != errno.ENOTEMPTY:
            raise error
