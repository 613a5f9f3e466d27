"""launch.json: how a run was started, so that any later process can take it up from anywhere.

Written once, with the run's directory. Holds the profile whole, because the file may have
changed by the time a run is resumed, and the folders that modules were imported from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import DamagedRecord
from redco_flow.records import write_json
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import read_record


@dataclass(frozen=True)
class LaunchRecord:
    """Where and with what a run was started.

    Args:
        workspace: an absolute path.
        directory: the current directory, for relative names.
        search_path: where modules were looked for, besides Python's own installation.
        profile: the whole profile.
        ahead: whether all stages' jobs are submitted at once.
    """

    workspace: str
    directory: str
    search_path: list[str]
    profile: dict[str, Any]
    ahead: bool = False

    @classmethod
    def of_this_process(
        cls, workspace: Path, profile: Mapping[str, Any], *, ahead: bool = False
    ) -> LaunchRecord:
        """Return the record of a run that is started here."""
        return cls(str(workspace), str(Path.cwd()), own_search_path(), dict(profile), ahead)

    @classmethod
    def read(cls, run: RunDirectory) -> LaunchRecord:
        """Read a run's record.

        Raises:
            DamagedRecord: it is damaged or gone.
        """
        try:
            return read_record(_path(run), cls)
        except OSError as error:
            raise DamagedRecord(_path(run), "it is gone") from error

    def write(self, run: RunDirectory) -> None:
        """Write it into a new run's directory."""
        write_json(_path(run), asdict(self))


def own_search_path() -> list[str]:
    """Return where this process looks for modules, apart from Python's own installation."""
    installed = tuple({f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}"})
    absolute = [str(Path(path).absolute()) for path in sys.path]  # "" is the current directory
    return [path for path in absolute if not f"{path}{os.sep}".startswith(installed)]


def _path(run: RunDirectory) -> Path:
    return run.path / "launch.json"
