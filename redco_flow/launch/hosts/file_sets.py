"""Sets of digested files that move between workspaces: artifacts, checkpoints, raw data.

The same functions serve both ends. A file travels under its BLAKE3 into a folder of arrivals, where
a broken transfer goes on; a set is put in place whole, once every file is what its digest says.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from redco_flow.errors import ArtifactError, WorkspaceError
from redco_flow.records import copy_file, digest_file, read_json, write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.file_digests import digest_files
from redco_flow.tracking.publishing import Manifest, is_as_written
from redco_flow.tracking.workspace import CHECKPOINTS, COMMIT, SHORT_DIGITS, Workspace, check_name

# The engine's mark of a step whose optimizer state was deleted, and that state's folder.
_PARAMS_ONLY = "params_only"
_TRAINING = "training/"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HashedFile:
    """One file: its path in the set, its size, its BLAKE3."""

    path: str
    bytes: int
    blake3: str


@dataclass(frozen=True)
class FileSet:
    """Files that belong together.

    Args:
        kind: artifact, checkpoint or data.
        name: the artifact's kind, the work directory's name, or the data folder's.
        record: the artifact's manifest or the checkpoint's commit; empty for data.
    """

    kind: str
    name: str
    files: list[HashedFile]
    record: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_artifact(cls, manifest: Mapping[str, Any]) -> FileSet:
        """Return the set of an artifact's files."""
        files = [HashedFile(**entry) for entry in manifest["files"]]
        return cls("artifact", str(manifest["kind"]), files, dict(manifest))

    @classmethod
    def of_checkpoint(cls, workspace: Workspace, work: str, step: int) -> FileSet:
        """Return the set of a committed step's files; without optimizer state that was deleted.

        Raises:
            OSError, ValueError, KeyError: the commit is gone or damaged.
        """
        folder = workspace.work / work / CHECKPOINTS / str(step)
        commit, mark = read_json(folder / COMMIT), folder / _PARAMS_ONLY
        files = [HashedFile(**entry) for entry in commit["files"]]
        if mark.exists():
            files = [one for one in files if not one.path.startswith(_TRAINING)]
            files.append(HashedFile(_PARAMS_ONLY, 0, digest_file(mark)))
        return cls("checkpoint", work, files, commit)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> FileSet:
        """Read what `to_json` made on another machine, whose names are not trusted.

        Raises:
            ArtifactError: a path is absolute or has '..', or a digest is none.
            UsageError: a name is none.
        """
        check_name(record["name"], "name of a set of files")
        files = [HashedFile(**entry) for entry in record["files"]]
        for entry in files:
            path = PurePosixPath(entry.path)
            if path.is_absolute() or ".." in path.parts:
                raise ArtifactError(f"{entry.path}: a file's path must stay inside its set.")
            if not _DIGEST.fullmatch(entry.blake3):
                raise ArtifactError(f"{entry.path}: {entry.blake3!r} is no BLAKE3.")
        return cls(record["kind"], record["name"], files, record["record"])

    def to_json(self) -> dict[str, Any]:
        """Return the set as a JSON record."""
        return asdict(self)

    def folder(self, workspace: Workspace) -> Path:
        """The folder of its files, in a workspace that has it."""
        if self.kind == "artifact":
            directory = workspace.artifacts / self.name / str(self.record["id"])[:SHORT_DIGITS]
            return directory / "files"
        if self.kind == "checkpoint":
            return workspace.work / self.name / CHECKPOINTS / str(int(self.record["step"]))
        return workspace.cache / "data" / self.name

    @property
    def digests(self) -> set[str]:
        """Digests of the files to transfer; equal files are transferred once."""
        return {entry.blake3 for entry in self.files}

    def thing(self, workspace: Workspace) -> Path:
        """The unit of transfer and deletion: artifact, work directory, or the data's folder."""
        if self.kind == "artifact":
            return self.folder(workspace).parent
        return workspace.work / self.name if self.kind == "checkpoint" else self.folder(workspace)

    def is_here(self, workspace: Workspace) -> bool:
        """Say whether the workspace has it with every byte as it should be; reads files once."""
        if self.kind == "artifact":
            return ArtifactStore(workspace).is_intact(str(self.record["id"]))
        folder = self.folder(workspace)
        if self.kind == "checkpoint" and not (folder / COMMIT).is_file():
            return False
        if any(_size(folder / entry.path) != entry.bytes for entry in self.files):
            return False
        paths = [folder / entry.path for entry in self.files]
        try:
            digests = digest_files(workspace, paths, cache=f"copies/{self.kind}-{self.name}.json")
        except WorkspaceError:
            return False
        return all(digests[folder / entry.path] == entry.blake3 for entry in self.files)


