"""What goes from a host and what stays: by marks, leases and results, on a real file system."""

import os
import subprocess
import threading
import time

import pytest
from tiny_stages.calls import make_call

from redco_flow.errors import WorkspaceError
from redco_flow.launch.call import write_call
from redco_flow.launch.hosts import copies as job_copies
from redco_flow.launch.hosts import lease as host_lease
from redco_flow.launch.hosts.bootstrap import check
from redco_flow.launch.hosts.cleaning import SECONDS_PER_DAY, clean, look, num_bytes
from redco_flow.launch.hosts.copies import Copies
from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.results import StageResult, publish_result, read_result
from redco_flow.tracking.workspace import Workspace

DIGEST = "c" * 64
FINGERPRINT = "f" * 64
OWNER = {"attempt": "job-1", "run": "tiny", "stage": "act", "launcher": "me@laptop"}


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
def copies(directory):
    return Copies(directory)


@pytest.fixture
def artifact(workspace, tmp_path):
    """An artifact that was made on the host."""
    source = tmp_path / "source"
    source.write_text("made here")
    return ArtifactStore(workspace).publish("dataset", source)


@pytest.fixture
def job(directory, workspace, artifact):
    """A job that has ended on the host with a result, of which nobody has taken anything."""
    return make_job(workspace, "job-1", artifact)


def make_job(workspace, name, artifact):
    attempt = AttemptDirectory(workspace.runs / name / "stages" / "act" / "attempts" / "1")
    attempt.path.mkdir(parents=True)
    call = make_call(workspace.root, fingerprint=FINGERPRINT)
    write_call(attempt, call)
    checkpoint = workspace.work_directory(FINGERPRINT) / "checkpoints" / "7"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "params").write_bytes(b"x" * 1000)
    outputs = {"dataset": artifact.id}
    publish_result(workspace, StageResult(FINGERPRINT, "tiny", "act", "tiny", {}, outputs))
    return attempt


def later(days):
    """A clock that is ahead."""
    return lambda: time.time() + days * SECONDS_PER_DAY


def fates(directory, days=0.0):
    return {one.path: one.fate for one in look(directory, 14, later(days))}


def test_what_a_job_made_stays_for_ever_until_its_launcher_has_it(directory, job, artifact):
    assert clean(directory, 14, later(1000)) == []

    assert set(fates(directory, 1000).values()) == {"only copy"}
    assert artifact.path.exists()


def test_what_its_launcher_has_goes_once_it_is_old(directory, workspace, job, artifact):
    job_copies.settle(directory, OWNER, job)

    assert clean(directory, 14, later(13)) == []
    removed = clean(directory, 14, later(15))

    assert [one.kind for one in removed] == ["result", "run", "work", "artifact"]
    assert read_result(workspace, FINGERPRINT) is None
    assert not any(one.path.exists() for one in removed)
    assert look(directory, 14) == []


def test_another_jobs_use_of_the_same_work_keeps_it(directory, workspace, job, artifact):
    other = make_job(workspace, "job-2", artifact)

    job_copies.settle(directory, OWNER, job)
    first = clean(directory, 14, later(15))
    job_copies.settle(directory, OWNER, other)
    second = clean(directory, 14, later(15))

    assert [one.kind for one in first] == ["run"]
    assert [one.kind for one in second] == ["result", "run", "work", "artifact"]


def test_a_job_that_begins_anew_makes_its_work_the_only_copy_again(directory, workspace, job):
    job_copies.settle(directory, OWNER, job)

    job_copies.take_back(directory, workspace, FINGERPRINT)

    kinds = [one.kind for one in clean(directory, 14, later(15))]
    assert kinds == ["run"]
    assert workspace.work_directory(FINGERPRINT).exists()


def test_what_comes_beside_an_unfetched_checkpoint_does_not_make_it_a_copy(
    directory, workspace, copies, job
):
    commit = {"step": 3, "files": []}
    brought = FileSet.of_checkpoint(FINGERPRINT[:16], commit)

    job_copies.expect(copies, workspace, [brought])

    assert fates(directory, 1000)[workspace.work_directory(FINGERPRINT)] == "only copy"


def test_an_input_counts_from_its_last_use(directory, workspace, copies, artifact):
    brought = FileSet.of_artifact(artifact.manifest)
    job_copies.expect(copies, workspace, [brought])
    ago = time.time() - 20 * SECONDS_PER_DAY
    os.utime(artifact.directory, (ago, ago))

    assert fates(directory) == {artifact.directory: "recent"}
    assert fates(directory, 15) == {artifact.directory: "old"}


