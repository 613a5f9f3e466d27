"""Bundles: artifacts, and all that they were made from, in one tar file for another workspace.

    bundle.json                  ids, fingerprints, and the digest of each record
    artifacts/ID/manifest.json   with the artifact's files under artifacts/ID/files/, or
                                 deleted.json where they were deleted or left out
    results/FINGERPRINT.json     how each artifact was computed

All digests are compared before anything is published, so damage is found. The author of a bundle
can write any record: it is as trustworthy as its sender.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Required, TypedDict, cast

from blake3 import blake3

from redco_flow.errors import ArtifactError, UsageError
from redco_flow.records import create_beside, digest_file, digest_json, place_new, sync
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import (
    DeletionRecord,
    find_deletion,
    new_deletion,
    write_deletion,
)
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
from redco_flow.tracking.results import (
    StageResult,
    find_result_file,
    fingerprint,
    is_doubtful,
    publish_result,
    read_result,
)
from redco_flow.tracking.typed_records import read_record
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace, check_name

FORMAT = 1
_INDEX, _MANIFEST, _DELETION = "bundle.json", "manifest.json", "deleted.json"
_CHUNK_BYTES = 1 << 20


class IndexRecord(TypedDict, total=False):
    """bundle.json.

    `artifacts` have their files, `records` do not; `digests` are BLAKE3 of the other records by
    name, and `digest` covers the index itself.
    """

    format: Required[int]
    command: str
    artifacts: Required[list[str]]
    records: Required[list[str]]
    results: Required[list[str]]
    digests: Required[dict[str, str]]
    digest: Required[str]


class BundleError(ArtifactError):
    """A file that is not a bundle, or a bundle with wrong content; nothing was published."""


@dataclass(frozen=True)
class Contents:
    """The content of a bundle.

    Args:
        artifacts: with files, oldest first.
        records: artifacts in their lineage without files.
        results: of the stages that made all of them, oldest first.
        left_out: names of results that the bundle does not have, because they may have been made
            from damaged bytes; or that a workspace did not take, because it has others.
    """

    artifacts: Sequence[Artifact]
    records: Sequence[Artifact]
    results: Sequence[StageResult]
    left_out: Sequence[str] = ()


def contents_of(
    workspace: Workspace,
    artifacts: Iterable[Artifact],
    results: Iterable[StageResult] = (),
    *,
    with_inputs: bool = True,
) -> Contents:
    """Return artifacts with their lineage.

    Args:
        results: of the stages by which the artifacts are to be known, as of one run; by default
            those that published them.
        with_inputs: the files of the artifacts that they were made from, too.
    """
    store = ArtifactStore(workspace)
    named = {artifact.id: artifact for artifact in artifacts}
    found = {result.fingerprint: result for result in results}
    made = {one for result in found.values() for one in result.outputs.values()}
    lineage = dict(named)
    waiting = deque(one for result in found.values() for one in _inputs_of(result))
    for artifact in named.values():
        if artifact.id not in made:
            waiting += _made_from(workspace, artifact, found)
    while waiting:
        artifact_id = waiting.popleft()
        above = None if artifact_id in lineage else store.find(artifact_id)
        if above is not None:
            lineage[artifact_id] = above
            if artifact_id not in made:
                waiting += _made_from(workspace, above, found)
    ordered = sorted(lineage.values(), key=lambda one: one.manifest.get("sequence", 0))
    without_files = {
        one.id for one in ordered if find_deletion(one) or not (with_inputs or one.id in named)
    }
    doubtful = {one for one in found if is_doubtful(workspace, one)}
    return Contents(
        [one for one in ordered if one.id not in without_files],
        [one for one in ordered if one.id in without_files],
        sorted(
            (one for one in found.values() if one.fingerprint not in doubtful),
            key=lambda one: one.sequence,
        ),
        [found[one].stage for one in doubtful],
    )


def _made_from(
    workspace: Workspace, artifact: Artifact, found: dict[str, StageResult]
) -> Sequence[str]:
    """Return the ids of an artifact's inputs; add the result that published it to `found`."""
    made_by = str(artifact.produced_by.get("fingerprint", ""))
    result = read_result(workspace, made_by)
    if result is None:
        return list(artifact.parents.values())
    found[made_by] = result
    return _inputs_of(result)


def _inputs_of(result: StageResult) -> list[str]:
    return [one for taken in result.ingredients.get("inputs", {}).values() for one in taken]


