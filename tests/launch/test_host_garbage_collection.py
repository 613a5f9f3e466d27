"""What a host deletes and what it keeps: by its launcher's word and by leases, on a file system."""

import json
import os
import subprocess
import threading
import time

import pytest
from tiny_stages.calls import make_call

from redco_flow.errors import WorkspaceError
from redco_flow.launch.call import write_call
from redco_flow.launch.hosts import lease
from redco_flow.launch.hosts.agent import num_bytes
from redco_flow.launch.hosts.bootstrap import REMOVAL_LOCK, check
from redco_flow.launch.hosts.garbage_collection import delete, survey
from redco_flow.launch.hosts.inventory import take_inventory, what_is_missing
from redco_flow.records import write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.results import StageResult, publish_result, read_result
from redco_flow.tracking.workspace import Workspace

DIGEST = "c" * 64
FINGERPRINT = "f" * 64
OWNER = {"attempt": "job-1", "run": "tiny", "stage": "act", "launcher": "me@laptop"}
LOG = "logs/rank0.log"
ENDING = {"cause": "failed", "message": "boom"}


@pytest.fixture
def directory(tmp_path):
    """A host's directory, as the first look at it leaves it."""
    directory = tmp_path / "host"
    directory.mkdir()
    check(directory, DIGEST)
    return directory


@pytest.fixture
def workspace(directory):
    return Workspace.open(directory / "workspace")


@pytest.fixture
def home(tmp_path):
    """The launcher's workspace."""
    return Workspace.open(tmp_path / "home")


@pytest.fixture
def artifact(workspace, tmp_path):
    """An artifact on the host."""
    source = tmp_path / "source"
    source.write_text("made here")
    return ArtifactStore(workspace).publish("dataset", source)


def make_job(workspace, name):
    """A job's folder as its rank left it: call, log, metrics and ending."""
    attempt = AttemptDirectory(workspace.runs / name / "stages" / "act" / "attempts" / "1")
    attempt.logs.mkdir(parents=True)
    write_call(attempt, make_call(workspace.root, fingerprint=FINGERPRINT))
    attempt.log_path().write_text("step 1\nstep 2\n")
    attempt.metrics_path.write_text('{"step": 1}\n')
    attempt.rank_directory(0).mkdir(parents=True)
    write_json(attempt.rank_exit_path(0), ENDING)
    return attempt


def commit_checkpoint(workspace, step):
    checkpoint = workspace.work_directory(FINGERPRINT) / "checkpoints" / str(step)
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "commit.json", {"step": step, "files": []})


def publish(workspace, artifact):
    outputs = {"dataset": artifact.id}
    publish_result(workspace, StageResult(FINGERPRINT, "tiny", "act", "tiny", {}, outputs))


def later():
    """A clock two hours ahead."""
    return time.time() + 7200


def kinds_to_go(directory, jobs=None):
    return [one.kind for one in survey(directory, jobs or {}, later) if not one.reason]


def name_in_lease(directory, path, runner):
    lease.acquire(directory, OWNER, [str(path)])
    lease.hand_to_runners(directory, OWNER, [runner])


def missing(workspace, home, attempt, at_home):
    found = take_inventory(workspace, attempt, FINGERPRINT)
    return what_is_missing(json.loads(json.dumps(found)), home, at_home, FINGERPRINT)


def test_a_job_that_no_launcher_has_stays_with_all_that_it_made(directory, workspace, artifact):
    make_job(workspace, "job-1")
    commit_checkpoint(workspace, 7)
    publish(workspace, artifact)

    delete(directory, {}, clock=later)

    assert kinds_to_go(directory) == []
    assert artifact.path.exists()
    assert read_result(workspace, FINGERPRINT) is not None


def test_a_job_whose_launcher_has_all_goes_with_all_that_it_made(directory, workspace, artifact):
    make_job(workspace, "job-1")
    commit_checkpoint(workspace, 7)
    publish(workspace, artifact)
    found = survey(directory, {"job-1": ""}, later)

    stuck = delete(directory, {"job-1": ""}, clock=later)

    assert [one.kind for one in found] == ["result", "run", "work", "artifact"]
    assert not any(one.path.exists() for one in found)
    assert stuck == []
    assert survey(directory, {}) == []


