"""Is the data that a stage is about to read the data that its fingerprint was made of?

Knows digests only. A file that changed between plan and run would give a result under a
fingerprint that is not its own, to be reused for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from redco_flow.records import digest_file
from redco_flow.stages.bad_rows import DataChanged
from redco_flow.stages.context import StageContext


class DataGuard:
    """Compare files with the plan's digests now, and again after they were read.

    Args:
        context: its provenance holds the fingerprint's ingredients; where it holds none (a stage
            run by hand) there is nothing to compare with.
        paths: the files that the stage reads.

    Raises:
        DataChanged: a file is not among those that were planned with.
    """

    def __init__(self, context: StageContext, paths: Sequence[Path]) -> None:
        planned = context.provenance.get("ingredients", {}).get("data", {})
        digests = {value for value in planned.values() if isinstance(value, str)}
        self.digests = {}
        for path in paths:
            context.report(phase="checking data")
            self.digests[path] = digest_file(path)
            if digests and self.digests[path] not in digests:
                raise DataChanged(_message(path, "since this run was planned"))
        self._seen = {path: _identity(path) for path in paths}

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


def _message(path: Path, when: str) -> str:
    return (
        f"{path}: changed {when}: its content is not what the stage's fingerprint was made of. "
        "Nothing was written; run again to plan with what is there now."
    )