def wanted(workspace: Workspace, arrivals: Path, sets: Iterable[FileSet]) -> dict[str, int]:
    """Return the files that must still come: BLAKE3 to the bytes of it that have arrived."""
    arrivals.mkdir(parents=True, exist_ok=True)
    missing: dict[str, int] = {}
    for one in sets:
        if not one.is_here(workspace):
            for entry in one.files:
                arrived = _size(arrivals / entry.blake3) or 0
                if arrived > entry.bytes:
                    (arrivals / entry.blake3).unlink()
                    arrived = 0
                missing[entry.blake3] = arrived
    return missing


def put_in_place(workspace: Workspace, arrivals: Path, sets: Iterable[FileSet]) -> None:
    """Make the arrived files what they belong to; what is there already is left as it is.

    Raises:
        ArtifactError: a file is not what its digest says; it is removed and fetched again.
        OSError: the disk is full or read-only.
    """
    missing = [one for one in sets if not one.is_here(workspace)]
    # Checkpoints of one training share files.
    uses = Counter(digest for one in missing for digest in one.digests)
    for one in missing:
        temporary = workspace.cache / f"assembling-{secrets.token_hex(6)}"
        try:
            _assemble(one, arrivals, temporary)
            _install(one, workspace, temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        uses.subtract(one.digests)
        for digest in one.digests:
            if not uses[digest]:
                (arrivals / digest).unlink(missing_ok=True)


def checkpoint_sets(workspace: Workspace, work: str, steps: Iterable[int]) -> Iterator[FileSet]:
    """Yield the committed ones of these steps of a work directory."""
    for step in steps:
        try:
            yield FileSet.of_checkpoint(workspace, work, step)
        except (OSError, ValueError, KeyError):
            continue  # just deleted, or damaged: the engine says so when it is asked for it


def forget_steps(workspace: Workspace, work: str, kept: Iterable[int]) -> None:
    """Delete the checkpoints that their owner has deleted."""
    keep = set(kept)
    for step in workspace.committed_steps(work):
        if step not in keep:
            folder = workspace.work / work / CHECKPOINTS / str(step)
            # First the commit: a kill in between must not leave half a checkpoint that counts.
            (folder / COMMIT).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _assemble(one: FileSet, arrivals: Path, temporary: Path) -> None:
    for entry in one.files:
        arrived, target = arrivals / entry.blake3, temporary / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = copy_file(arrived, target)
        if digest != entry.blake3:
            arrived.unlink()
            raise ArtifactError(
                f"{entry.path} of {one.kind} {one.name} arrived damaged (BLAKE3 differs); it is "
                f"copied again."
            )


def _install(one: FileSet, workspace: Workspace, temporary: Path) -> None:
    if one.kind == "artifact":
        record = one.record
        if not is_as_written(cast("Manifest", record)):
            raise ArtifactError(
                f"the manifest of {one.name} {record['id']} is not what was published where it "
                f"comes from; `redco-flow verify` there says more."
            )
        ArtifactStore(workspace).publish(
            one.name,
            temporary,
            metadata=record.get("metadata"),
            parents=record.get("parents"),
            produced_by=record.get("produced_by"),
            digests={entry.path: entry.blake3 for entry in one.files},
            identity=record.get("identity"),
        )
        return
    final = one.folder(workspace)
    final.parent.mkdir(parents=True, exist_ok=True)
    if one.kind == "checkpoint":
        write_json(temporary / COMMIT, one.record)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
