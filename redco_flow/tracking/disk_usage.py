"""Count the bytes and files of a workspace by what they are; hard-linked files count once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.needs import read_references
from redco_flow.tracking.results import list_results
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace


@dataclass(frozen=True)
class DiskSize:
    """A size.

    Args:
        num_bytes: of files, as `ls -l` prints them.
        num_files: files and directories: inodes.
    """

    num_bytes: int = 0
    num_files: int = 0

    def __add__(self, other: DiskSize) -> DiskSize:
        return DiskSize(self.num_bytes + other.num_bytes, self.num_files + other.num_files)


class InodeCount:
    """Counts files, each inode once, whatever number of names it has."""

    def __init__(self) -> None:
        self._inodes: dict[tuple[int, int], os.stat_result] = {}
        self._num_names: Counter[tuple[int, int]] = Counter()

    def add(self, *paths: Path) -> DiskSize:
        """Count files and directories with all that they hold; return what is new."""
        total = DiskSize()
        for found in (one for path in paths for one in _statuses(path)):
            key = (found.st_dev, found.st_ino)
            self._num_names[key] += 1
            if key not in self._inodes:
                self._inodes[key] = found
                total += _size(found)
        return total

    def freed(self) -> DiskSize:
        """Return what deleting everything counted frees: inodes that have no other name."""
        found = self._inodes.items()
        # The number of links of a directory counts its subdirectories.
        gone = (
            one
            for key, one in found
            if _is_directory(one) or self._num_names[key] >= self._inodes[key].st_nlink
        )
        return sum(map(_size, gone), DiskSize())


def _size(status: os.stat_result) -> DiskSize:
    return DiskSize(0 if _is_directory(status) else status.st_size, 1)


def _is_directory(status: os.stat_result) -> bool:
    return status.st_mode & 0o170000 == 0o040000


def _statuses(path: Path | str) -> Iterator[os.stat_result]:
    """Status of a path and of all below it, without following links; files may vanish."""
    try:
        status = os.lstat(path)
        names = os.listdir(path) if _is_directory(status) else []
    except (FileNotFoundError, NotADirectoryError):
        return
    yield status
    for name in names:
        yield from _statuses(f"{path}/{name}")


@dataclass(frozen=True)
class UsageRow:
    """One line of a workspace's disk usage.

    Args:
        what: `artifacts/<kind>`, `work`, `cache/<folder>`, `predict`, `logs`, `runs`, the name of
            another folder of the workspace, or `other`: locks, and these folders themselves.
        stage: the stage that made it, where one did.
        num_items: artifacts, work directories, runs ….
    """

    what: str
    stage: str
    num_items: int
    size: DiskSize


def disk_usage(workspace: Workspace) -> list[UsageRow]:
    """Return what uses the workspace's disk; what has several names counts in the first row.

    Raises:
        OSError: a directory cannot be read; names it.
    """
    count = InodeCount()
    found: dict[tuple[str, str], list[DiskSize]] = {}
    for what, stage, path in _items(workspace):
        found.setdefault((what, stage), []).append(count.add(path))
    rows = [
        UsageRow(what, stage, len(sizes), sum(sizes, DiskSize()))
        for (what, stage), sizes in found.items()
    ]
    return [row for row in rows if row.size.num_files]


def _items(workspace: Workspace) -> Iterator[tuple[str, str, Path]]:
    """Everything: what it is, the stage that made it, and its path. Artifacts come first."""
    listed = (
        workspace.artifacts,
        workspace.work,
        workspace.cache,
        workspace.predict,
        workspace.runs,
    )
    for artifact in ArtifactStore(workspace).list():
        stage = str(artifact.produced_by.get("stage", ""))
        yield f"artifacts/{artifact.kind}", stage, artifact.directory
    stages = {one.fingerprint[:SHORT_DIGITS]: one.stage for one in list_results(workspace)}
    for path in _children(workspace.work):
        if path.is_dir():
            yield "work", stages.get(path.name, ""), path
    for path in _children(workspace.cache):
        yield f"cache/{path.name}" if path.is_dir() else "cache", "", path
    for path in _children(workspace.predict):
        yield "predict", "", path
    for run in list_runs(workspace):
        for path in log_directories(run):
            yield "logs", path.relative_to(run.path).parts[1], path
        yield "runs", "", run.path
    for path in _children(workspace.root):
        yield "other" if path in listed else path.name, "", path


def log_directories(run: RunDirectory) -> list[Path]:
    """Return the directories of a run's logs and of what trainings log for TensorBoard, W&B …."""
    attempts = (AttemptDirectory(path) for path in sorted(run.path.glob("stages/*/attempts/*")))
    found = (
        path
        for attempt in attempts
        for one in (attempt, *attempt.tasks)
        for path in (one.logs, one.path / "tensorboard", one.path / "wandb", one.profile_path)
    )
    return [path for path in found if path.is_dir()]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def size_of_run(workspace: Workspace, run: RunDirectory) -> DiskSize:
    """Return the size of a run: its records and logs, and its stages' artifacts and work.

    Of a run with a damaged record it is the size of its own directory.
    """
    found = unless_damaged(lambda: read_references(run))
    store = ArtifactStore(workspace)
    artifacts = map(store.find, found.artifacts if found else ())
    return InodeCount().add(
        run.path,
        *(one.directory for one in artifacts if one is not None),
        *map(workspace.work_directory, found.fingerprints if found else ()),
    )
