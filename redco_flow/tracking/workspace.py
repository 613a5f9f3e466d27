"""Paths of the workspace directory, and checks that it can be written.

Knows the folders' names and hands out sequence numbers; knows nothing of what the files hold.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import UsageError, WorkspaceError, some_of
from redco_flow.local_paths import PathIn, expanded
from redco_flow.records import explain_no_space, open_no_link, who_may_write
from redco_flow.tracking.lock_mechanism import establish
from redco_flow.tracking.locks import exclusive

CHECKPOINTS = "checkpoints"  # in a working directory, by step
COMMIT = "commit.json"  # the engine's mark of a whole checkpoint
SHORT_DIGITS = 16  # hex digits of an id or fingerprint in a directory's name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SEQUENCE_DIGITS = 20
_MAX_PLACES = 3
_ADVICE = (
    "Choose another directory with `workspace:` in the profile or profile.workspace=DIRECTORY, or "
    "make this one writable. It can be read as it is: `plan`, `ls`, `status`, `why`."
)
_FOLDERS = ("artifacts", "results", "work", "cache", "runs")


@dataclass(frozen=True)
class Workspace:
    """A workspace directory. `Workspace(root)` only reads; `Workspace.open(path)` makes it.

    Args:
        root: an absolute path.
    """

    root: Path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Workspace:
        """Return the workspace at `path`, making its folders, after a trial write.

        Raises:
            WorkspaceError: it cannot be made, or this user may not write all of it; names each
                path, the reason, whose it is and what to do.
        """
        root = expanded(path).absolute()
        try:
            for folder in _FOLDERS:
                (root / folder).mkdir(parents=True, exist_ok=True)
            _ignore_in_git(root)
            # Permission bits say nothing of root, quotas and read-only mounts: really write.
            for folder in _FOLDERS:
                with tempfile.TemporaryFile(dir=root / folder) as trial:
                    trial.write(b"trial")
                    trial.flush()
            closed = list(_closed_directories(root))
            if not closed:
                establish(root)
        except OSError as error:
            path = error.filename or root
            is_shut = error.errno in (errno.EACCES, errno.EPERM)
            why = f"{who_may_write(path)}. " if is_shut else f"{explain_no_space(error)} ".lstrip()
            raise WorkspaceError(
                f"workspace {root} cannot be written: {error.strerror} ({path}). {why}{_ADVICE}"
            ) from error
        if closed:
            raise WorkspaceError(
                f"workspace {root} cannot be written: Permission denied "
                f"({some_of(closed, _MAX_PLACES)}). "
                f"{who_may_write(closed[0])}. {_ADVICE}"
            )
        return cls(root)

    artifacts = PathIn("artifacts", of="root")
    """Published artifacts, `<kind>/<id16>/`."""

    @property
    def artifacts_lock(self) -> Path:
        """Lock under which artifacts get their names, are taken for reuse, and are deleted."""
        return self.artifacts / ".lock"

    results = PathIn("results", of="root")
    """Published stage results, `<fingerprint>.json`."""
    aliases = PathIn("aliases", of="root")
    """Directory of aliases, `<model>/<alias>.json`; created on first use."""
    schedules = PathIn("schedules", of="root")
    """Directory of schedules and their firings, `<name>/`; created on first use."""
    predict = PathIn("predict", of="root")
    """Pipelines and rows of `redco-flow predict`, `<digest16>/`; created on first use."""
    work = PathIn("work", of="root")
    """Stages' working directories, `<fingerprint16>/`."""
    cache = PathIn("cache", of="root")
    """Directory of files that may be deleted at any time."""
    runs = PathIn("runs", of="root")
    """Run directories, `<name>-<shortid>/`."""

    def work_directory(self, fingerprint: str) -> Path:
        """Return a stage's working directory, kept over attempts and runs; not made here."""
        return self.work / fingerprint[:SHORT_DIGITS]

    def committed_steps(self, fingerprint: str) -> list[int]:
        """Return the steps whose checkpoints a stage's working directory has, in order.

        Args:
            fingerprint: the stage's, or the name of its working directory.
        """
        found = (self.work_directory(fingerprint) / CHECKPOINTS).glob(f"*/{COMMIT}")
        return sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())

    def next_sequence(self) -> int:
        """Return a number larger than all before it in this workspace, whatever clocks say.

        Raises:
            OSError: the disk is full or read-only; names the path.
        """
        path = self.root / "sequence"
        with exclusive(path) as held:
            descriptor = held.descriptor
            text = os.pread(descriptor, 64, 0)
            is_whole = len(text) == _SEQUENCE_DIGITS + 1 and text[:-1].isdigit()
            last = int(text) if is_whole else self._highest_sequence()
            held.check()
            try:
                # Fixed width, so that the new number always covers the old one whole.
                os.pwrite(descriptor, f"{last + 1:0{_SEQUENCE_DIGITS}d}\n".encode(), 0)
                os.ftruncate(descriptor, _SEQUENCE_DIGITS + 1)
                os.fsync(descriptor)
            except OSError as error:
                error.filename = str(path)
                raise
        return last + 1

    def _highest_sequence(self) -> int:
        """The highest number in any record: the counter's file was deleted or is damaged."""
        patterns = ("runs/*/run.json", "results/*.json", "artifacts/*/*/manifest.json")
        highest = 0
        for pattern in patterns:
            for path in self.root.glob(pattern):
                highest = max(highest, _sequence_in(path))
        return highest


def _closed_directories(root: Path) -> Iterator[Path]:
    """Find what every run writes and this user may not: counters, locks, others' folders."""
    shared = (
        root / "sequence",
        root / "sequence.holders",
        root / "artifacts/.lock",
        root / "artifacts/.lock.holders",
        root / "cache/.digests.lock",
        *root.glob("artifacts/*"),
        root / "results/latest",
        *root.glob("results/latest/*"),
    )
    yield from (path for path in shared if path.exists() and not os.access(path, os.W_OK))


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return a user's directory for what is of no workspace: REDCO_FLOW_HOME or `~/.redco-flow`."""
    given = environ.get("REDCO_FLOW_HOME")
    return expanded(given).absolute() if given else Path.home() / ".redco-flow"


def user_name() -> str:
    """Return the name of the user who runs this process; a number where the system has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def check_name(text: str, what: str) -> str:
    """Return `text` if it can be one path component; names come from users.

    Raises:
        UsageError: anything that could leave its directory or confuse a shell.
    """
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{what} {text!r} is not a name: use 1 to 64 letters, digits, '_', '.' and '-', "
            f"beginning with a letter or a digit."
        )
    return text


def _sequence_in(path: Path) -> int:
    """The sequence number in a record; 0 in one that has none or is damaged."""
    try:
        sequence = json.loads(path.read_bytes())["sequence"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return sequence if isinstance(sequence, int) else 0


def _ignore_in_git(root: Path) -> None:
    """Keep the workspace out of the user's repository, whose state each run records."""
    path = root / ".gitignore"
    if not path.exists():
        with open(path, "w", opener=open_no_link) as file:
            file.write("*\n")
