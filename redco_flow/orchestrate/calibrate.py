"""Measure the speed of a profile's devices, by a run of one stage on one host.

It is a run like any other, in a workspace of its own below the profile's, so that no earlier
result is reused. Imports neither Prefect nor JAX.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed, UsageError
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import spawn, write_run
from redco_flow.records import read_json
from redco_flow.spec.find import find_file
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.calibrations import (
    find_measuring_run,
    forget_measuring_run,
    keep_calibration,
    note_measuring_run,
)
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_STAGE = "calibrate"
_SPEEDS_FILE = "speeds.json"
_log = logging.getLogger(__name__)


def calibrate(
    profile: Profile,
    profile_name: str,
    follow: Callable[[RunDirectory], bool],
    *,
    overrides: Sequence[str] = (),
    directory: Path,
) -> tuple[dict[str, Any], Path] | None:
    """Run the measurement, and keep it in the profile's workspace.

    A run with the same overrides whose result was not kept yet is followed in place of a new one.

    Args:
        follow: shows a run, and returns whether it has ended.
        overrides: of the pipeline `calibrate`.
        directory: where a new run's workspace is made; the nodes must reach it.

    Returns:
        all that was measured, and the file that plans read; None where the run continues.

    Raises:
        StageFailed: it was not measured; the message names the run.
        UsageError: a profile with GPUs requests none.
        DoesNotFit: the profile cannot have the devices.
    """
    workspace = Workspace(Path(profile.workspace).absolute())
    run = find_measuring_run(workspace, profile.name)
    if run is None or run.record["overrides"] != list(overrides):
        run = _start(profile, profile_name, overrides, directory)
        note_measuring_run(workspace, profile.name, run)
    if not follow(run):
        return None
    own, state = Workspace(run.path.parent.parent), run.read_state()
    made = state["stages"].get(_STAGE, {}).get("artifacts") or {}
    artifact = ArtifactStore(own).find(made.get("metrics", ""))
    if artifact is None:
        forget_measuring_run(workspace, profile.name)
        raise StageFailed(f"nothing was measured: redco-flow logs {run.id} -w {own.root} says why.")
    found: dict[str, Any] = read_json(artifact.path / _SPEEDS_FILE)
    kept = keep_calibration(
        workspace,
        {
            "profile": profile.name,
            "device_kind": found["device_kind"],
            "num_devices": found["num_devices"],
            "figures": found["figures"],
            "measured_at": state.get("ended_at") or utc_now(),
            "versions": found["versions"],
            "run": run.id,
        },
    )
    forget_measuring_run(workspace, profile.name)
    return found, kept


def _start(
    profile: Profile, profile_name: str, overrides: Sequence[str], directory: Path
) -> RunDirectory:
    measured = profile.model_copy(update={"workspace": str(directory)})
    resolved = load_pipeline(find_file("pipelines", "calibrate.yaml"), overrides, measured)
    section, resources = profile.section, resolved.stages[_STAGE].resources
    if section.gpu_type and section.gives_requested_gpus and not resources.gpus_per_host:
        raise UsageError(
            f"profile '{profile.name}' has gpu_type {section.gpu_type}, but its `defaults` request "
            f"no GPU, so CPUs would be measured: add {_STAGE}.resources.gpus_per_host=NUMBER."
        )
    plan = make_plan(resolved, Workspace(directory))
    for note in check_devices(resolved, measured, plan, os.environ):
        _log.warning("%s", note)
    Workspace.open(profile.workspace)
    run = write_run(
        resolved,
        measured,
        Workspace.open(directory),
        plan,
        profile_name=profile_name,
        overrides=overrides,
    )
    spawn(run)
    return run
