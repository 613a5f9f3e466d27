"""Measure the speed of a profile's devices, by a run of one stage on one host.

It is a run like any other, in a workspace of its own below the profile's, so that no earlier
result is reused. Imports neither Prefect nor JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redco_flow.errors import StageFailed
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import start_run
from redco_flow.records import read_json
from redco_flow.spec.find import find_file
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.calibrations import keep_calibration
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_STAGE = "calibrate"
_SPEEDS_FILE = "speeds.json"


def calibrate(
    profile: Profile,
    profile_name: str,
    follow: Callable[[RunDirectory], int],
    *,
    overrides: Sequence[str] = (),
    directory: Path,
) -> tuple[dict[str, Any], Path]:
    """Run the measurement, and keep it in the profile's workspace.

    Args:
        follow: shows a run until it ends, and returns its exit code.
        overrides: of the pipeline `calibrate`.
        directory: where the run's workspace is made; the nodes must reach it.

    Returns:
        all that was measured, and the file that plans read.

    Raises:
        StageFailed: it was not measured; the message names the run.
    """
    measured = profile.model_copy(update={"workspace": str(directory)})
    resolved = load_pipeline(find_file("pipelines", "calibrate.yaml"), overrides, measured)
    workspace = Workspace.open(directory)
    plan = make_plan(resolved, workspace)
    run = start_run(
        resolved, measured, workspace, plan, profile_name=profile_name, overrides=overrides
    )
    follow(run)
    made = run.read_state()["stages"][_STAGE].get("artifacts") or {}
    artifact = ArtifactStore(workspace).find(made.get("metrics", ""))
    if artifact is None:
        raise StageFailed(
            f"nothing was measured: redco-flow logs {run.id} -w {workspace.root} says why."
        )
    found: dict[str, Any] = read_json(artifact.path / _SPEEDS_FILE)
    kept = keep_calibration(
        Workspace.open(profile.workspace),
        {
            "profile": profile.name,
            "device_kind": found["device_kind"],
            "num_devices": found["num_devices"],
            "figures": found["figures"],
            "measured_at": utc_now(),
            "versions": found["versions"],
            "run": run.id,
        },
    )
    return found, kept
