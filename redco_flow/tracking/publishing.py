"""The steps of publishing: files into a hidden directory, then one rename.

Until the rename nothing is visible; after it everything is. A hidden directory carries its
publisher's identity in its name, so that the next publisher removes what a dead one left.
Knows no ids but the digest of content; `artifacts.py` decides what is published when.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Required, TypedDict

from redco_flow.errors import ArtifactError
from redco_flow.records import CANNOT_LINK, copy_file, digest_json, sync, write_json
from redco_flow.tracking.process_identity import ProcessIdentity

_MARK = ".publishing"
_READABLE = 0o444


class FileEntry(TypedDict):
    """One file of an artifact: its path under files/, its size, its BLAKE3."""

    path: str
    bytes: int
    blake3: str


class Manifest(TypedDict, total=False):
    """manifest.json. `id` covers kind and files, or kind and `identity` where there is one.

    The rest describes the first time it was made. `digest` covers all of it, to detect a damaged
    record.
    """

    id: Required[str]
    kind: Required[str]
    sequence: int
    created_at: str
    files: Required[list[FileEntry]]
    identity: dict[str, str]
    metadata: dict[str, Any]
    parents: dict[str, str]
    produced_by: dict[str, Any]
    digest: str


def content_id(
    kind: str, entries: list[FileEntry], identity: Mapping[str, str] | None = None
) -> str:
    """Return the id of this content: what it is and every file's path, size and digest.

    Args:
        identity: digests that take the files' place, where equal content has different files.
    """
    content = {"files": entries} if identity is None else {"identity": dict(identity)}
    return digest_json({"kind": kind, **content})


def stage_files(
    directory: Path, source: Path, digests: Mapping[str, str]
) -> tuple[Path, list[FileEntry]]:
    """Bring `source`'s files, read-only and durable, under a new hidden directory's files/.

    Returns:
        The hidden directory, and the files sorted by path.

    Raises:
        ArtifactError: no files, a file that is not regular, a digest for a file not there.
        OSError: names the path; the hidden directory is gone.
    """
    files = dict(_regular_files(source))
    if not files:
        raise ArtifactError(f"{source}: has no files to publish.")
    if unknown := sorted(set(digests) - set(files)):
        raise ArtifactError(f"{source}: digests are given for files not there: {unknown}.")
    directory.mkdir(parents=True, exist_ok=True)
    temporary = hidden_directory(directory)
    temporary.mkdir()
    try:
        entries = [
            _bring(path, temporary / "files" / name, name, digests.get(name))
            for name, path in sorted(files.items())
        ]
        _sync_directories(temporary)
    except BaseException:
        discard(temporary)
        raise
    return temporary, entries


def write_manifest(temporary: Path, manifest: Manifest) -> None:
    """Write manifest.json beside files/, with its own digest, read-only."""
    path = temporary / "manifest.json"
    write_json(path, {**manifest, "digest": _digest(manifest)})
    _make_read_only(path)
    sync(temporary)


def is_as_written(manifest: Manifest) -> bool:
    """Say whether a manifest has its own id and digest; of another one nothing can be believed."""
    identity = manifest.get("identity")
    if manifest["id"] != content_id(manifest["kind"], manifest["files"], identity):
        return False
    # Those of earlier versions hold no digest; none of these has an identity.
    if "digest" not in manifest:
        return identity is None
    return manifest["digest"] == _digest(manifest)


def put_in_place(temporary: Path, final: Path) -> None:
    """Give the finished directory its name; a damaged one that has it is removed."""
    if final.exists():
        damaged = hidden_directory(final.parent)
        final.rename(damaged)
        temporary.rename(final)
        discard(damaged)
    else:
        temporary.rename(final)
    sync(final.parent)


def _digest(manifest: Manifest) -> str:
    # As it is read back: JSON knows no keys but texts.
    record = json.loads(json.dumps(manifest))
    return digest_json({key: value for key, value in record.items() if key != "digest"})


def discard(temporary: Path) -> None:
    """Remove a hidden directory; one that was given its name is no longer there."""
    shutil.rmtree(temporary, ignore_errors=True)


def clean_after_dead_publishers(directory: Path) -> None:
    """Remove the hidden directories of publishers that run no more."""
    try:
        names = [name for name in os.listdir(directory) if name.startswith(_MARK)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        publisher = _publisher(name)
        if publisher is not None and not publisher.may_be_alive():
            discard(directory / name)


def hidden_directory(directory: Path) -> Path:
    """Return a new name, with this process in it; no host name, boot id or number has a `~`."""
    me = ProcessIdentity.current()
    process = (me.host, me.boot_id, str(me.pid), str(me.start_time), me.pid_namespace)
    return directory / "~".join([_MARK, *process, secrets.token_hex(4)])


def _publisher(name: str) -> ProcessIdentity | None:
    words = name.split("~")[1:-1]  # four of earlier versions, without the namespace
    if len(words) not in (4, 5) or not (words[2].isdigit() and words[3].isdigit()):
        return None
    host, boot_id, pid, start_time, *namespace = words
    return ProcessIdentity(int(pid), int(start_time), boot_id, host, *namespace)


def _regular_files(source: Path) -> Iterator[tuple[str, Path]]:
    """Each file's path relative to `source`, with `/`, and where it is."""
    if source.is_file() and not source.is_symlink():
        yield source.name, source
        return
    if not source.is_dir() or source.is_symlink():
        raise ArtifactError(f"{source}: neither a file nor a directory; it cannot be published.")
    for folder, folders, names in os.walk(source):
        for name in (*folders, *names):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                yield path.relative_to(source).as_posix(), path
            elif not stat.S_ISDIR(mode):
                raise ArtifactError(
                    f"{path}: a link or a special file cannot be published; write a real file."
                )


def _bring(path: Path, target: Path, name: str, digest: str | None) -> FileEntry:
    """Link or copy one file; read-only, durable."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if digest is None or not _link(path, target):
        copied = copy_file(path, target)
        if digest not in (None, copied):
            raise ArtifactError(f"{path}: its BLAKE3 is {copied}, its producer said {digest}.")
        digest = copied
    _make_read_only(target)
    sync(target)
    return {"path": name, "bytes": target.stat().st_size, "blake3": digest}


def _make_read_only(path: Path) -> None:
    """No user may write it from here on; who may read it stays."""
    path.chmod(path.stat().st_mode & _READABLE)


def _link(path: Path, target: Path) -> bool:
    if path.stat().st_uid != os.geteuid():  # of another user, and so not ours to make read-only
        return False
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in CANNOT_LINK:
            return False
        raise
    return True


def _sync_directories(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync(Path(folder))
