"""Use a node's own disk for a stage: copies of its inputs, and room for checkpoints.

The processes that use a directory there hold a flock on it, which ends with them. The last one
removes the directory; one that is left behind by killed processes is removed by the next stage on
the node. A copy of an input is named after its content, so all processes of a user on a node share
it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from redco_flow.errors import ArtifactError
from redco_flow.launch.call import Staging
from redco_flow.launch.node_disk import node_directory
from redco_flow.launch.worker_process import log
from redco_flow.records import copy_file, digest_json, open_no_link
from redco_flow.runtime.context import InputArtifact, StageContext

_LOCK = "lock"
_FILES = "files"
_UNFINISHED = "unfinished"
_SECONDS_BETWEEN_LOOKS = 0.2


@contextlib.contextmanager
def staged(context: StageContext, staging: Staging | None) -> Iterator[None]:
    """Let the stage read its inputs from this node's disk, and give it a directory there.

    Where the disk has too little space, the stage uses the workspace, and the log says so.

    Raises:
        NoNodeDisk: the node has no such directory.
        ArtifactError: a file has other bytes than what was published.
    """
    if staging is None:
        yield
        return
    directory = node_directory(staging.directory, os.environ)
    # With the node's name, in case that the directory is on a disk that several nodes see.
    own = directory / f"redco-flow-{os.geteuid()}-{os.uname().nodename}"
    for left_over in directory.glob(f"{own.name}-*"):
        _remove_if_unused(left_over)
    original = context.inputs
    with contextlib.ExitStack() as held:
        if staging.checkpoints:
            room = Path(f"{own}-{secrets.token_hex(8)}")
            context.node_directory = _hold(held, room, Path.mkdir, context, "checkpoints")
        if staging.inputs and not context.shares_disk:
            log("the inputs are in this host's own workspace already; they are not copied again.")
        elif staging.inputs:
            context.inputs = {
                slot: tuple(_copied(held, one, own, context) for one in artifacts)
                for slot, artifacts in original.items()
            }
        try:
            yield
        finally:
            context.inputs, context.node_directory = original, None


def _copied(
    held: contextlib.ExitStack, artifact: InputArtifact, own: Path, context: StageContext
) -> InputArtifact:
    """Return the artifact with the path of its copy; unchanged where there is no space for it."""
    name = f"{artifact.kind} {artifact.id[:12]}"
    copy = Path(f"{own}-{digest_json(artifact.manifest['files'])[:16]}")

    def make(folder: Path) -> None:
        started_at = time.monotonic()
        num_bytes = _copy_files(artifact, folder, context)
        seconds = time.monotonic() - started_at
        log(f"copied {name} to {copy}: {num_bytes:,} bytes in {seconds:.1f} s.")

    path = _hold(held, copy, make, context, name)
    return artifact if path is None else replace(artifact, path=path)


def _hold(
    held: contextlib.ExitStack,
    path: Path,
    make: Callable[[Path], None],
    context: StageContext,
    name: str,
) -> Path | None:
    """Hold a directory until `held` ends; return where its files are, None where they cannot be.

    Args:
        make: makes the files' folder, for all processes that hold the directory.
        name: of the files, for the log.
    """
    try:
        lock = _take(path, make, context)
    except OSError as error:
        log(
            f"WARNING: {name}: {path} cannot be used ({error.strerror or error}): the stage "
            f"uses the workspace."
        )
        return None
    held.callback(_leave, path, lock)
    return path / _FILES


def _copy_files(artifact: InputArtifact, folder: Path, context: StageContext) -> int:
    """Copy all files of an artifact into a new folder; return the number of bytes.

    Raises:
        OSError: the disk is full, or a file cannot be read or written.
        ArtifactError: a file has other bytes than what was published.
    """
    entries = artifact.manifest["files"]
    num_bytes: int = sum(entry["bytes"] for entry in entries)
    if num_bytes > shutil.disk_usage(folder.parent).free:
        raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes do not fit there")
    phase = "copying inputs to the node's disk"
    for entry in entries:
        target = folder / entry["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        source = artifact.path / entry["path"]
        digest = copy_file(source, target, lambda: context.report(phase=phase))
        if digest != entry["blake3"]:
            raise ArtifactError(
                f"{source}: its BLAKE3 was {digest} when it was copied to the node's disk, and "
                f"{entry['blake3']} when it was published. Nothing has run."
            )
        target.chmod(0o444)
    return num_bytes


def _take(path: Path, make: Callable[[Path], None], context: StageContext) -> int:
    while True:
        lock = _open_lock(path)
        try:
            # No other process holds it: its files are those of processes that were killed.
            if _try_lock(lock, fcntl.LOCK_EX):
                _empty(path)
                make(path / _UNFINISHED)
                (path / _UNFINISHED).rename(path / _FILES)
            if _try_lock(lock, fcntl.LOCK_SH) and (path / _FILES).is_dir():
                return lock
        except BaseException:
            _leave(path, lock)
            raise
        os.close(lock)
        context.report(phase="waiting for inputs that another process copies to the node's disk")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _open_lock(path: Path) -> int:
    """Open the lock of a directory of this user, which is made if missing."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            if not _is_ours(path):
                raise PermissionError(errno.EPERM, "it is not a directory of this user", str(path))
            return open_no_link(path / _LOCK, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # its last process has just removed it
            continue


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _try_lock(lock: int, kind: int) -> bool:
    """Take the lock if that needs no waiting; say whether it was taken and is still the path's."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock).st_nlink > 0


def _remove_if_unused(path: Path) -> None:
    with contextlib.suppress(OSError):
        if _is_ours(path):
            _leave(path, open_no_link(path / _LOCK, os.O_RDWR))


def _leave(path: Path, lock: int) -> None:
    """Let go of a directory, and remove it if no other process holds it."""
    with contextlib.suppress(OSError):  # the next stage on the node tries again
        if _try_lock(lock, fcntl.LOCK_EX):
            _empty(path)
            (path / _LOCK).unlink()  # last: then a new one is made in an empty directory
            path.rmdir()
    os.close(lock)


def _empty(path: Path) -> None:
    for name in (_FILES, _UNFINISHED):
        shutil.rmtree(path / name, ignore_errors=True)
