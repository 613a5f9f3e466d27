"""Keep the speeds of devices that `redco-flow calibrate` measured through a profile.

One file of the workspace for each profile and kind of device, and the run that measures meanwhile.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal, Required, TypedDict

from redco_flow.errors import DamagedRecord
from redco_flow.records import write_json
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace

MeasuredFact = Literal["bfloat16_tflops", "tf32_tflops", "float32_tflops", "hbm_gb_s", "host_gb_s"]


class Calibration(TypedDict, total=False):
    """The result of a run of `calibrate`; `figures` are named as facts about devices."""

    profile: Required[str]
    device_kind: Required[str]
    num_devices: Required[int]
    figures: Required[dict[MeasuredFact, float]]
    measured_at: Required[str]
    versions: dict[str, str]
    run: str


def keep_calibration(workspace: Workspace, found: Calibration) -> Path:
    """Write a measurement where plans look for it, and return the path.

    Figures that an earlier one has and this one has not (with a single device nothing is
    exchanged) are kept.
    """
    kind = re.sub(r"[^a-z0-9]+", "-", found["device_kind"].lower()).strip("-")
    folder = _folder(workspace, found["profile"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    earlier = unless_damaged(lambda: _read(path))
    figures = {**(earlier["figures"] if earlier else {}), **found["figures"]}
    write_json(path, {**found, "figures": figures})
    return path


def read_calibrations(workspace: Workspace, profile: str) -> list[Calibration]:
    """Return the measurements through a profile; damaged ones are reported and left out."""
    paths = sorted(_folder(workspace, profile).glob("*.json"))
    found = (unless_damaged(lambda path=path: _read(path)) for path in paths)  # type: ignore[misc]
    return [one for one in found if one is not None]


def _read(path: Path) -> Calibration | None:
    found = find_record(path, Calibration)
    figures = found["figures"] if found else {}
    if wrong := [name for name, value in figures.items() if not 0 < value < math.inf]:
        raise DamagedRecord(path, f"{', '.join(wrong)} must be a positive number")
    return found


def note_measuring_run(workspace: Workspace, profile: str, run: RunDirectory) -> None:
    """Write which run measures through a profile, until `forget_measuring_run`."""
    path = _measuring_run(workspace, profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"run": str(run.path)})


def find_measuring_run(workspace: Workspace, profile: str) -> RunDirectory | None:
    """Return the run whose result was not kept yet, if there is one."""
    found = unless_damaged(
        lambda: find_record(_measuring_run(workspace, profile), dict[str, str], needs=["run"])
    )
    run = RunDirectory(Path(found["run"])) if found else None
    return run if run is not None and (run.path / "run.json").is_file() else None


def forget_measuring_run(workspace: Workspace, profile: str) -> None:
    """Delete the note: the run's result is kept, or there will be none."""
    _measuring_run(workspace, profile).unlink(missing_ok=True)


def _measuring_run(workspace: Workspace, profile: str) -> Path:
    return _folder(workspace, profile) / "measuring" / "run.json"


def _folder(workspace: Workspace, profile: str) -> Path:
    return workspace.root / "devices" / profile