def write_bundle(path: Path, workspace: Workspace, contents: Contents, *, command: str) -> None:
    """Write a new bundle, whole or not at all.

    Args:
        command: as a person typed it; the record of files that are left out has it.

    Raises:
        ArtifactError: an artifact is damaged; says how.
        UsageError: `path` exists.
        OSError: the disk is full or read-only; names the path.
    """
    store = ArtifactStore(workspace)
    for artifact in contents.artifacts:
        if damage := store.damage(artifact.id):
            raise ArtifactError(f"{damage[0]}: nothing was written.")
    records = {name: _json(record) for name, record in _records(contents, command).items()}
    index: dict[str, Any] = {
        "format": FORMAT,
        "command": command,
        "artifacts": [artifact.id for artifact in contents.artifacts],
        "records": [artifact.id for artifact in contents.records],
        "results": [result.fingerprint for result in contents.results],
        "digests": {name: blake3(content).hexdigest() for name, content in records.items()},
    }
    members = {_INDEX: _json({**index, "digest": digest_json(index)}), **records}
    descriptor, growing = create_beside(path)
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, content in members.items():
                _add(tar, name, len(content), io.BytesIO(content))
            for artifact in contents.artifacts:
                _add_files(tar, artifact)
        sync(growing)
        place_new(growing, path)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already; nothing was written.") from error
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk is reported without one
        raise
    finally:
        growing.unlink(missing_ok=True)


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()


def _records(contents: Contents, command: str) -> dict[str, Mapping[str, Any]]:
    """Return the bundle's records but the index, by name."""
    found: dict[str, Mapping[str, Any]] = {
        f"results/{result.fingerprint}.json": asdict(result) for result in contents.results
    }
    for artifact in (*contents.artifacts, *contents.records):
        manifest = cast("Mapping[str, Any]", artifact.manifest)
        found[f"artifacts/{artifact.id}/{_MANIFEST}"] = manifest
    for artifact in contents.records:
        deletion = find_deletion(artifact) or new_deletion(command)
        found[f"artifacts/{artifact.id}/{_DELETION}"] = deletion
    return found


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
        The artifacts as they are in the workspace now, and the results that it has taken.

    Raises:
        BundleError: the file is not a bundle, or a digest is wrong; nothing was published.
        OSError: the disk is full or read-only; names the path.
    """
    clean_after_dead_publishers(workspace.artifacts)
    folder = hidden_directory(workspace.artifacts)
    folder.mkdir()
    try:
        with tarfile.open(path, "r:") as tar:
            names = _unpack(tar, folder)
        checked = _checked(folder, names)
        _check_places(checked, workspace)
        return _publish(checked, folder, workspace)
    except (tarfile.TarError, EOFError) as error:
        raise BundleError(f"{path} is not a bundle, or is incomplete: {error}.") from error
    except _Wrong as error:
        raise BundleError(f"{path}: {error}; nothing was published.") from error
    except OSError as error:
        error.filename = error.filename or str(folder)  # a full disk is reported without one
        raise
    finally:
        discard(folder)


class _Wrong(ValueError):
    """Says what is wrong with a bundle."""


def _unpack(tar: tarfile.TarFile, folder: Path) -> set[str]:
    """Write regular files with plain names, and nothing else; return the names."""
    names: set[str] = set()
    for member in tar:
        is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
        if not is_file or not _is_plain(member.name) or member.name in names:
            raise _Wrong(f"unexpected member {member.name!r}")
        names.add(member.name)
        content = tar.extractfile(member)
        assert content is not None
        target = folder / member.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("xb")
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise _Wrong(f"unexpected member {member.name!r}") from error
        with file:
            while chunk := content.read(_CHUNK_BYTES):
                file.write(chunk)
    return names


def _is_plain(name: str) -> bool:
    """Whether a name is a relative path below a folder, as this module writes it."""
    path = PurePosixPath(name)
    is_relative = not path.is_absolute() and ".." not in path.parts and bool(path.parts)
    return is_relative and str(path) == name and "\0" not in name


@dataclass(frozen=True)
class _Checked:
    artifacts: Sequence[Manifest]
    records: Sequence[Manifest]
    results: Sequence[StageResult]


def _checked(folder: Path, names: set[str]) -> _Checked:
    """Read a bundle's records; compare every digest, and the names of all members."""
    try:
        index = read_record(folder / _INDEX, IndexRecord)
        if index["format"] != FORMAT:
            raise _Wrong(f"it has format {index['format']}; this version reads {FORMAT}")
        rest = {key: value for key, value in index.items() if key != "digest"}
        if index["digest"] != digest_json(rest):
            raise _Wrong(f"{_INDEX} has another digest")
        for name, digest in index["digests"].items():
            if name not in names or digest_file(folder / name) != digest:
                raise _Wrong(f"{name} is missing or has another digest")
        artifacts = [_manifest(folder, one) for one in index["artifacts"]]
        records = [_manifest(folder, one) for one in index["records"]]
        results = [_result(folder, one) for one in index["results"]]
        for one in index["records"]:
            read_record(folder / "artifacts" / one / _DELETION, DeletionRecord)
    except FileNotFoundError as error:
        raise _Wrong(f"{Path(error.filename or '').name} is missing") from error
    except (ArtifactError, UsageError, KeyError, TypeError) as error:
        raise _Wrong(str(error).replace(f"{folder}{os.sep}", "")) from error
    files = {name for manifest in artifacts for name in _check_files(folder, manifest)}
    if strange := names - files - {_INDEX, *index["digests"]}:
        raise _Wrong(f"unexpected member {min(strange)!r}")
    return _Checked(artifacts, records, results)


