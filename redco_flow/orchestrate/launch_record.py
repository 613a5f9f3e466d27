"""launch.json: how a run was started, so that any later process can take it up from anywhere.

Written once, with the run's directory. Holds the profile whole, because the file may have
changed by the time a run is resumed, and the folders that modules were imported from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redco_flow import search_path
from redco_flow.errors import DamagedRecord
from redco_flow.records import write_json
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import check_shape, read_record


@dataclass(frozen=True)
class LaunchRecord:
    """Where and with what a run was started.

    Args:
        workspace: an absolute path.
        directory: the current directory, for relative names.
        variables: by which its processes look for modules where this one does.
        profile: the whole profile.
        ahead: whether all stages' jobs are submitted at once.
    """

    workspace: str
    directory: str
    variables: dict[str, str]
    profile: dict[str, Any]
    ahead: bool = False

    @classmethod
    def of_this_process(
        cls, workspace: Path, profile: Mapping[str, Any], *, ahead: bool = False
    ) -> LaunchRecord:
        """Return the record of a run that is started here."""
        variables = search_path.variables()
        return cls(str(workspace), str(Path.cwd()), variables, dict(profile), ahead)

    @classmethod
    def read(cls, run: RunDirectory) -> LaunchRecord:
        """Read a run's record.

        Raises:
            DamagedRecord: it is damaged or gone.
        """
        path = _path(run)
        try:
            record = read_record(path, dict[str, Any])
        except OSError as error:
            raise DamagedRecord(path, "it is gone") from error
        if isinstance(folders := record.get("search_path"), list):
            # Of a version that put all folders first.
            record["variables"] = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        return check_shape(record, cls, path)

    def write(self, run: RunDirectory) -> None:
        """Write it into a new run's directory."""
        write_json(_path(run), asdict(self))


def _path(run: RunDirectory) -> Path:
    return run.path / "launch.json"
