"""Keep the speeds of devices that `redco-flow calibrate` measured through a profile.

One file of the workspace's cache for each profile and kind of device; a later one replaces it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Required, TypedDict

from redco_flow.records import write_json
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace


class Calibration(TypedDict, total=False):
    """The result of a run of `calibrate`; `figures` are named as facts about devices."""

    profile: Required[str]
    device_kind: Required[str]
    num_devices: Required[int]
    figures: Required[dict[str, float]]
    measured_at: Required[str]
    versions: dict[str, str]
    run: str


def keep_calibration(workspace: Workspace, found: Calibration) -> Path:
    """Write a measurement where plans look for it, and return the path."""
    kind = re.sub(r"[^a-z0-9]+", "-", found["device_kind"].lower()).strip("-")
    folder = _folder(workspace, found["profile"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    write_json(path, found)
    return path


def read_calibrations(workspace: Workspace, profile: str) -> list[Calibration]:
    """Return the measurements through a profile; damaged ones are reported and left out."""
    paths = sorted(_folder(workspace, profile).glob("*.json"))
    found = (unless_damaged(lambda path=path: find_record(path, Calibration)) for path in paths)  # type: ignore[misc]
    return [one for one in found if one is not None]


def _folder(workspace: Workspace, profile: str) -> Path:
    return workspace.cache / "devices" / profile
