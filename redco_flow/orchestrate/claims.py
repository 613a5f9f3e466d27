"""Who computes a fingerprint: one orchestrating process at a time, across runs.

A claim is a lock on `work/<fingerprint16>.claim`, held from before the submission until the
result stands; the kernel drops it when its holder dies. The worker's own lock inside the work
directory tells whether a job of a dead launcher still runs. Knows no runs and no jobs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from redco_flow.tracking.workspace import Workspace
from redco_flow.writing import open_no_link


@contextmanager
def claimed(workspace: Workspace, fingerprint: str, wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the claim on a fingerprint; while another holds it, call `wait` again and again.

    Args:
        wait: sleeps a moment and may raise to give up; is told whom it waits for.
    """
    path = workspace.work_directory(fingerprint).with_suffix(".claim")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    try:
        while not _try_lock(descriptor):
            wait("another run that makes the same result")
        while is_worked_on(workspace, fingerprint):
            wait("a job of another run that makes the same result")
        yield
    finally:
        os.close(descriptor)


def is_worked_on(workspace: Workspace, fingerprint: str) -> bool:
    """Tell whether a worker holds the fingerprint's work directory now."""
    try:
        descriptor = open_no_link(workspace.work_directory(fingerprint) / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def result_set_aside(workspace: Workspace, fingerprint: str) -> Iterator[None]:
    """Make a fingerprint new again for a forced run; without a new result the old one returns.

    The work directory goes for good: a stage that found its checkpoints there would have
    nothing left to do. Call it with the claim held.
    """
    published = workspace.results / f"{fingerprint}.json"
    aside = published.with_suffix(".set-aside")
    if published.exists():
        published.replace(aside)
    _remove(workspace.work_directory(fingerprint))
    try:
        yield
    finally:
        if published.exists():
            aside.unlink(missing_ok=True)
        elif aside.exists():
            aside.replace(published)


def _remove(folder: Path) -> None:
    """Under another name first: half a work directory must not pass for a whole one."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
        folder.replace(doomed)
        shutil.rmtree(doomed)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
