"""Give each host its own copy of the checkpoints, where the hosts share no disk.

Process 0 alone saves, from arrays that its host holds in full; what it has committed goes to the
others over the devices' network, so that all of them list, score and restore the same files. Of
the processes that see one directory, the first alone writes there.
Every process must call each function at the same moment.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from redco_flow.engine.agreement import is_first_process, wait_for_all
from redco_flow.engine.checkpoint.commit import COMMIT_FILE, is_committed
from redco_flow.engine.checkpoint.directory import CheckpointDirectory

_CHUNK_BYTES = 64 << 20


def whole_on_host(leaf: Any) -> Any:
    """Return an array with all its parts, on every process; anything else as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def copy_to_all(directory: CheckpointDirectory) -> None:
    """Make the committed steps of every process those of process 0, in files too.

    Raises:
        OSError: a disk is full or read-only; names the path.
    """
    writes = _is_first_of_its_disk(directory.path) and not is_first_process()
    steps = json.loads(_tell(json.dumps(directory.steps()).encode()))
    for step in steps:
        folder = directory.step_directory(step)
        commit = _tell(_commit_bytes(folder))
        is_here = np.array([_commit_bytes(folder) == commit])
        if not np.all(multihost_utils.process_allgather(is_here)):
            _copy_step(folder, writes=writes and not is_here[0])
    dropped = [step for step in steps if not directory.has_state(step)]
    dropped = json.loads(_tell(json.dumps(dropped).encode()))
    if writes:
        for step in set(directory.steps()) - set(steps):
            directory.delete(step)
        for step in dropped:
            directory.drop_state(step)
    wait_for_all("checkpoints copied")


def _is_first_of_its_disk(directory: Path) -> bool:
    """Whether no process before this one sees the same directory."""
    word = _tell(secrets.token_hex(8).encode()).decode()  # what a killed process left has another
    mark = directory / f".{word}.{jax.process_index()}"
    mark.touch()
    try:
        wait_for_all("disks marked")
        seen = [int(path.suffix[1:]) for path in directory.glob(f".{word}.*")]
        wait_for_all("disks seen")
    finally:
        mark.unlink()
    return min(seen) == jax.process_index()


def _commit_bytes(folder: Path) -> bytes:
    """Read the commit with the digest of every file; empty if there is none."""
    return (folder / COMMIT_FILE).read_bytes() if is_committed(folder) else b""


def _copy_step(folder: Path, *, writes: bool) -> None:
    """Bring one step under a hidden name; only the rename makes it a checkpoint."""
    unfinished = folder.with_name(f".{folder.name}.copying")
    if writes:
        shutil.rmtree(unfinished, ignore_errors=True)
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    for name in json.loads(_tell(json.dumps(names).encode())):
        target = unfinished / name
        if writes:
            target.parent.mkdir(parents=True, exist_ok=True)
        parts = _send_file(folder / name)
        if writes:
            with target.open("xb") as file:  # x: no link is followed
                file.writelines(parts)
        else:
            for _ in parts:
                pass
    if writes:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _send_file(path: Path) -> Iterator[bytes]:
    """Yield a file's parts, read on process 0."""
    if is_first_process():
        with path.open("rb") as file:
            while True:
                chunk = file.read(_CHUNK_BYTES)
                yield _tell(chunk)
                if len(chunk) < _CHUNK_BYTES:
                    return
    while True:
        chunk = _tell(b"")
        yield chunk
        if len(chunk) < _CHUNK_BYTES:
            return


def _tell(said: bytes) -> bytes:
    """Return what process 0 says."""
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(said))))
    if not is_first_process():
        said = bytes(size)
    if size == 0:
        return b""
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(said, np.uint8))
    return np.asarray(told).tobytes()
