"""Refuse data files that are not what the stage's fingerprint was made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.records import digest_file
from redco_flow.runtime.context import StageContext
from redco_flow.spec.stage_kind import NamedFiles
from redco_flow.tracking.file_digests import NAMED_BY, digest_named_files


class DataChanged(RedcoFlowError):
    """A data file is not what the stage's fingerprint was made of."""


_PLANNED = "since this run was planned"


class DataGuard:
    """Compare files with the plan's digests now, and again after they were read.

    Args:
        context: its provenance holds the fingerprint's ingredients; where it holds none (a stage
            run by hand) there is nothing to compare with.
        paths: the files that the stage reads.
        named_files: returns the files that rows of these name; called where the plan has some.

    Raises:
        DataChanged: a file is not among those that were planned with.
    """

    def __init__(
        self,
        context: StageContext,
        paths: Sequence[Path],
        named_files: Callable[[], Mapping[Path, NamedFiles]] = dict,
    ) -> None:
        planned = context.provenance.get("ingredients", {}).get("data", {})
        digests = {value for value in planned.values() if isinstance(value, str)}
        self.digests = {}
        for path in paths:
            context.report(phase="checking data")
            self.digests[path] = digest_file(path)
            if digests and self.digests[path] not in digests:
                raise DataChanged(_message(path, _PLANNED))
        self._seen = {path: _identity(path) for path in paths}
        if not any(name.startswith(NAMED_BY) for name in planned):
            return
        for path, files in named_files().items():
            found = {}
            for real in {one.real for one in files.values() if one}:
                context.report(phase="checking data")
                found[real] = digest_file(real)
                self._seen[real] = _identity(real)
            if digest_named_files(files, found) not in digests:
                raise DataChanged(_message(path, _PLANNED, "an image named in "))

    def check_again(self) -> None:
        """Refuse files that were written to while they were read.

        Raises:
            DataChanged: size or time of change differ from before.
        """
        for path, seen in self._seen.items():
            if _identity(path) != seen:
                raise DataChanged(_message(path, "while it was read"))


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _message(path: Path, when: str, what: str = "") -> str:
    return (
        f"{what}{path}: changed {when}: its content is not what the stage's fingerprint was made "
        "of. Nothing was written; run again to plan with what is there now."
    )
