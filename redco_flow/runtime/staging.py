"""Use a node's own disk for a stage: copies of its inputs, and a directory for checkpoints.

Each process that uses a directory there holds a flock on it, which ends with the process; cleaners
such as systemd-tmpfiles leave a locked directory alone. The last process removes the directory; one
that killed processes left is removed by the next stage on the node. A copy of an input is named
after its content, so all processes of a user on a node share it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from redco_flow.launch.call import JobStaging
from redco_flow.launch.node_disk import node_directory
from redco_flow.launch.worker_process import log
from redco_flow.records import (
    copy_file,
    digest_json,
    open_no_link,
    read_json_if_present,
    write_json,
)
from redco_flow.runtime.context import InputArtifact, InputDamaged, StageContext

_FILES = "files"
_RECORD = "record.json"
_SECONDS_BETWEEN_LOOKS = 0.2
_MAX_LOOKS_WITHOUT_RECORD = 10


class _Record(TypedDict):
    """The content of a directory on the node's disk; written last.

    Args:
        problem: why there are no files; "" if there are.
        files: inode, size and time of change (ns) of each, by path.
    """

    problem: str
    files: dict[str, list[int]]


@contextlib.contextmanager
def staged(context: StageContext, staging: JobStaging | None) -> Iterator[None]:
    """Let the stage read its inputs from this node's disk, and give it a directory there.

    Where the disk cannot take them, the stage uses the workspace, and the log says so. Within,
    `context.check_inputs` verifies the copies, too.

    Raises:
        NoNodeDisk: the node has no such directory.
        InputDamaged: a file has other bytes than what was published.
        OSError: an input cannot be read; names the file.
    """
    if staging is None:
        yield
        return
    directory = node_directory(staging.directory, os.environ)
    # No name of a node has an @: several nodes may see the directory.
    prefix = f"redco-flow-{os.geteuid()}@{os.uname().nodename}@"
    for left_over in directory.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            _release(left_over, _open_directory(left_over))
    originals, verify_originals = context.inputs, context.verify_inputs
    with contextlib.ExitStack() as held:
        if staging.checkpoints:
            path = directory / f"{prefix}{secrets.token_hex(8)}"
            if _hold(held, path, _make_empty, context, "checkpoints"):
                context.node_directory = path / _FILES
        if staging.inputs:
            checks: list[Callable[[], None]] = [verify_originals]
            context.inputs = {
                slot: tuple(
                    _copied(held, one, directory / prefix, context, checks) for one in artifacts
                )
                for slot, artifacts in originals.items()
            }
            context.verify_inputs = partial(_run_all, checks)
        try:
            yield
        finally:
            context.inputs, context.verify_inputs = originals, verify_originals
            context.node_directory = None


def _run_all(checks: Sequence[Callable[[], None]]) -> None:
    for check in checks:
        check()


def _copied(
    held: contextlib.ExitStack,
    artifact: InputArtifact,
    prefix: Path,
    context: StageContext,
    checks: list[Callable[[], None]],
) -> InputArtifact:
    """Return the artifact with the path of its copy; unchanged where there cannot be one.

    Args:
        checks: gets one that raises InputDamaged once the copy was changed.
    """
    name = f"{artifact.kind} {artifact.id[:12]}"
    path = Path(f"{prefix}{digest_json(artifact.manifest['files'])[:16]}")
    record = _hold(held, path, partial(_make_copy, artifact, context), context, name)
    if record is None:
        return artifact
    checks.append(partial(_check_copy, name, path / _FILES, record, context))
    return replace(artifact, path=path / _FILES)


def _check_copy(name: str, folder: Path, record: _Record, context: StageContext) -> None:
    if changed := _changed(folder, record):
        raise InputDamaged(
            f"stage '{context.stage}': the copy of {name} in {folder} was changed while stages "
            f"read it: {', '.join(changed)}. Nothing was published; `redco-flow resume "
            f"{context.run}` runs the stage again. An input must not be written to."
        )


def _hold(
    held: contextlib.ExitStack,
    path: Path,
    make: Callable[[Path], _Record],
    context: StageContext,
    name: str,
) -> _Record | None:
    """Hold a directory until `held` ends; return its record, None where it cannot be used.

    Args:
        make: makes the files' folder, for all processes that hold the directory.
        name: of the files, for the log.
    """
    problem = ""
    try:
        descriptor, record = _acquire(path, make, context)
    except OSError as error:
        if not Path(error.filename or path).is_relative_to(path):
            raise  # it is the input that cannot be read
        problem = f"{error.filename or path}: {error.strerror or error}"
    else:
        # Also without files: the other processes of the node must not try it again.
        held.callback(_release, path, descriptor)
        problem = record["problem"]
        if changed := _changed(path / _FILES, record):
            problem = f"{path / _FILES}: {', '.join(changed)} changed after they were copied"
    if problem:
        log(f"WARNING: {name}: {problem}: the stage uses the workspace.")
        return None
    return record


def _make_empty(folder: Path) -> _Record:
    folder.mkdir()
    return {"problem": "", "files": {}}


def _make_copy(artifact: InputArtifact, context: StageContext, folder: Path) -> _Record:
    """Copy an artifact's files into a new folder; without one where the disk cannot take them.

    Raises:
        OSError: an input cannot be read; names the file.
        InputDamaged: a file has other bytes than what was published.
    """
    started_at = time.monotonic()
    try:
        num_bytes = _copy_files(artifact, context, folder)
        names = [entry["path"] for entry in artifact.manifest["files"]]
        record: _Record = {"problem": "", "files": {one: _mark(folder / one) for one in names}}
    except OSError as error:
        if not Path(error.filename).is_relative_to(folder):
            raise
        _remove(folder)
        return {"problem": f"{error.filename}: {error.strerror}", "files": {}}
    seconds = time.monotonic() - started_at
    log(
        f"copied {artifact.kind} {artifact.id[:12]} to {folder}: {num_bytes:,} bytes in "
        f"{seconds:.1f} s."
    )
    return record


def _copy_files(artifact: InputArtifact, context: StageContext, folder: Path) -> int:
    entries = artifact.manifest["files"]
    num_bytes: int = sum(entry["bytes"] for entry in entries)
    if num_bytes > shutil.disk_usage(folder.parent).free:
        raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes do not fit there", str(folder))
    folder.mkdir()
    for entry in entries:
        source, target = artifact.path / entry["path"], folder / entry["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = copy_file(
            source, target, lambda: context.report(phase="copying inputs to the node's disk")
        )
        if digest != entry["blake3"]:
            raise InputDamaged(
                f"stage '{context.stage}' cannot use what it takes in: {source}: its BLAKE3 was "
                f"{digest} when it was copied to the node's disk, and {entry['blake3']} when it "
                f"was published. Nothing was published; `redco-flow resume {context.run}` "
                f"produces it again."
            )
        target.chmod(0o444)
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, 0o555)  # noqa: S103 (no one may write)
    return num_bytes


def _mark(path: Path) -> list[int]:
    """Return numbers of which one differs after a change of the file."""
    status = path.lstat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _changed(folder: Path, record: _Record) -> list[str]:
    """Return the names of files that are not what was copied."""
    changed = []
    for name, mark in record["files"].items():
        try:
            is_same = _mark(folder / name) == mark
        except OSError:
            is_same = False
        if not is_same:
            changed.append(name)
    return changed


def _acquire(
    path: Path, make: Callable[[Path], _Record], context: StageContext
) -> tuple[int, _Record]:
    """Lock a directory, shared, once it has its record; the first process that locks it makes it.

    Raises:
        OSError: the directory cannot be used, or what `make` raises.
    """
    num_looks = 0
    while True:
        directory = _open_directory(path)
        try:
            if _try_lock(path, directory, fcntl.LOCK_EX) and not (path / _RECORD).exists():
                _remove(path / _FILES)  # of a process that was killed while it copied
                write_json(path / _RECORD, make(path / _FILES))
            if _try_lock(path, directory, fcntl.LOCK_SH):
                record: _Record | None = read_json_if_present(path / _RECORD)
                if record is not None:
                    return directory, record
                num_looks += 1
                if num_looks > _MAX_LOOKS_WITHOUT_RECORD:
                    raise FileNotFoundError(
                        errno.ENOENT, "removed while another process uses it", str(path / _RECORD)
                    )
        except BaseException:
            _release(path, directory)
            raise
        os.close(directory)
        context.report(phase="waiting for inputs that another process copies to the node's disk")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _open_directory(path: Path) -> int:
    """Open a directory of this user, which is made if missing."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            directory = open_no_link(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # its last process has just removed it
            continue
        if os.fstat(directory).st_uid == os.geteuid():
            return directory
        os.close(directory)
        raise PermissionError(errno.EPERM, "it is another user's", str(path))


def _try_lock(path: Path, directory: int, kind: int) -> bool:
    """Lock the directory if that needs no waiting; say whether that was done and has its path."""
    try:
        fcntl.flock(directory, kind | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(directory), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _release(path: Path, directory: int) -> None:
    """Let go of a directory, and remove it if no other process holds it."""
    try:
        if _try_lock(path, directory, fcntl.LOCK_EX):
            _remove(path)
    except OSError:  # the disk has no flock, so no process uses it
        with contextlib.suppress(OSError):
            path.rmdir()
    os.close(directory)


def _remove(path: Path) -> None:
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)  # what stays is removed by the next stage on the node