def test_the_end_of_a_job_deletes_no_copies(directory, workspace, artifact):
    make_job(workspace, "job-1")
    publish(workspace, artifact)

    delete(directory, {"job-1": ""}, with_copies=False, clock=later)

    assert [one.kind for one in survey(directory, {})] == ["artifact"]


def test_another_job_that_goes_on_with_the_same_work_keeps_it(directory, workspace, artifact):
    make_job(workspace, "job-1")
    make_job(workspace, "job-2")
    commit_checkpoint(workspace, 7)
    publish(workspace, artifact)

    first = kinds_to_go(directory, {"job-1": ""})
    both = kinds_to_go(directory, {"job-1": "", "job-2": ""})

    assert first == ["run"]
    assert both == ["result", "run", "run", "work", "artifact"]


def test_a_rank_that_still_runs_keeps_the_job_whatever_a_launcher_says(directory, workspace):
    runner = make_job(workspace, "job-1").rank_directory(0) / "runner.json"
    write_json(runner, ProcessIdentity.current().to_json())

    (item,) = survey(directory, {"job-1": ""}, later)
    write_json(runner, ProcessIdentity.current().to_json() | {"start_time": 1})

    assert item.reason == "a running job uses it"
    assert kinds_to_go(directory, {"job-1": ""}) == ["run"]


def test_a_copy_that_a_live_lease_names_stays(directory, artifact):
    runner = subprocess.Popen(["sleep", "60"])
    name_in_lease(directory, artifact.directory, ProcessIdentity.of(runner.pid).to_json())
    lease.acquire(directory, OWNER)  # renewed by a launcher that came later

    while_it_runs = kinds_to_go(directory)
    runner.kill()
    runner.wait()

    assert while_it_runs == []
    assert kinds_to_go(directory) == ["artifact"]


def test_a_job_and_work_that_a_lease_names_stay_before_a_process_runs(directory, workspace):
    make_job(workspace, "job-1")
    work = workspace.work_directory("a" * 64)
    work.mkdir()
    lease.acquire(directory, OWNER, [str(workspace.runs / "job-1"), str(work)])

    assert kinds_to_go(directory, {"job-1": ""}) == []


def test_a_lease_of_another_host_that_shares_the_directory_keeps_what_it_names(directory, artifact):
    elsewhere = ProcessIdentity(1, 1, "another boot", "another-host").to_json()
    name_in_lease(directory, artifact.directory, elsewhere)

    assert kinds_to_go(directory) == []


def test_a_damaged_lease_keeps_everything_and_is_named(directory, artifact):
    (directory / "leases" / "host.json").write_text("{")

    with pytest.raises(WorkspaceError, match=r"leases/host\.json is damaged"):
        delete(directory, {}, clock=later)

    assert artifact.path.exists()


def test_an_artifact_that_was_just_published_stays_for_the_result_that_will_name_it(
    directory, workspace, artifact
):
    hour_ago = time.time() - 3700
    os.utime(artifact.directory, (hour_ago, hour_ago))
    before = [one.reason for one in survey(directory, {})]

    ArtifactStore(workspace).publish("dataset", artifact.path)
    (item,) = survey(directory, {})

    assert before == [""]
    assert "within the last hour" in item.reason


def test_code_that_a_launcher_has_just_asked_for_stays(directory):
    folder = directory / "code" / DIGEST
    folder.mkdir()
    hour_ago = time.time() - 3700
    os.utime(folder, (hour_ago, hour_ago))
    before = [one.reason for one in survey(directory, {})]

    assert check(directory, DIGEST)["has_code"]
    (item,) = survey(directory, {})

    assert before == [""]
    assert "within the last hour" in item.reason


