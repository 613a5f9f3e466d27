"""A stage in shards, one task of a Slurm array each, on the test cluster."""

import json
import os
import signal

import pytest
import yaml
from job_processes import processes_of
from tiny_stages.calls import wait_until

from pipelines import Driven
from redco_flow.errors import RunCancelled
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import reattach
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import write_run
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.stages.preprocess.pairs import BLOCK_ROWS
from redco_flow.tracking.workspace import Workspace

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache"),
]

KIND = "tiny_stages.parts"


@pytest.fixture
def submit_array(submit, tmp_path):
    """Submit the three shards of the tiny stage as one array."""

    def submit_array(**settings):
        return submit(
            kind=KIND,
            config={"folder": str(tmp_path)},
            num_shards=3,
            resources=JobResources(shards=(0, 1, 2)),
            grace_seconds=10,
            settings=settings,
        )

    return submit_array


def go(folder, *names):
    for name in names:
        (folder / name).touch()


def run_of(folder, pipeline, ahead=False, **profile):
    """A driven run of a pipeline given as a mapping."""
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"name": "parts", **pipeline}))
    settings = profile_model()(
        workspace=str(folder / profile.pop("workspace", "workspace")), **profile
    )
    resolved = load_pipeline(path, (), settings)
    workspace = Workspace.open(settings.workspace)
    plan = make_plan(resolved, workspace)
    given = {"overrides": (), "argv": ["redco-flow"], "ahead": ahead}
    return Driven(write_run(resolved, settings, workspace, plan, **given))


def parts(folder, num_shards=3):
    return {"stages": {"act": {"kind": KIND, "num_shards": num_shards, "folder": str(folder)}}}


def has_started(folder, *shards, text="x"):
    paths = [folder / f"starts-{shard}" for shard in shards]
    return all(path.exists() and path.read_text() == text for path in paths)


def task_processes(attempt, shard):
    """The workers of one task."""
    return processes_of(attempt, f"redco_flow.worker {attempt.task(shard).call_path}")


def test_three_shards_on_three_nodes_give_the_same_dataset_as_one_local_job(slurm, tmp_path):
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for index in range(2 * BLOCK_ROWS + 500):
            file.write(json.dumps({"source": f"a {index}", "target": f"b {index % 7}"}) + "\n")
    preprocess = {"max_source_length": 8, "max_target_length": 8}
    data = {"train": str(rows), "tokenizer": {"train": {"vocab_size": 270, "type": "bpe"}}}
    pipeline = {"data": data, "stages": {"preprocess": preprocess}}
    local = run_of(tmp_path, pipeline, workspace="local")
    assert local.end().state == "completed", local.said

    preprocess |= {"num_shards": 3, "resources": {"cpus_per_host": 4}}  # a node has no more
    away = run_of(tmp_path, pipeline, executor="slurm")
    assert away.end().state == "completed", away.said

    ids = [driven.stage("preprocess")["artifacts"] for driven in (local, away)]
    assert ids[0] == ids[1]
    attempt = away.run.latest_attempt("preprocess")
    assert [task.read_exit().cause for task in attempt.tasks] == ["completed"] * 3
    said = slurm.run("squeue", "--array", "--states=all", "--noheader", "--format=%F %N")
    array = attempt.read_job()["job_id"]
    nodes = {line.split()[1] for line in said.splitlines() if line.split()[0] == array}
    assert len(nodes) == 3


def test_an_array_tells_how_many_tasks_are_done_and_keeps_to_its_throttle(
    slurm, submit_array, tmp_path
):
    job = submit_array(max_array_tasks=2)
    wait_until(lambda: has_started(tmp_path, 0, 1))
    go(tmp_path, "join", "go-0")

    def throttled():
        text = job.status().message
        return "1 of 3 tasks done" in text and "2 at work" in text

    at_first = wait_until(lambda: "JobArrayTaskLimit" in (s := job.status()).message and s)
    wait_until(throttled)
    go(tmp_path, "go-1", "go-2")

    assert job.result()["outputs"].keys() == {"dataset"}
    assert at_first.state == "running"
    assert "1 waiting (JobArrayTaskLimit)" in at_first.message
    assert job.attempt.ranks_with_logs() == [0, 1, 2]
    assert job.attempt.read_exit().message == "every task is done."
    assert job.status().source == "exit.json"


