"""Try a shared file system for `doctor`: locks between nodes, and how late files appear."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import DamagedRecord
from redco_flow.launch.host_facts import Finding
from redco_flow.records import (
    SECONDS_TO_SEE_RECORDS,
    list_directory,
    open_no_link,
    read_bytes,
    write_text,
)
from redco_flow.tracking.attempt import ENDED_RUN_STATES
from redco_flow.tracking.lock_mechanism import (
    IS_ABSENT,
    LINKS,
    RECORD,
    mechanism_of,
    record_links,
)
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.workspace import Workspace

REFUSED = ""
"""The answer of a node on which a flock is refused that another node holds, as it must be."""

_NEW, _CHANGED = "new-of-", "changed-by-"
_SECONDS_LATE = 1.0  # shorter delays are those of a busy machine


@contextmanager
def flock_held(path: Path) -> Iterator[None]:
    """Hold a flock on a file inside the `with`, if its file system has any."""
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_flock(path: Path) -> str:
    """Return REFUSED, or how this node fails to respect the flock that another node holds."""
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return REFUSED
    except OSError as error:
        if error.errno not in IS_ABSENT:
            raise
        return f"has no flock ({error.strerror})"
    finally:
        os.close(descriptor)
    return "gets a flock that another node holds"


def write_files(folder: Path, name: str) -> None:
    """Write a new file and change another one, as a node whose files are watched."""
    write_text(folder / f"{_NEW}{name}", name)
    write_text(folder / f"{_CHANGED}{name}", name)


class FileWatch:
    """Measure how late the files that nodes write are visible here.

    Args:
        folder: where they write; this process makes, and reads, the file that they change.
        names: of the nodes, as they use them with `write_files`.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._wanted = [folder / f"{kind}{name}" for name in names for kind in (_NEW, _CHANGED)]
        self._written: dict[str, float] = {}
        self._seen: dict[Path, float] = {}
        for path in self._wanted:
            if path.name.startswith(_CHANGED):
                write_text(path, "before")
        self.look()

    def note_written(self, name: str, seconds_ago: float = 0.0) -> None:
        """Note that a node reports its files as written.

        Args:
            seconds_ago: then, by the clocks of the node and of this machine.
        """
        self._written.setdefault(name, time.monotonic() - seconds_ago)

    def look(self) -> None:
        """Note which files are visible now."""
        list_directory(self._wanted[0].parent)
        for path in self._wanted:
            name = path.name.removeprefix(_NEW).removeprefix(_CHANGED)
            with contextlib.suppress(OSError):
                if path not in self._seen and read_bytes(path) == name.encode():
                    self._seen[path] = time.monotonic()

    def wait(self) -> None:
        """Wait until every file of the nodes that have reported is visible, up to 90 s."""
        deadline = time.monotonic() + SECONDS_TO_SEE_RECORDS
        while self._unseen() and time.monotonic() < deadline:
            time.sleep(0.1)
            self.look()

    def finding(self) -> Finding:
        """Return how late the files were."""
        shown = ", ".join(
            f"{what} file after {self._latest(kind):.1f} s"
            for kind, what in ((_NEW, "a new"), (_CHANGED, "a changed"))
        )
        remedy = (
            "results would be reported as missing: mount the workspace here with shorter caches "
            "(NFS: `lookupcache=positive,actimeo=3`), or move it to another file system"
        )
        if unseen := self._unseen():
            return Finding(
                "files of other nodes",
                False,
                f"not visible here after {SECONDS_TO_SEE_RECORDS:g} s: {', '.join(unseen)}",
                remedy,
            )
        late = max(self._latest(_NEW), self._latest(_CHANGED)) > _SECONDS_LATE
        advice = "; each stage ends so much later (NFS: `lookupcache=positive,actimeo=3`)"
        return Finding("files of other nodes", True, f"{shown}{advice if late else ''}")

    def _unseen(self) -> list[str]:
        return [path.name for path in self._of_reported() if path not in self._seen]

    def _of_reported(self) -> list[Path]:
        return [path for path in self._wanted if path.name.split("-", 2)[2] in self._written]

    def _latest(self, kind: str) -> float:
        found = [
            self._seen[path] - self._written[path.name.removeprefix(kind)]
            for path in self._of_reported()
            if path.name.startswith(kind) and path in self._seen
        ]
        return max(0.0, *found) if found else 0.0


@dataclass(frozen=True)
class SharedTrial:
    """A trial of a workspace that other nodes see.

    Args:
        folder: a directory in the workspace, removed when the trial ends.
        lock: a file there on which this process holds a flock.
        watch: of the files that the nodes write there.
    """

    folder: Path
    lock: Path
    watch: FileWatch


@contextmanager
def shared_trial(workspace: Workspace, names: list[str]) -> Iterator[SharedTrial]:
    """Prepare a trial of the workspace; `names` are those of the nodes."""
    folder = workspace.root / f".doctor-{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        with flock_held(folder / "lock"):
            yield SharedTrial(folder, folder / "lock", FileWatch(folder, names))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settle_locks(workspace: Workspace, answers: Mapping[str, str]) -> Finding:
    """Report whether nodes respect each other's flocks; where not, have the workspace use links.

    Args:
        answers: `try_flock` of each node, by name.
    """
    wrong = [f"{node} {answer}" for node, answer in answers.items() if answer != REFUSED]
    uses_links = mechanism_of(workspace.root / "lock") == LINKS
    use = f"the workspace uses locks by links ({RECORD})"
    if not wrong:
        detail = "a flock that one node holds is refused on the others"
        return Finding("locks", True, f"{detail}; {use}" if uses_links else detail)
    found = "; ".join(wrong)
    if uses_links:
        return Finding("locks", True, f"{found}; {use}, which need no flock")
    if busy := _runs_in_progress(workspace):
        remedy = (
            f"run doctor again when no run is in progress (now: {', '.join(busy)}): it then has "
            f"the workspace use locks that need no flock. Until then, start no second run"
        )
        return Finding("locks", False, found, remedy)
    record_links(workspace.root, found)
    return Finding("locks", True, f"{found}; from now on {use}, which need no flock")


def _runs_in_progress(workspace: Workspace) -> list[str]:
    """Runs whose locks may be held: driven by a process, or with a job that has not ended."""
    return [run.id for run in list_runs(workspace) if _is_in_progress(run)]


def _is_in_progress(run: RunDirectory) -> bool:
    try:
        if find_holder(run) is not None:
            return True
        if run.read_state()["state"] in ENDED_RUN_STATES:
            return False
    except DamagedRecord:
        return True  # it cannot be ruled out
    jobs = run.path.glob("stages/*/attempts/*/job.json")
    return any(not job.with_name("exit.json").exists() for job in jobs)