def test_a_lease_that_names_a_copy_while_a_deletion_waits_is_seen(directory, artifact):
    with exclusive(directory / REMOVAL_LOCK):
        deletion = threading.Thread(target=lambda: delete(directory, {}, clock=later))
        deletion.start()
        lease.acquire(directory, OWNER, [str(artifact.directory)])
        deletion.join(0.2)
        assert deletion.is_alive()
    deletion.join()

    assert artifact.path.exists()


def test_a_deletion_that_died_in_the_middle_is_finished_by_the_next(directory, artifact):
    (directory / "deleting").mkdir()
    left = directory / "deleting" / "0123456789ab"
    artifact.directory.rename(left)

    delete(directory, {})

    assert not left.exists()


def test_nothing_behind_a_link_is_touched(directory, workspace, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "abcd").mkdir(parents=True)
    (workspace.artifacts / "dataset").symlink_to(elsewhere)
    (workspace.runs / "linked").symlink_to(elsewhere)
    inside = workspace.work / "0123"
    inside.mkdir()
    (inside / "link").symlink_to(elsewhere)

    delete(directory, {"linked": ""}, clock=later)

    assert not inside.exists()
    assert (workspace.runs / "linked").is_symlink()
    assert (elsewhere / "abcd").is_dir()


def test_nothing_is_missing_of_a_job_that_is_at_home_whole(workspace, home):
    there, here = make_job(workspace, "job-1"), make_job(home, "run")
    write_json(there.rank_directory(0) / "runner.json", {"pid": 1})
    (there.path / ".progress.json.x1y2.tmp").write_text("{")
    # A record's layout is its writer's.
    here.rank_exit_path(0).write_text(json.dumps(ENDING))

    assert missing(workspace, home, there, here) == ""


@pytest.mark.parametrize("name", [LOG, "metrics.jsonl", "ranks/0/exit.json"])
def test_a_file_that_is_missing_or_other_at_home_is_named(workspace, home, name):
    there, here = make_job(workspace, "job-1"), make_job(home, "run")

    (here.path / name).write_text("{}")
    other = missing(workspace, home, there, here)
    (here.path / name).unlink()
    absent = missing(workspace, home, there, here)

    assert other == absent == f"its {name} is not in the launcher's workspace"


def test_a_file_that_no_launcher_takes_is_missing_at_home(workspace, home):
    there, here = make_job(workspace, "job-1"), make_job(home, "run")
    (there.path / "core").write_bytes(b"dump")

    assert missing(workspace, home, there, here) == "its core is not in the launcher's workspace"


@pytest.mark.parametrize("step", [3, 7])
def test_a_checkpoint_that_only_the_host_has_is_missing_until_there_is_the_result(
    workspace, home, artifact, step
):
    there, here = make_job(workspace, "job-1"), make_job(home, "run")
    commit_checkpoint(workspace, 5)
    commit_checkpoint(workspace, step)
    commit_checkpoint(home, 5)

    without_result = missing(workspace, home, there, here)
    publish(home, ArtifactStore(home).publish("dataset", artifact.path))
    with_result = missing(workspace, home, there, here)

    assert without_result == f"its checkpoint {step} is not in the launcher's workspace"
    assert with_result == ""


def test_checkpoints_that_are_at_home_too_are_not_missing(workspace, home):
    there, here = make_job(workspace, "job-1"), make_job(home, "run")
    commit_checkpoint(workspace, 5)
    commit_checkpoint(home, 5)
    commit_checkpoint(home, 7)

    assert missing(workspace, home, there, here) == ""


def test_a_result_that_only_the_host_has_is_missing_at_home(workspace, home, artifact):
    there, here = make_job(workspace, "job-1"), make_job(home, "run")
    publish(workspace, artifact)

    assert missing(workspace, home, there, here) == "its result is not in the launcher's workspace"


def test_a_size_counts_each_byte_once_however_many_names_it_has(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "two").mkdir()
    os.link(tmp_path / "one" / "file", tmp_path / "two" / "file")

    assert (num_bytes(tmp_path / "one"), num_bytes(tmp_path)) == (500, 1000)