def test_of_an_array_the_killed_task_alone_is_run_again(slurm, tmp_path):
    driven = run_of(tmp_path, parts(tmp_path), executor="slurm", retries={"failed": 1})
    wait_until(lambda: has_started(tmp_path, 0, 1, 2))
    attempt = driven.run.latest_attempt("act")

    for pid in task_processes(attempt, 1):
        os.kill(pid, signal.SIGKILL)
    go(tmp_path, "join", "go-0", "go-2")
    wait_until(lambda: has_started(tmp_path, 1, text="xx"))
    go(tmp_path, "go-1")
    outcome = driven.end()

    assert outcome.state == "completed", driven.said
    assert attempt.read_exit().cause == "failed"
    assert "task 1: the worker was killed by SIGKILL" in attempt.read_exit().message
    again = driven.run.latest_attempt("act")
    assert [task.path.name for task in again.tasks] == ["1"]
    assert has_started(tmp_path, 0, 2)


@pytest.mark.parametrize("by", ["a job of higher priority", "a plain SIGTERM to one task"])
def test_preempted_tasks_are_queued_again_by_themselves(slurm, submit_array, tmp_path, by):
    job = submit_array()
    wait_until(lambda: has_started(tmp_path, 0, 1, 2))
    go(tmp_path, "join")

    if by == "a job of higher priority":
        script = tmp_path / "high.sh"
        script.write_text("#!/bin/sh\nsleep 600\n")
        options = ["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"]
        other = slurm.run("sbatch", "--parsable", *options, str(script)).strip()
        requeued = (0, 1, 2)
        wait_until(lambda: "waiting" in job.status().message)
        slurm.run("scancel", other)
    else:
        slurm.run("scancel", "--signal=TERM", f"{job.job_id}_1")
        requeued = (1,)
    wait_until(lambda: has_started(tmp_path, *requeued, text="xx"))
    go(tmp_path, "go-0", "go-1", "go-2")
    assert job.wait_seconds(400)

    assert job.state == "COMPLETED", job.status()
    restarts = [task.read_exit().restart for task in job.attempt.tasks]
    assert restarts == [int(shard in requeued) for shard in range(3)]


def test_cancelling_an_array_ends_running_and_waiting_tasks_and_leaves_nothing(
    slurm, submit_array, tmp_path
):
    job = submit_array(max_array_tasks=2)
    wait_until(lambda: has_started(tmp_path, 0, 1))

    job.cancel()

    assert job.state == "CANCELLED"
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs())
    wait_until(lambda: processes_of(job.attempt) == [])
    assert not (tmp_path / "starts-2").exists()
    with pytest.raises(RunCancelled):
        job.result()


def test_a_waiting_task_that_scancel_takes_out_of_the_queue_is_cancelled(slurm, submit_array):
    job = submit_array(options=["--begin=now+1hour"])
    slurm.run("scancel", f"{job.job_id}_2")  # of which Slurm then knows nothing
    wait_until(lambda: job.status().message == "0 of 3 tasks done, 2 waiting (BeginTime), 1 failed")

    slurm.run("scancel", f"{job.job_id}_1")
    wait_until(lambda: "2 failed" in job.status().message)

    for said in (job.attempt.task(shard).read_exit() for shard in (1, 2)):
        assert said.cause == "cancelled"
        assert said.message.startswith("it never began: Slurm took it out of the queue")


def test_an_array_whose_id_was_lost_is_found_by_its_name(slurm, submit_array):
    job = submit_array(options=["--begin=now+1hour"])

    stranger = reattach(job.record() | {"job_id": ""})
    message = "0 of 3 tasks done, 3 waiting (BeginTime)"  # once Slurm has looked at it
    status = wait_until(lambda: (s := stranger.status()).message == message and s)

    assert stranger.job_id == job.job_id
    assert status.source.startswith("squeue")
    stranger.cancel()
    assert job.state == "CANCELLED"


def test_a_stage_submitted_ahead_begins_when_every_task_of_the_array_before_it_is_done(
    slurm, tmp_path
):
    pipeline = parts(tmp_path)
    after = {"kind": "tiny_stages.act", "action": "note_inputs", "folder": str(tmp_path)}
    pipeline["stages"]["after"] = after
    driven = run_of(tmp_path, pipeline, ahead=True, executor="slurm")
    wait_until(lambda: has_started(tmp_path, 0, 1, 2))
    wait_until(lambda: any(line.startswith("after | job") for line in driven.said))
    waiting = slurm.jobs()
    go(tmp_path, "join", "go-0", "go-1", "go-2")
    assert driven.end().state == "completed", driven.said

    array, later = (
        driven.run.latest_attempt(name).read_job()["job_id"] for name in ("act", "after")
    )
    assert waiting[later] == "PENDING"
    script = (driven.run.latest_attempt("after").path / "job.sh").read_text()
    assert f"--dependency=afterok:{array}\n" in script
    assert [len(driven.run.attempts(name)) for name in ("act", "after")] == [1, 1]
    noted = json.loads((tmp_path / "inputs.json").read_text())
    assert noted["id"] == driven.stage("act")["artifacts"]["dataset"]
