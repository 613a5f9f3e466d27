"""Bundles: artifacts, and all that they were made from, in one tar file for another workspace.

    bundle.json                  format, what it was made of, ids, fingerprints
    artifacts/ID/manifest.json   with the artifact's files under artifacts/ID/files/, or
                                 deleted.json where they were deleted or left out
    results/FINGERPRINT.json     how each artifact was computed

Nothing of a bundle is trusted: a file's digest must be that of its manifest, a manifest's id that
of its content, and a result's fingerprint that of its ingredients, before any of them is published.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Required, TypedDict, cast

from redco_flow.errors import ArtifactError
from redco_flow.records import digest_file
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import DeletionRecord, find_deletion, new_deletion
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.publishing import (
    Manifest,
    clean_after_dead_publishers,
    discard,
    hidden_directory,
    is_as_written,
    put_in_place,
    write_manifest,
)
from redco_flow.tracking.results import StageResult, fingerprint, publish_result, read_result
from redco_flow.tracking.typed_records import read_record
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace, check_name

FORMAT = 1
_INDEX = "bundle.json"
_MANIFEST, _DELETION = "manifest.json", "deleted.json"
_CHUNK_BYTES = 1 << 20


class IndexRecord(TypedDict):
    """bundle.json."""

    format: Required[int]
    command: str
    artifacts: Required[list[str]]
    records: Required[list[str]]
    results: Required[list[str]]


class BundleError(ArtifactError):
    """A file that is no bundle, or one with wrong content; nothing of it was taken."""


@dataclass(frozen=True)
class Contents:
    """The content of a bundle.

    Args:
        artifacts: with files, oldest first.
        records: artifacts in their lineage without files.
        results: of the stages that made all of them, oldest first.
    """

    artifacts: Sequence[Artifact]
    records: Sequence[Artifact]
    results: Sequence[StageResult]


def contents_of(
    workspace: Workspace, artifacts: Iterable[Artifact], *, with_inputs: bool = True
) -> Contents:
    """Return artifacts with their lineage.

    Args:
        with_inputs: the files of the artifacts that they were made from, too.
    """
    store = ArtifactStore(workspace)
    named = {artifact.id: artifact for artifact in artifacts}
    lineage, results = dict(named), dict[str, StageResult]()
    waiting = [*named.values()]
    while waiting:
        made_by = str(waiting.pop().produced_by.get("fingerprint", ""))
        result = read_result(workspace, made_by)
        if result is None or made_by in results:
            continue
        results[made_by] = result
        ids = (one for taken in result.ingredients["inputs"].values() for one in taken)
        found = {one: artifact for one in ids if (artifact := store.find(one)) is not None}
        lineage |= found
        waiting += found.values()
    ordered = sorted(lineage.values(), key=lambda one: one.manifest.get("sequence", 0))
    with_files = {
        one.id for one in ordered if (with_inputs or one.id in named) and store.is_whole(one.id)
    }
    return Contents(
        [one for one in ordered if one.id in with_files],
        [one for one in ordered if one.id not in with_files],
        sorted(results.values(), key=lambda one: one.sequence),
    )


def write_bundle(path: Path, workspace: Workspace, contents: Contents, *, command: str) -> None:
    """Write a bundle, whole or not at all.

    Args:
        command: as a person typed it; the record of files that are left out has it.

    Raises:
        ArtifactError: an artifact is damaged; says how.
        OSError: the disk is full or read-only; names the path.
    """
    store = ArtifactStore(workspace)
    for artifact in contents.artifacts:
        if damage := store.damage(artifact.id):
            raise ArtifactError(f"{damage[0]}: nothing was written.")
    index: IndexRecord = {
        "format": FORMAT,
        "command": command,
        "artifacts": [artifact.id for artifact in contents.artifacts],
        "records": [artifact.id for artifact in contents.records],
        "results": [result.fingerprint for result in contents.results],
    }
    growing = path.with_name(f".{path.name}.growing")
    try:
        with tarfile.open(growing, "w", format=tarfile.PAX_FORMAT) as tar:
            _add_record(tar, _INDEX, index)
            for result in contents.results:
                _add_record(tar, f"results/{result.fingerprint}.json", asdict(result))
            for artifact in contents.records:
                deletion = find_deletion(artifact) or new_deletion(command)
                _add_record(tar, f"artifacts/{artifact.id}/{_DELETION}", deletion)
                _add_manifest(tar, artifact)
            for artifact in contents.artifacts:
                _add_manifest(tar, artifact)
                _add_files(tar, artifact)
        growing.replace(path)
    finally:
        growing.unlink(missing_ok=True)


def _add_record(tar: tarfile.TarFile, name: str, record: Mapping[str, object]) -> None:
    content = json.dumps(record, indent=1).encode()
    _add(tar, name, len(content), io.BytesIO(content))


def _add_manifest(tar: tarfile.TarFile, artifact: Artifact) -> None:
    record = cast("Mapping[str, object]", artifact.manifest)
    _add_record(tar, f"artifacts/{artifact.id}/{_MANIFEST}", record)


def _add_files(tar: tarfile.TarFile, artifact: Artifact) -> None:
    for entry in artifact.manifest["files"]:
        with (artifact.path / entry["path"]).open("rb") as file:
            _add(tar, f"artifacts/{artifact.id}/files/{entry['path']}", entry["bytes"], file)


def _add(tar: tarfile.TarFile, name: str, size: int, content: IO[bytes]) -> None:
    """Add a file without the owner, the time and the mode that it has here."""
    info = tarfile.TarInfo(name)
    info.size = size
    tar.addfile(info, content)


def read_bundle(path: Path, workspace: Workspace) -> Contents:
    """Publish a bundle's content in a workspace; what is there already stays as it is.

    Returns:
        The artifacts as they are in the workspace now, and the results.

    Raises:
        BundleError: the file is no bundle, or a digest is wrong; nothing was published.
        OSError: the disk is full or read-only; names the path.
    """
    clean_after_dead_publishers(workspace.artifacts)
    folder = hidden_directory(workspace.artifacts)
    folder.mkdir()
    try:
        with tarfile.open(path, "r:") as tar:
            _unpack(path, tar, folder)
        return _publish(_checked(path, folder), folder, workspace)
    except (tarfile.TarError, EOFError) as error:
        raise BundleError(f"{path}: is no bundle, or not a whole one ({error}).") from error
    finally:
        discard(folder)


def _unpack(path: Path, tar: tarfile.TarFile, folder: Path) -> None:
    """Write regular files with plain names, and nothing else."""
    for member in tar:
        parts = PurePosixPath(member.name).parts
        is_plain = not member.name.startswith("/") and not {"..", ""} & {*member.name.split("/")}
        is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
        if not is_file or not is_plain or parts[0] not in (_INDEX, "artifacts", "results"):
            raise BundleError(f"{path}: has {member.name!r}, which no bundle has.")
        content = tar.extractfile(member)
        assert content is not None
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            while chunk := content.read(_CHUNK_BYTES):
                file.write(chunk)


@dataclass(frozen=True)
class _Checked:
    artifacts: Sequence[Manifest]
    records: Sequence[Manifest]
    results: Sequence[StageResult]


def _checked(path: Path, folder: Path) -> _Checked:
    """Read a bundle's records and compare every digest."""
    try:
        index = read_record(folder / _INDEX, IndexRecord)
        if index["format"] != FORMAT:
            raise BundleError(
                f"{path}: is of format {index['format']}; this version reads {FORMAT}."
            )
        artifacts, records = (
            [
                _manifest(folder / "artifacts" / _plain(one), has_files=key == "artifacts")
                for one in ids
            ]
            for key, ids in (("artifacts", index["artifacts"]), ("records", index["records"]))
        )
        results = [_result(folder / "results", _plain(one)) for one in index["results"]]
    except FileNotFoundError as error:
        name = Path(error.filename or "").relative_to(folder)
        raise BundleError(f"{path}: lacks {name}; nothing was taken.") from error
    except (ArtifactError, ValueError, KeyError) as error:
        text = str(error).replace(f"{folder}{os.sep}", "")
        raise BundleError(f"{path}: {text}; nothing was taken.") from error
    return _Checked(artifacts, records, results)


