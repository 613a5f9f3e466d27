"""Limits of the cluster's site: met in the plan, and by arrays that are too large for one."""

import os
from contextlib import contextmanager

import pytest
import yaml

from redco_flow.errors import DoesNotFit
from redco_flow.launch.slurm.limits import ask_site
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KIND = "tiny_stages.parts"


@contextmanager
def partition(slurm, **settings):
    """The partition with limits, which tests after this one do not have."""
    update = [f"{key}={value}" for key, value in settings.items()]
    slurm.run("scontrol", "update", "PartitionName=main", *update)
    try:
        ask_site(os.environ, fresh=True)
        yield
    finally:
        lifted = [f"{key}=UNLIMITED" for key in settings]
        slurm.run("scontrol", "update", "PartitionName=main", *lifted)


def test_a_plan_names_every_stage_above_a_limit_before_anything_is_submitted(slurm, tmp_path):
    """Fault 57: the partition allows 5 minutes; no array may have more than 11."""
    act = {"kind": KIND, "folder": str(tmp_path)}
    pipeline = {
        "name": "parts",
        "stages": {
            "long": {**act, "num_shards": 12, "resources": {"walltime_minutes": 60}},
            "short": {**act, "resources": {"walltime_minutes": 5}},
        },
    }
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline))
    profile = profile_model()(workspace=str(tmp_path / "workspace"), executor="slurm")
    resolved = load_pipeline(path, (), profile)
    plan = make_plan(resolved, Workspace(tmp_path / "workspace"))

    with partition(slurm, MaxTime="5"), pytest.raises(DoesNotFit) as error:
        check_devices(resolved, profile, plan, os.environ)
    ask_site(os.environ, fresh=True)
    notes = check_devices(resolved, profile, plan, os.environ)

    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{path}:")
    assert "'stages.long.resources.walltime_minutes': 60 min are above the limit of 5" in line
    assert "MaxTime of partition main" in line
    assert any("12 shards are submitted as 2 job arrays" in note for note in notes)
    assert any("accounting_storage" in note for note in notes)  # this site's sacctmgr refuses
