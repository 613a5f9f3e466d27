"""Limits of the cluster's site: met in the plan, and by arrays that are too large for one."""

import os
import signal
from contextlib import contextmanager

import pytest
import yaml
from faulty_commands import FaultyCommands
from job_processes import processes_of
from test_slurm_arrays import KIND, go, has_started, parts, run_of
from tiny_stages.calls import wait_until

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import reattach
from redco_flow.launch.slurm.limits import ask_site
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ONE_ARRAY_AT_MOST = """
if [ "$(squeue --me --noheader | wc -l)" -ge 1 ]; then
    echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
    echo "sbatch: error: Batch job submission failed: Job violates QOS policy" >&2; exit 1
fi
"""


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
    """Fault 58: the partition allows 5 minutes; no array may have more than 11."""
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
    (note,) = notes
    assert "12 shards are submitted as 2 job arrays" in note


def test_an_array_larger_than_max_array_size_waits_for_room_and_repeats_only_its_killed_task(
    slurm, tmp_path, monkeypatch
):
    """Fault 59: 12 shards, of which the last is in the second array, above a submit limit."""
    commands = FaultyCommands(tmp_path / "slurm")
    monkeypatch.setenv("PATH", commands.path)
    commands.inject("sbatch", ONE_ARRAY_AT_MOST)
    go(tmp_path, "join", *(f"go-{shard}" for shard in range(11)))
    driven = run_of(tmp_path, parts(tmp_path, 12), executor="slurm", retries={"failed": 1})
    attempt = wait_until(lambda: driven.run.latest_attempt("act"))
    job = wait_until(lambda: (record := attempt.read_job()) and reattach(record), 400)
    waiting = wait_until(lambda: "1 waiting (QOSMaxSubmit" in " ".join(driven.said), 400)

    wait_until(lambda: has_started(tmp_path, 11), 400)
    worker = f"redco_flow.worker {attempt.array(1).task(0).call_path}"
    for pid in processes_of(attempt, worker):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_started(tmp_path, 11, text="xx"), 400)
    go(tmp_path, "go-11")
    outcome = driven.end()

    assert outcome.state == "completed", driven.said
    assert waiting
    assert "task 11: the worker was killed by SIGKILL" in attempt.read_exit().message
    assert [task.path.name for task in driven.run.latest_attempt("act").tasks] == ["11"]
    assert has_started(tmp_path, *range(11))
    assert job.status().source == "exit.json"


def test_all_arrays_of_a_stage_are_found_again_and_cancelled(slurm, submit, tmp_path):
    """Fault 59: by another process, from job.json."""
    job = submit(
        kind=KIND,
        config={"folder": str(tmp_path)},
        num_shards=12,
        resources=JobResources(shards=tuple(range(12))),
        settings={"options": ["--begin=now+1hour"]},
    )

    stranger = reattach(job.record())
    wait_until(
        lambda: stranger.status().message == "0 of 12 tasks done, 12 waiting (BeginTime)", 60
    )
    stranger.cancel()

    assert len(job.job_id.split(",")) == 2
    assert job.state == "CANCELLED"
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs())


def test_another_launcher_submits_the_arrays_that_one_left(
    slurm, submit, new_executor, tmp_path, monkeypatch
):
    """Fault 59: the second was being submitted, the third not yet."""
    commands = FaultyCommands(tmp_path / "slurm")
    monkeypatch.setenv("PATH", commands.path)
    commands.inject("sbatch", ONE_ARRAY_AT_MOST)
    settings = {"options": ["--begin=now+1hour"]}
    left = submit(
        kind=KIND,
        config={"folder": str(tmp_path)},
        num_shards=23,
        resources=JobResources(shards=tuple(range(23))),
        settings=settings,
    )
    reader, job = reattach(left.record()), reattach(left.record())
    assert job.is_unsubmitted
    wait_until(lambda: "for the launcher to submit its array" in reader.status().message, 400)

    commands.repair("sbatch")
    new_executor(settings=settings).take_over(job)
    wait_until(lambda: not job.done() and not job.is_unsubmitted, 90)

    assert len(job.job_id.split(",")) == 3
    assert not reader.done()
    assert not reader.is_unsubmitted
    assert len(slurm.jobs()) == 3
    reader.cancel()
    assert job.state == "CANCELLED"
