"""Workers that each compute a shard of one stage: the last one joins, whichever it is."""

import os
import signal

import pytest
from tiny_stages.calls import make_attempt, make_call, new_attempt, wait_until

from redco_flow.launch.call import JobResources, read_call, write_call
from redco_flow.launch.local.executor import LocalExecutor
from redco_flow.launch.processes import kill_processes_of
from redco_flow.runtime.process_group import note_computed, shards_left
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

KIND = "tiny_stages.parts"


@pytest.fixture
def submit_shard(workspace, tmp_path):
    """Start the worker of one of three shards; whatever still runs at the end is killed."""
    attempts = []

    def submit(shard, number=1):
        if number > len(attempts):
            attempts.append(new_attempt(workspace, number=number))
        task = attempts[number - 1].task(shard)
        task.path.mkdir(parents=True)
        config = {"folder": str(tmp_path)}
        call = make_call(
            workspace, number=number, kind=KIND, config=config, shard=shard, num_shards=3
        )
        write_call(task, call)
        return LocalExecutor(workspace, grace_seconds=5).submit_call(task)

    yield submit
    for attempt in attempts:
        for task in attempt.tasks:
            kill_processes_of(task.path)


def go(folder, *names):
    for name in names:
        (folder / name).touch()


def is_joining(job):
    return (job.attempt.read_progress() or {}).get("phase") == "joining"


def test_shards_work_side_by_side_and_the_last_one_publishes_the_whole(
    submit_shard, workspace, tmp_path
):
    jobs = [submit_shard(shard) for shard in range(3)]
    for shard in range(3):
        wait_until((tmp_path / f"starts-{shard}").exists)
    whole = jobs[0].attempt.whole
    started = whole.read_progress()

    go(tmp_path, "join", "go-2", "go-0")
    assert jobs[2].result()["outputs"] == jobs[0].result()["outputs"] == {}
    most = whole.read_progress()
    assert whole.read_result() is None
    go(tmp_path, "go-1")
    outputs = jobs[1].result()["outputs"]

    assert (started["phase"], most["phase"]) == ("0/3 shards done", "2/3 shards done")
    assert whole.read_result()["outputs"] == outputs
    artifact = ArtifactStore(Workspace(workspace)).get(outputs["dataset"])
    assert [file["path"] for file in artifact.manifest["files"]] == ["0.txt", "1.txt", "2.txt"]
    assert (tmp_path / "joins").read_text() == "x"
    assert (whole.stage, whole.number, jobs[1].attempt.number) == ("act", 1, 1)
    assert whole.ranks_with_logs() == [0, 1, 2]


def test_where_the_joining_worker_dies_its_shard_alone_is_run_again_and_joins(
    submit_shard, tmp_path
):
    jobs = [submit_shard(shard) for shard in range(3)]
    go(tmp_path, "go-0", "go-1", "go-2")
    joining = wait_until(lambda: next((job for job in jobs if is_joining(job)), None))
    shard = int(joining.attempt.path.name)
    for job in jobs:
        if job is not joining:
            job.result()

    (worker,) = wait_until(lambda: workers_of(joining.attempt))
    os.kill(worker, signal.SIGKILL)
    joining.wait()
    go(tmp_path, "join")
    again = submit_shard(shard, number=2)

    assert joining.state == "FAILED"
    assert again.result()["outputs"].keys() == {"dataset"}
    assert (tmp_path / "joins").read_text() == "xx"
    assert again.attempt.whole.read_result()["outputs"] == again.result()["outputs"]


def workers_of(attempt):
    from redco_flow.launch.processes import processes_of

    return [pid for pid in processes_of(attempt.path) if b"redco_flow.worker" in command_line(pid)]


def command_line(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def test_a_result_that_is_there_ends_every_shard_at_once(submit_shard, workspace, tmp_path):
    go(tmp_path, "go-0", "go-1", "go-2", "join")
    first = [submit_shard(shard).result() for shard in range(3)][-1]

    again = submit_shard(0, number=2)

    assert again.result()["outputs"] == first["outputs"]
    assert again.attempt.whole.read_result()["outputs"] == first["outputs"]
    assert (tmp_path / "starts-0").read_text() == "x"


def test_shards_that_are_computed_are_left_out_of_the_next_attempt(tmp_path):
    assert shards_left(tmp_path, 3) == (0, 1, 2)

    assert not note_computed(tmp_path, 1, 3)
    assert not note_computed(tmp_path, 0, 2)  # of a run with another number of shards
    assert not note_computed(tmp_path, 1, 3)

    assert shards_left(tmp_path, 3) == (0, 2)
    assert shards_left(tmp_path, 2) == (1,)
    assert not note_computed(tmp_path, 0, 3)
    assert note_computed(tmp_path, 2, 3)
    assert shards_left(tmp_path, 3) == (0, 1, 2)  # all computed, none joined


def test_a_call_keeps_its_shards_from_launcher_to_worker(workspace):
    attempt = make_attempt(workspace, resources=JobResources(shards=(0, 2)), num_shards=3, shard=2)

    call = read_call(attempt.call_path)

    assert (call.resources.shards, call.num_shards, call.shard) == ((0, 2), 3, 2)
