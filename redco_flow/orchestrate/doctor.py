"""Check that a profile can run a pipeline; on a Slurm cluster by a short job on two nodes.

Each check says what it found and, where it fails, how to mend it. JAX is asked in a process of
its own, as a worker would ask it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.executor import make_executor
from redco_flow.launch.host_facts import Finding, installed_versions, output_of_python
from redco_flow.local_paths import expanded
from redco_flow.orchestrate.prefect.server import server_status
from redco_flow.orchestrate.recurring.serving_record import Serving
from redco_flow.spec.profile import Profile
from redco_flow.tracking.planned_fits import errors_text, like, recent_comparisons
from redco_flow.tracking.schedules import list_schedules
from redco_flow.tracking.workspace import Workspace

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "datasets", "transformers", "prefect")
_MIN_FREE_GIB = 2.0
_NUM_RUNS_SHOWN = 3
_DEVICES_PROGRAM = (
    "import json, jax; d = jax.devices();"
    "print(json.dumps({'platform': d[0].platform, 'kind': d[0].device_kind, 'count': len(d)}))"
)


def examine(profile: Profile) -> Iterator[Finding]:
    """Yield one finding per check, the cheap ones first."""
    checks: tuple[Callable[[Profile], Finding], ...] = (
        _check_python,
        _check_packages,
        _check_workspace,
        _check_disk,
        _check_devices,
        _check_prefect,
        _check_schedules,
    )
    for check in checks:
        yield check(profile)
    yield from _check_predictions(profile)
    try:
        executor = make_executor(profile, os.environ)
    except RedcoFlowError as error:
        yield Finding("executor", False, str(error), "see `executor` in the profile")
        return
    yield Finding("executor", True, profile.executor)
    yield from executor.examine(gpus_per_host(profile))


def _check_python(profile: Profile) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "use Python 3.11+"
    )


def _check_packages(profile: Profile) -> Finding:
    found = installed_versions(_PACKAGES)
    missing = [package for package in _PACKAGES if package not in found]
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    detail += f"; missing: {', '.join(missing)}" if missing else ""
    return Finding("packages", not missing, detail, f"pip install {' '.join(missing)}")


def _workspace_of(profile: Profile) -> Workspace:
    return Workspace(expanded(profile.workspace).absolute())


def _check_predictions(profile: Profile) -> Iterator[Finding]:
    """Yield, for each kind of device, how recent runs differ from what `plan --fit` predicted."""
    recent = recent_comparisons(_workspace_of(profile))
    for one_kind in {one.fit["device"]: one.fit for one in reversed(recent)}.values():
        compared = like(recent, one_kind)
        newest = "; ".join(f"{one.stage}: {one.text}" for one in compared[:_NUM_RUNS_SHOWN])
        yield Finding("predictions", True, f"{errors_text(compared)}; {newest}")


def _check_schedules(profile: Profile) -> Finding:
    names = ", ".join(one.name for one in list_schedules(_workspace_of(profile)))
    if not names:
        return Finding("schedules", True, "none")
    serving = Serving.find()
    if serving is not None:
        said = f"{names}; served by {serving.process} since {serving.since}"
        return Finding("schedules", True, said)
    remedy = "`redco-flow serve --detach`; `redco-flow serve --install` does so after a reboot, too"
    return Finding("schedules", False, f"nothing serves {names}: they do not fire", remedy)


def _check_workspace(profile: Profile) -> Finding:
    try:
        workspace = Workspace.open(profile.workspace)
    except RedcoFlowError as error:
        return Finding("workspace", False, str(error), "set `workspace` in the profile")
    return Finding("workspace", True, f"{workspace.root} can be written")


def _check_disk(profile: Profile) -> Finding:
    folder = Path(profile.workspace).absolute()
    while not folder.is_dir():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / 2**30
    return Finding(
        "disk",
        free_gib >= _MIN_FREE_GIB,
        f"{free_gib:.1f} GiB free at {folder}",
        f"free at least {_MIN_FREE_GIB:g} GiB, or put the workspace elsewhere",
    )


def gpus_per_host(profile: Profile) -> int:
    """Return the most GPUs that a stage requests by the profile's defaults."""
    stages = profile.defaults.get("stages") or {}
    asked = [(stage or {}).get("resources") or {} for stage in stages.values()]
    return max((int(one.get("gpus_per_host") or 0) for one in asked), default=0)


def _check_devices(profile: Profile) -> Finding:
    remedy = "run `python -c 'import jax; print(jax.devices())'` and mend what it reports"
    output = output_of_python("devices", _DEVICES_PROGRAM, remedy=remedy)
    if isinstance(output, Finding):
        return output
    found = json.loads(output.splitlines()[-1])
    count = profile.num_cpu_devices if found["platform"] == "cpu" else found["count"]
    return Finding("devices", True, f"{count} × {found['kind']} ({found['platform']})")


def _check_prefect(profile: Profile) -> Finding:
    status = server_status(profile.prefect_api_url)
    if status.healthy:
        return Finding("prefect", True, f"server at {status.url}")
    if not status.ours:
        return Finding(
            "prefect",
            False,
            f"no server answers at {status.url}",
            "start it, or unset PREFECT_API_URL and the profile's prefect_api_url",
        )
    return Finding(
        "prefect",
        True,
        "no server: runs have no page there until `redco-flow ui --prefect` starts one",
    )
