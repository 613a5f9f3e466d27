"""Find the attempt that produced a stage's result, in this run or another one.

Reads records; that the other run's directory still stands is for the caller to see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.lineage import stage_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import read_shared_attempt
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class Maker:
    """The attempt that made, or is to make, a result that another run has too.

    Args:
        run: whose directory may have been deleted since.
        stage: the stage's name there.
        number: the attempt's.
    """

    run: RunDirectory
    stage: str
    number: int

    @property
    def attempt(self) -> AttemptDirectory:
        """Its directory, which may be gone."""
        return self.run.attempt(self.stage, self.number)

    @property
    def attempts(self) -> tuple[AttemptDirectory, ...]:
        """Those of the stage up to and with this one, first to last."""
        return tuple(self.run.attempt(self.stage, 1 + n) for n in range(self.number))


def find_maker(run: RunDirectory, stage: str, entry: Mapping[str, Any]) -> Maker | None:
    """Return who made, or is to make, what a run's stage has from another run.

    Args:
        entry: the stage's, in the run's state.json.

    Returns:
        None where the run's own attempt does, or where no record names the maker any more.
    """
    workspace = Workspace(run.path.parents[1])
    if not entry.get("reused"):
        shared = unless_damaged(lambda: read_shared_attempt(run, stage))
        return _of_attempt(shared) if shared is not None else None
    if noted := entry.get("made_by"):
        # Forced since, another run may have published the result again: this one had the earlier.
        return Maker(
            RunDirectory(workspace.runs / noted["run"]), noted["stage"], int(noted["attempt"])
        )
    result = stage_result(workspace, run, stage, entry)
    if result is None or not result.run:
        return None
    return Maker(RunDirectory(workspace.runs / result.run), result.stage, result.attempt)


def _of_attempt(attempt: AttemptDirectory) -> Maker:
    """The maker by its directory, `<run>/stages/<stage>/attempts/<n>`."""
    return Maker(RunDirectory(attempt.path.parents[3]), attempt.stage, attempt.number)