def _plain(name: str) -> str:
    return check_name(name, "id")


def _manifest(folder: Path, *, has_files: bool) -> Manifest:
    manifest = read_record(folder / _MANIFEST, Manifest)
    if manifest["id"] != folder.name or not is_as_written(manifest):
        raise ValueError(f"the manifest of artifact {folder.name} is not what was published")
    check_name(manifest["kind"], "artifact kind")
    if not has_files:
        read_record(folder / _DELETION, DeletionRecord)
        return manifest
    found = {path.relative_to(folder / "files").as_posix() for path in _files(folder / "files")}
    for entry in manifest["files"]:
        file = folder / "files" / entry["path"]
        if entry["path"] not in found:
            raise ValueError(f"artifact {folder.name} lacks {entry['path']}")
        if (file.stat().st_size, digest_file(file)) != (entry["bytes"], entry["blake3"]):
            raise ValueError(f"{entry['path']} of artifact {folder.name} has another digest")
        found.discard(entry["path"])
    if found:
        raise ValueError(f"artifact {folder.name} has {min(found)}, which its manifest has not")
    return manifest


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _result(folder: Path, name: str) -> StageResult:
    result = read_record(folder / f"{name}.json", StageResult)
    if result.fingerprint != name or fingerprint(result.ingredients) != name:
        raise ValueError(f"the result {name} has another fingerprint")
    return result


def _publish(checked: _Checked, folder: Path, workspace: Workspace) -> Contents:
    store = ArtifactStore(workspace)
    artifacts = [
        store.publish(
            manifest["kind"],
            folder / "artifacts" / manifest["id"] / "files",
            metadata=manifest.get("metadata"),
            parents=manifest.get("parents"),
            produced_by=manifest.get("produced_by"),
            digests={entry["path"]: entry["blake3"] for entry in manifest["files"]},
            identity=manifest.get("identity"),
        )
        for manifest in checked.artifacts
    ]
    records = [
        _register(manifest, folder / "artifacts" / manifest["id"], workspace)
        for manifest in checked.records
    ]
    return Contents(artifacts, records, [publish_result(workspace, one) for one in checked.results])


def _register(manifest: Manifest, folder: Path, workspace: Workspace) -> Artifact:
    """Put an artifact without files in place, as if they were deleted; one that is here stays."""
    final = workspace.artifacts / manifest["kind"] / manifest["id"][:SHORT_DIGITS]
    final.parent.mkdir(exist_ok=True)
    with exclusive(workspace.artifacts_lock) as held:
        if not final.exists():
            held.check()
            (folder / _MANIFEST).unlink()
            write_manifest(folder, {**manifest, "sequence": workspace.next_sequence()})
            put_in_place(folder, final)
    registered = ArtifactStore(workspace).find(manifest["id"])
    if registered is None:
        raise BundleError(f"{final} holds another artifact; move it away.")
    return registered