def _manifest(folder: Path, artifact_id: str) -> Manifest:
    manifest = read_record(folder / "artifacts" / artifact_id / _MANIFEST, Manifest)
    check_name(manifest["kind"], "artifact kind")
    if manifest["id"] != artifact_id or not is_as_written(manifest):
        raise _Wrong(f"the manifest of artifact {artifact_id} is not what was published")
    if wrong := [one["path"] for one in manifest["files"] if not _is_plain(one["path"])]:
        raise _Wrong(f"artifact {artifact_id} has a file {wrong[0]!r}")
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> list[str]:
    """Compare the digests of an artifact's files; return their members' names."""
    names = []
    for entry in manifest["files"]:
        name = f"artifacts/{manifest['id']}/files/{entry['path']}"
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise _Wrong(f"{name} is missing or has another size")
        if digest_file(file) != entry["blake3"]:
            raise _Wrong(f"{name} has another digest")
        names.append(name)
    return names


def _result(folder: Path, name: str) -> StageResult:
    result = find_result_file(folder / "results" / f"{name}.json")
    if result is None or result.fingerprint != name or fingerprint(result.ingredients) != name:
        raise _Wrong(f"the result {name} is missing or has another fingerprint")
    check_name(result.pipeline, "pipeline name")
    check_name(result.stage, "stage name")
    return result


def _check_places(checked: _Checked, workspace: Workspace) -> None:
    store = ArtifactStore(workspace)
    for manifest in (*checked.artifacts, *checked.records):
        place = _place(workspace, manifest)
        if place.exists() and store.find(manifest["id"]) is None:
            raise _Wrong(f"{place} holds another artifact; move it away")


def _place(workspace: Workspace, manifest: Manifest) -> Path:
    return workspace.artifacts / manifest["kind"] / manifest["id"][:SHORT_DIGITS]


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
    records = []
    for manifest in checked.records:
        deletion = read_record(folder / "artifacts" / manifest["id"] / _DELETION, DeletionRecord)
        records.append(_register(manifest, deletion, workspace))
    taken, kept = [], []
    for result in checked.results:
        present = read_result(workspace, result.fingerprint)
        if present is None:
            taken.append(publish_result(workspace, result))
        elif present.outputs != result.outputs:
            kept.append(result.stage)
    return Contents(artifacts, records, taken, kept)


def _register(manifest: Manifest, deletion: DeletionRecord, workspace: Workspace) -> Artifact:
    """Put an artifact without files in place, as if they were deleted; one that is here stays."""
    final = _place(workspace, manifest)
    final.parent.mkdir(exist_ok=True)
    temporary = hidden_directory(final.parent)
    temporary.mkdir()
    try:
        write_deletion(temporary, deletion)
        write_manifest(temporary, {**manifest, "sequence": workspace.next_sequence()})
        with exclusive(workspace.artifacts_lock) as held:
            if not final.exists():
                held.check()
                put_in_place(temporary, final)
    finally:
        discard(temporary)
    registered = ArtifactStore(workspace).find(manifest["id"])
    if registered is None:
        raise ArtifactError(f"{final} holds another artifact; move it away.")
    return registered