def test_publishing_what_is_there_already_is_a_use_of_it(directory, workspace, copies, artifact):
    copies.mark([artifact.directory])
    ago = time.time() - 20 * SECONDS_PER_DAY
    os.utime(artifact.directory, (ago, ago))
    os.utime(directory / "copies" / artifact.directory.relative_to(directory), (ago, ago))
    assert fates(directory) == {artifact.directory: "old"}

    ArtifactStore(workspace).publish("dataset", artifact.path)

    assert fates(directory) == {artifact.directory: "recent"}


def test_what_a_living_job_uses_stays_however_old_it_is(directory, copies, artifact):
    copies.mark([artifact.directory])
    runner = subprocess.Popen(["sleep", "60"])
    identity = ProcessIdentity.of(runner.pid).to_json()
    host_lease.claim(directory, OWNER)
    host_lease.hand_to_runners(directory, OWNER, [identity], [str(artifact.directory)])
    host_lease.claim(directory, OWNER)  # renewed by a launcher that came later

    while_it_runs = clean(directory, 0, later(1000))
    runner.kill()
    runner.wait()
    afterwards = clean(directory, 0, later(1000))

    assert while_it_runs == []
    assert [one.path for one in afterwards] == [artifact.directory]


def test_a_lease_of_another_host_that_shares_the_directory_keeps_what_it_names(
    directory, copies, artifact
):
    copies.mark([artifact.directory])
    identity = ProcessIdentity(1, 1, "another boot", "another-host").to_json()
    host_lease.hand_to_runners(directory, OWNER, [identity], [str(artifact.directory)])

    assert clean(directory, 0, later(1000)) == []


def test_a_damaged_lease_keeps_everything_and_is_named(directory, copies, artifact):
    copies.mark([artifact.directory])
    (directory / "leases" / "host.json").write_text("{")

    with pytest.raises(WorkspaceError, match=r"leases/host\.json is damaged"):
        clean(directory, 14, later(1000))

    assert artifact.path.exists()


def test_a_use_that_is_noted_while_a_clean_up_waits_is_seen(directory, copies, artifact):
    copies.mark([artifact.directory])
    removed = []
    with copies.locked():
        cleaner = threading.Thread(target=lambda: removed.extend(clean(directory, 14, later(15))))
        cleaner.start()
        ahead = later(15)()
        os.utime(directory / "copies" / artifact.directory.relative_to(directory), (ahead, ahead))
        cleaner.join(0.2)
        assert cleaner.is_alive()
    cleaner.join()

    assert removed == []


def test_code_is_used_whenever_somebody_asks_for_it(directory):
    folder = directory / "code" / DIGEST
    folder.mkdir()
    ago = time.time() - 20 * SECONDS_PER_DAY
    os.utime(folder, (ago, ago))
    assert fates(directory) == {folder: "old"}

    assert check(directory, DIGEST)["has_code"]

    assert fates(directory) == {folder: "recent"}


def test_a_clean_up_that_died_in_the_middle_is_finished_by_the_next(directory, copies, artifact):
    copies.mark([artifact.directory])
    left = artifact.directory.with_name(".removing-0123456789ab")
    artifact.directory.rename(left)

    clean(directory, 14)

    assert not left.exists()


def test_nothing_behind_a_link_is_touched(directory, workspace, copies, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "abcd").mkdir(parents=True)
    (workspace.artifacts / "dataset").symlink_to(elsewhere)
    (workspace.runs / "linked").symlink_to(elsewhere)
    inside = workspace.work / "0123"
    inside.mkdir()
    (inside / "link").symlink_to(elsewhere)
    copies.mark([workspace.artifacts / "dataset" / "abcd", workspace.runs / "linked", inside])

    removed = clean(directory, 14, later(1000))

    assert [one.path for one in removed] == [inside]
    assert (elsewhere / "abcd").is_dir()


def test_a_copy_that_broke_off_goes_when_nobody_has_gone_on_with_it(directory):
    arrival = directory / "incoming" / DIGEST
    arrival.write_text("half")

    assert clean(directory, 14, later(13)) == []
    assert [one.kind for one in clean(directory, 14, later(15))] == ["unfinished"]


def test_a_size_counts_each_byte_once_however_many_names_it_has(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "two").mkdir()
    os.link(tmp_path / "one" / "file", tmp_path / "two" / "file")

    assert (num_bytes(tmp_path / "one"), num_bytes(tmp_path)) == (500, 1000)
