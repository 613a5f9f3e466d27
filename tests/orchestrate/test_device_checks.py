"""Devices that a profile does not have are reported by the plan, with the setting's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from redco_flow.errors import DoesNotFit
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.spec.load import load_pipeline, load_profile
from redco_flow.tracking.workspace import Workspace

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "pipelines" / "quickstart.yaml"
HOSTS = """\
executor: hosts
hosts: {addresses: [{address: a, gpus: 2}, {address: b}]}
"""
CPU_ONLY = {"JAX_PLATFORMS": "cpu"}


@pytest.fixture
def told(tmp_path):
    """What is wrong with the quickstart's devices, changed by overrides; empty where nothing is."""

    def check(*overrides, profile="local"):
        found = load_profile(profile, overrides)
        pipeline = load_pipeline(QUICKSTART, overrides, found, environ={})
        plan = make_plan(pipeline, Workspace(tmp_path))
        try:
            check_devices(pipeline, found, plan, CPU_ONLY)
        except DoesNotFit as error:
            return str(error).splitlines()
        return []

    return check


def test_a_plan_for_the_devices_that_are_there_is_accepted(told):
    assert told() == []
    assert told("train.num_model_shards=2", "profile.num_cpu_devices=8") == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.num_model_shards=4"], "'stages.train.num_model_shards': 4 does not divide the 1 "
         "device of the stage; allowed: 1 (profile.num_cpu_devices is 1)"),
        (["predict.num_model_shards=3", "profile.num_cpu_devices=4"],
         "'stages.predict.num_model_shards': 3 does not divide the 4 devices of the stage; "
         "allowed: 1, 2, 4 (profile.num_cpu_devices is 4)"),
        (["train.fsdp=3", "profile.num_cpu_devices=4"], "'stages.train.fsdp': 3 does not divide "
         "the 4 data-parallel devices; allowed: 1, 2, 4 (profile.num_cpu_devices is 4)"),
        (["train.global_batch_size=30", "profile.num_cpu_devices=4"],
         "'stages.train.global_batch_size': 30 is not a multiple of 4 (4 data-parallel devices x 1 "
         "rows per device); nearest valid values: 28, 32 (profile.num_cpu_devices is 4)"),
        (["train.mesh=auto", "train.num_context_shards=3", "profile.num_cpu_devices=4"],
         "'stages.train.num_context_shards': 3 does not divide the 4 devices that model shards "
         "leave; allowed: 1, 2, 4 (profile.num_cpu_devices is 4)"),
        (["train.resources.gpus_per_host=2"], "'stages.train.resources.gpus_per_host': the stage "
         "asks for 2 GPUs, and this machine, where profile 'local' runs it, has none. Choose a "
         "profile whose machines have them (-p PROFILE), set it to what there is, or compute "
         "without: profile.missing_gpus=warn"),
    ],
)  # fmt: skip
def test_a_setting_that_the_devices_cannot_have_is_reported_at_its_place(told, overrides, expected):
    assert told(*overrides) == [f"command line: {expected}"]


def test_a_layout_is_checked_for_all_gpus_of_a_host_that_shows_them_all(told, tmp_path):
    profile = tmp_path / "equal.yaml"
    profile.write_text(
        "{executor: hosts, hosts: {addresses: [{address: a, gpus: 4}, {address: b, gpus: 4}]}}"
    )
    resources = ("train.resources.gpus_per_host=2", "train.resources.num_hosts=2")

    assert told(*resources, "train.num_model_shards=8", profile=profile) == []
    (line,) = told(*resources, "train.num_model_shards=3", profile=profile)
    assert "3 does not divide the 8 devices of the stage" in line


def test_checkpoints_of_several_processes_do_not_go_through_the_nodes_disks(told, tmp_path):
    profile = tmp_path / "two.yaml"
    profile.write_text(f"staging: {{directory: $TMPDIR, checkpoints: true}}\n{HOSTS}")
    asked = ["train.resources.num_hosts=2", "predict.resources.num_hosts=2"]
    own = "stages.train.runs_on={staging: {checkpoints: false}}"

    (line,) = told(*asked, profile=profile)
    assert line.startswith("command line: 'stages.train.resources.num_hosts': the stage runs as 2 "
                           "processes, each of which writes its part of a checkpoint")  # fmt: skip
    assert told(*asked, own, profile=profile) == []


def test_all_stages_are_reported_at_once(told):
    found = told("train.num_model_shards=4", "predict.resources.gpus_per_host=1")

    assert [line.split("'")[1] for line in found] == [
        "stages.predict.resources.gpus_per_host",
        "stages.train.num_model_shards",
    ]


def test_gpus_that_may_be_missing_are_no_problem(told):
    assert told("train.resources.gpus_per_host=2", "profile.missing_gpus=warn") == []


def test_hosts_without_enough_gpus_are_reported(told, tmp_path):
    profile = tmp_path / "two.yaml"
    profile.write_text(HOSTS)

    assert told("train.resources.gpus_per_host=2", profile=profile) == []
    (line,) = told("train.resources.gpus_per_host=4", profile=profile)
    assert line.startswith("command line: 'stages.train.resources.gpus_per_host': the stage asks "
                           "for 1 hosts with 4 GPUs, and the profile's largest group")  # fmt: skip


def test_all_or_none_of_the_stages_of_one_job_say_how_much_they_need(told):
    asked = ["group=small", "train.resources.memory_gib=8", "profile.slurm.walltime_minutes=9"]

    assert told(*asked, "predict.resources.walltime_minutes=5", profile="slurm") == [
        "command line: 'stages.train.resources.memory_gib': 'preprocess' runs in the same job "
        "(group 'small') and asks for no memory_gib: set stages.preprocess.resources.memory_gib, "
        "or leave it out of all stages of the group"
    ]


def test_a_flow_of_the_users_needs_a_server_where_a_job_drives_the_run(told, tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "pipeline.py").write_text("")

    (line,) = told("profile.launcher=slurm", profile="slurm")
    assert "flows/pipeline.py: a flow of your own needs a Prefect server" in line
    named = "profile.prefect_api_url=http://example.org/api"
    assert told("profile.launcher=slurm", named, profile="slurm") == []


def test_gpus_of_slurm_are_those_that_a_stage_asks_for(told):
    overrides = ["train.resources={num_hosts: 2, gpus_per_host: 4}", "train.num_model_shards=3"]

    assert told(*overrides, profile="slurm") == [
        "command line: 'stages.train.num_model_shards': 3 does not divide the 8 devices of the "
        "stage; allowed: 1, 2, 4, 8"
    ]
