"""Where things stand in the workspace directory, and whether it can be written.

Knows the folders' names and hands out sequence numbers; knows nothing of what the files hold.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import UsageError, WorkspaceError
from redco_flow.records import read_json_if_present
from redco_flow.tracking.file_lock import exclusive

SHORT_DIGITS = 16  # hex digits of an id or fingerprint in a directory's name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
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
            WorkspaceError: it cannot be made or written; names the path and the reason.
        """
        root = Path(path).expanduser().absolute()
        try:
            for folder in _FOLDERS:
                (root / folder).mkdir(parents=True, exist_ok=True)
            _ignore_in_git(root)
            # Permission bits say nothing of root, quotas and read-only mounts: really write.
            for folder in _FOLDERS:
                with tempfile.TemporaryFile(dir=root / folder) as trial:
                    trial.write(b"trial")
                    trial.flush()
        except OSError as error:
            raise WorkspaceError(
                f"workspace {root} cannot be written: {error.strerror} "
                f"({error.filename or root}). Choose another directory with `workspace:` in the "
                f"profile or profile.workspace=DIRECTORY, or make this one writable."
            ) from error
        return cls(root)

    @property
    def artifacts(self) -> Path:
        """Published artifacts, `<kind>/<id16>/`."""
        return self.root / "artifacts"

    @property
    def results(self) -> Path:
        """Published stage results, `<fingerprint>.json`."""
        return self.root / "results"

    @property
    def work(self) -> Path:
        """Stages' working directories, `<fingerprint16>/`."""
        return self.root / "work"

    @property
    def cache(self) -> Path:
        """What may be deleted at any time."""
        return self.root / "cache"

    @property
    def runs(self) -> Path:
        """Run directories, `<name>-<shortid>/`."""
        return self.root / "runs"

    def work_directory(self, fingerprint: str) -> Path:
        """Return a stage's working directory, kept over attempts and runs; not made here."""
        return self.work / fingerprint[:SHORT_DIGITS]

    def next_sequence(self) -> int:
        """Return a number larger than all before it in this workspace, whatever clocks say.

        Raises:
            OSError: the disk is full or read-only; names the path.
        """
        path = self.root / "sequence"
        with exclusive(path) as descriptor:
            text = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
            last = int(text) if text.isdigit() else self._highest_sequence()
            try:
                # Fixed width, so that the new number always covers the old one whole.
                os.pwrite(descriptor, f"{last + 1:020d}\n".encode(), 0)
                os.fsync(descriptor)
            except OSError as error:
                error.filename = str(path)
                raise
        return last + 1

    def _highest_sequence(self) -> int:
        """The highest number in any record: the counter's file was deleted."""
        patterns = ("runs/*/run.json", "results/*.json", "artifacts/*/*/manifest.json")
        highest = 0
        for pattern in patterns:
            for path in self.root.glob(pattern):
                record = read_json_if_present(path) or {}
                highest = max(highest, int(record.get("sequence", 0)))
        return highest


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


def _ignore_in_git(root: Path) -> None:
    """Keep the workspace out of the user's repository, whose state each run records."""
    path = root / ".gitignore"
    if not path.exists():
        path.write_text("*\n")
