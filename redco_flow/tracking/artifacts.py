"""Artifacts: immutable, digested results, each a directory with its manifest beside its files.

An artifact's id is the digest of its kind and its files, or of the identity that its producer gives
where equal content has different files. So equal content is one artifact, and publishing it twice
changes nothing. Knows no stages: who produced what is only carried along.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError, DamagedRecord, UsageError, WorkspaceError
from redco_flow.records import digest_file, explain_no_space
from redco_flow.tracking.file_digests import digest_files
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import Clock, utc_now
from redco_flow.tracking.publishing import (
    FileEntry,
    Manifest,
    clean_after_dead_publishers,
    content_id,
    discard,
    is_as_written,
    put_in_place,
    stage_files,
    write_manifest,
)
from redco_flow.tracking.sequence_index import read_sequences
from redco_flow.tracking.typed_records import read_record, unless_damaged
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace, check_name

_ID = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True)
class Artifact:
    """One published artifact.

    Args:
        id: 64 hex digits.
        kind: dataset, checkpoint, predictions, metrics, ….
        path: the directory of its files.
        manifest: the content of manifest.json.
    """

    id: str
    kind: str
    path: Path
    manifest: Manifest

    @property
    def directory(self) -> Path:
        """The artifact's own directory, with manifest.json and files/."""
        return self.path.parent

    @property
    def short_id(self) -> str:
        """The id's first 12 digits, enough to name it."""
        return self.id[:12]

    @property
    def num_bytes(self) -> int:
        """The size of all its files."""
        return sum(entry["bytes"] for entry in self.manifest["files"])

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata from its producer."""
        return self.manifest.get("metadata", {})

    @property
    def parents(self) -> dict[str, str]:
        """The artifacts that it was made from: name to id."""
        return self.manifest.get("parents", {})

    @property
    def produced_by(self) -> dict[str, Any]:
        """Stage, run, attempt, fingerprint, code, config_digest, host, time, versions."""
        return self.manifest.get("produced_by", {})


class ArtifactStore:
    """The artifacts of one workspace."""

    def __init__(self, workspace: Workspace, *, clock: Clock = utc_now) -> None:
        self._workspace = workspace
        self._root = workspace.artifacts
        self._clock = clock

    def publish(
        self,
        kind: str,
        source: Path,
        *,
        metadata: Mapping[str, Any] | None = None,
        parents: Mapping[str, str] | None = None,
        produced_by: Mapping[str, Any] | None = None,
        digests: Mapping[str, str] | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> Artifact:
        """Make `source` an artifact: whole, read-only and durable, or not at all.

        Files whose digest is given are committed by their producer and never written again:
        they are hard-linked where the file system can, and so become read-only in `source`
        too. All others are copied, and digested as they are copied.

        Args:
            kind: a name.
            source: a file, or a directory of regular files; empty directories are not kept.
            metadata: anything JSON that describes it; no part of its id.
            parents: name to id of the artifacts that it was made from.
            produced_by: who made it.
            digests: BLAKE3 of files by path relative to `source` (or by a file's name).
            identity: name to digest of all that makes the content what it is, if its files do
                not: equal ones are one artifact, whatever the files of the second are.

        Returns:
            The artifact; the one already there, unchanged, if its content is the same.

        Raises:
            ArtifactError: nothing to publish, a file that is not regular, an empty identity, an
                unwritable or full disk (names the path).
        """
        check_name(kind, "artifact kind")
        if identity is not None and not identity:
            raise ArtifactError(f"{kind} {source}: its identity is empty; give None or digests.")
        directory = self._root / kind
        clean_after_dead_publishers(directory)
        temporary = None
        try:
            temporary, entries = stage_files(directory, Path(source), digests or {})
            artifact_id = content_id(kind, entries, identity)
            # One that is here is used now, for what removes the old ones.
            with contextlib.suppress(OSError):  # it is not here, or may only be read
                os.utime(directory / artifact_id[:SHORT_DIGITS])
            present = self._load(directory / artifact_id[:SHORT_DIGITS])
            if present and present.id == artifact_id and not self._damage(present):
                return present
            manifest: Manifest = {
                "id": artifact_id,
                "kind": kind,
                "sequence": self._workspace.next_sequence(),
                "created_at": self._clock(),
                "files": entries,
                "metadata": dict(metadata or {}),
                "parents": dict(parents or {}),
                "produced_by": dict(produced_by or {}),
            }
            if identity is not None:
                manifest["identity"] = dict(identity)
            write_manifest(temporary, manifest)
            return self._register(temporary, artifact_id, directory)
        except OSError as error:
            advice = explain_no_space(error) or "Make it writable."
            raise ArtifactError(
                f"{kind} {source} cannot be published into {directory}: {error.strerror or error} "
                f"({error.filename or directory}). Nothing was published. {advice} Then resume the "
                f"run."
            ) from error
        finally:
            if temporary is not None:
                discard(temporary)

    def get(self, id_or_prefix: str) -> Artifact:
        """Return the artifact with this id, or the only one whose id begins so.

        Raises:
            ArtifactError: a whole id that is not here.
            UsageError: a prefix that fits none or several; lists the candidates.
        """
        text = id_or_prefix.strip().lower()
        found = list(self._fitting(text)) if _PREFIX.fullmatch(text) else []
        if len(found) == 1:
            return found[0]
        if found:
            listed = ", ".join(f"{one.id[:SHORT_DIGITS]} ({one.kind})" for one in found[:10])
            raise UsageError(f"{text!r} fits {len(found)} artifacts: {listed}. Add digits.")
        message = (
            f"no artifact {id_or_prefix!r} in {self._root}; `redco-flow artifacts` lists them."
        )
        raise ArtifactError(message) if _ID.fullmatch(text) else UsageError(message)

    def find(self, artifact_id: str) -> Artifact | None:
        """Return the artifact with this whole id, or None; its files may be damaged."""
        if not _ID.fullmatch(artifact_id):
            return None
        found = self._in_directories(artifact_id[:SHORT_DIGITS])
        return next((one for one in found if one.id == artifact_id), None)

    def is_prefix(self, text: str) -> bool:
        """Say whether some artifact's id begins with `text`, of 4 digits at least."""
        text = text.strip().lower()
        # Shorter ones are words to a person: f1 is a metric.
        return (
            len(text) > 3
            and bool(_PREFIX.fullmatch(text))
            and any(True for _ in self._fitting(text))
        )

    def is_whole(self, artifact_id: str) -> bool:
        """Say whether the artifact is here with every file at its size; reads no file.

        For listings: what is to be used must be intact.
        """
        found = self.find(artifact_id)
        return found is not None and _is_whole(found)

    def is_intact(self, artifact_id: str) -> bool:
        """Say whether the artifact is here with every byte of every file as it was published."""
        return not self.damage(artifact_id)

    def damage(self, artifact_id: str) -> list[str]:
        """Return what is wrong with an artifact, one sentence each; empty when it is intact.

        Reads only the files that no process of this workspace has read since they were written.
        """
        found = self.find(artifact_id)
        if found is None:
            return [f"artifact {artifact_id} is not in {self._root}"]
        return self._damage(found)

    def _damage(self, artifact: Artifact) -> list[str]:
        """As `verify`, with the digests that are remembered."""
        if not is_as_written(artifact.manifest):
            return [_not_its_manifest(artifact)]
        entries = artifact.manifest["files"]
        # A file of another size is reported without being read.
        read = [artifact.path / entry["path"] for entry in entries if _has_size(artifact, entry)]
        try:
            digests = digest_files(self._workspace, read, cache=f"artifacts/{artifact.id}.json")
        except WorkspaceError as error:
            return [str(error)]
        return _wrong_files(artifact, lambda path: digests.get(path, ""))

    def verify(self, artifact_id: str) -> list[str]:
        """Read every byte and return what is wrong, one sentence each; empty when all is well.

        Raises:
            ArtifactError, UsageError: as `get`.
        """
        artifact = self.get(artifact_id)
        if not is_as_written(artifact.manifest):
            return [_not_its_manifest(artifact)]
        problems = _wrong_files(artifact, digest_file)
        known = {entry["path"] for entry in artifact.manifest["files"]}
        for path in sorted(artifact.path.rglob("*")):
            if path.is_file() and path.relative_to(artifact.path).as_posix() not in known:
                problems.append(f"{path}: not in the manifest")
        return problems

    def damaged(self) -> Iterator[DamagedRecord]:
        """Yield what is wrong with each manifest that cannot be read; `list` leaves these out."""
        for parent in self._kinds():
            for name in _names(parent):
                try:
                    _read(parent / name)
                except DamagedRecord as damage:
                    yield damage

    def list(self, kind: str | None = None) -> list[Artifact]:
        """Return all artifacts, or those of one kind, oldest first by sequence number."""
        found = self._in_directories("", kind)
        return sorted(found, key=lambda one: (one.manifest.get("sequence", 0), one.id))

    def newest(self, count: int, kind: str | None = None) -> tuple[Sequence[Artifact], int]:
        """Return the artifacts that were published last, newest first, and how many there are.

        Reads the manifests of these and of what was published since the last look.
        """
        num_artifacts, newest = 0, []
        for parent in self._kinds(kind):
            sequences = self._sequences(parent)
            num_artifacts += len(sequences)
            of_kind = heapq.nlargest(count, zip(sequences.values(), sequences, strict=True))
            newest += [(sequence, parent.name, name) for sequence, name in of_kind]
        found = (
            self._load(self._root / folder / name)
            for _, folder, name in heapq.nlargest(count, newest)
        )
        return [one for one in found if one is not None], num_artifacts

    def _sequences(self, parent: Path) -> dict[str, int]:
        """The sequence numbers of one kind's artifacts; none of those that are damaged."""

        def read(name: str) -> int | None:
            artifact = self._load(parent / name)
            return artifact.manifest.get("sequence", 0) if artifact else None

        return read_sequences(self._workspace, parent, "manifest.json", read)

    def latest(self, kind: str) -> Artifact | None:
        """Return the artifact of this kind that was published last, or None."""
        return max(
            self._in_directories("", kind),
            key=lambda one: (one.manifest.get("sequence", 0), one.id),
            default=None,
        )

    def _register(self, temporary: Path, artifact_id: str, directory: Path) -> Artifact:
        """Give the finished directory its name, unless an equal artifact has it by now."""
        final = directory / artifact_id[:SHORT_DIGITS]
        with exclusive(self._workspace.artifacts_lock) as held:
            present = self._load(final)
            is_another = present is not None and present.id != artifact_id
            if present and is_another and is_as_written(present.manifest):
                raise ArtifactError(f"{final} holds another artifact, {present.id}; move it away.")
            if present is None or is_another or self._damage(present):
                held.check()
                put_in_place(temporary, final)
        registered = self._load(final)
        assert registered is not None
        return registered

    def _fitting(self, prefix: str) -> Iterator[Artifact]:
        for one in self._in_directories(prefix[:SHORT_DIGITS]):
            if one.id.startswith(prefix):
                yield one

    def _in_directories(self, prefix: str, kind: str | None = None) -> Iterator[Artifact]:
        """Artifacts whose directory's name begins with `prefix`."""
        for parent in self._kinds(kind):
            if len(prefix) == SHORT_DIGITS:
                names = [prefix]
            else:
                names = [name for name in _names(parent) if name.startswith(prefix)]
            for name in names:
                if artifact := self._load(parent / name):
                    yield artifact

    def _kinds(self, kind: str | None = None) -> tuple[Path, ...]:
        """The folders of all kinds, or of this one; a kind is a name in the store, never a path."""
        names = sorted(_names(self._root))
        return tuple(self._root / name for name in names if kind in (None, name))

    @staticmethod
    def _load(directory: Path) -> Artifact | None:
        """Read one manifest; None where there is none, or one that is damaged, which is said."""
        return unless_damaged(lambda: _read(directory))


def _read(directory: Path) -> Artifact | None:
    """One artifact by its manifest."""
    path = f"{directory}/manifest.json"  # a Path would take longer than the reading
    try:
        manifest = read_record(path, Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    location = f"{manifest['kind']}/{manifest['id'][:SHORT_DIGITS]}"
    if not str(directory).endswith(f"/{location}"):
        raise DamagedRecord(path, f"it is that of {location}")
    return Artifact(manifest["id"], manifest["kind"], directory / "files", manifest)


def _names(directory: Path) -> list[str]:
    """Names without a leading dot, which marks what is being made."""
    try:
        return [name for name in os.listdir(directory) if name[0] != "."]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_whole(artifact: Artifact) -> bool:
    entries = artifact.manifest.get("files") or []
    return bool(entries) and all(_has_size(artifact, entry) for entry in entries)


def _not_its_manifest(artifact: Artifact) -> str:
    return f"{artifact.directory / 'manifest.json'}: is not what was published"


def _has_size(artifact: Artifact, entry: FileEntry) -> bool:
    try:
        return os.stat(artifact.path / entry["path"]).st_size == entry["bytes"]
    except (OSError, KeyError, TypeError, ValueError):  # the manifest may be damaged
        return False


def _wrong_files(artifact: Artifact, digest_of: Callable[[Path], str]) -> list[str]:
    """Yield the faults of an artifact's files; digests are compared last."""
    found = (_wrong(artifact.path, one, digest_of) for one in artifact.manifest["files"])
    return [problem for problem in found if problem]


def _wrong(root: Path, entry: FileEntry, digest_of: Callable[[Path], str]) -> str | None:
    """Describe the fault of one file of an artifact, if any."""
    path = root / entry["path"]
    if not path.is_file():
        return f"{path}: missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path}: {size} bytes, the manifest says {entry['bytes']}"
    if digest_of(path) != entry["blake3"]:
        return f"{path}: its bytes are not what was published (BLAKE3 differs)"
    return None
