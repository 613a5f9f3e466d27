"""What real hosts delete, at the end of a job and when asked, and what they never do."""

import json
import os
import time

import pytest
import yaml
from job_processes import phase_of, processes_of
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.cli.main import run_command
from redco_flow.launch.executor import reattach
from redco_flow.records import write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO_HOURS = 7200


@pytest.fixture
def folder(hosts, request):
    """A folder that every host sees."""
    folder = hosts.shared / f"for-{request.node.name}"
    folder.mkdir()
    return folder


@pytest.fixture
def host(hosts):
    """The only host of the profile."""
    return hosts.hosts[0]


@pytest.fixture
def settings(hosts):
    return {"addresses": hosts.profile()["addresses"][:1]}


@pytest.fixture
def clean(hosts, settings, workspace, tmp_path, capsys):
    """Run the verb as a person does; its text, or its JSON's items by path."""
    path = tmp_path / "one-host.yaml"
    profile = {"executor": "hosts", "workspace": str(workspace)}
    path.write_text(yaml.safe_dump({**profile, "hosts": hosts.profile(**settings)}))

    def clean(*words):
        assert run_command(["clean", "-p", str(path), *words]) == 0
        said = capsys.readouterr().out
        if "--json" not in words:
            return said
        return {one["path"]: one for one in json.loads(said)[0]["items"]}

    return clean


def put_two_hours_back(host):
    """Make everything on a host look as if it had last been used then."""
    ago = time.time() - TWO_HOURS
    for place in ("code", "incoming", "workspace"):
        for path in (host.directory / place).rglob("*"):
            os.utime(path, (ago, ago), follow_symlinks=False)


def things_of(host, job):
    """A job's run and working directory on a host."""
    call = job.attempt.read_call()
    root = Workspace(host.directory / "workspace")
    run = root.runs / f"{call['run']}-{job.job_id}"
    return [run, root.work_directory(call["fingerprint"])]


def existing(paths):
    return [path for path in paths if path.exists()]


def test_a_jobs_folder_goes_once_its_result_is_here_and_what_it_made_is_kept_for_the_next(
    submit, host, settings, workspace
):
    job = submit("write", config={"text": "made"}, settings=settings)
    assert job.wait_seconds(400), job.status()

    wait_until(lambda: not existing(things_of(host, job)))

    assert job.state == "COMPLETED"
    artifact = job.result()["outputs"]["dataset"]
    assert ArtifactStore(Workspace(workspace)).verify(artifact) == []
    assert ArtifactStore(Workspace(host.directory / "workspace")).verify(artifact) == []


def test_copies_that_no_job_uses_go_when_asked_and_the_code_in_use_stays(
    submit, host, settings, workspace, clean
):
    job = submit("write", config={"text": "x" * 5000}, settings=settings)
    assert job.wait_seconds(400), job.status()
    wait_until(lambda: not existing(things_of(host, job)))
    artifact = job.result()["outputs"]["dataset"]
    copy = host.directory / "workspace/artifacts/dataset" / artifact[:16]

    just_now = clean("--json")[str(copy)]
    put_two_hours_back(host)
    listed, said = clean("--dry-run", "--json")[str(copy)], clean("--dry-run")
    assert copy.exists()
    clean()

    assert "within the last hour" in just_now["reason"]
    assert listed["reason"] == ""
    assert 5000 <= listed["bytes"] < 10_000
    assert "would be deleted" in said
    assert str(copy) in said
    assert not copy.exists()
    assert len(list((host.directory / "code").iterdir())) == 1
    assert ArtifactStore(Workspace(workspace)).verify(artifact) == []


def test_work_whose_launcher_is_dead_stays_until_it_is_fetched(
    lose_launcher, host, settings, workspace, folder, submit, clean
):
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(folder)})
    there = lose_launcher(attempt)
    (folder / "go").touch()
    wait_until(lambda: there.rank_exit_path(0).exists() and processes_of(there) == [])

    put_two_hours_back(host)
    other = submit("write", run="other-run", settings=settings)
    assert other.wait_seconds(400), other.status()
    said = clean()
    job = reattach(attempt.read_job())
    made = things_of(host, job)
    kept = existing(made)
    assert job.wait_seconds(400), job.status()

    assert kept == made
    assert "its end is not in the launcher's workspace" in said
    assert str(made[0]) in said
    assert job.state == "COMPLETED", job.status()
    assert job.result()["outputs"].keys() == {"dataset"}
    wait_until(lambda: not existing(made))


def test_what_a_launcher_has_given_up_is_brought_home_and_goes_once_the_stage_has_its_result(
    lose_launcher, hosts, host, workspace, folder, submit, clean
):
    call = {"config": {"folder": str(folder)}}
    attempt = make_attempt(workspace, "wait_for_go", **call)
    there = lose_launcher(attempt)
    (folder / "go").touch()
    wait_until(lambda: there.rank_exit_path(0).exists() and processes_of(there) == [])
    (there.path / "tensorboard").mkdir()
    (there.path / "tensorboard/events").write_bytes(b"drawn")
    message = "the host has not answered for too long"
    write_json(attempt.exit_path, {"exit_code": None, "cause": "node_failure", "message": message})
    made = things_of(host, reattach(attempt.read_job()))
    log, ending = there.log_path(0).read_bytes(), there.rank_exit_path(0).read_bytes()

    clean("--dry-run")
    assert not attempt.rank_exit_path(0).exists()
    result_is_there = clean("--json")[str(made[0])]["reason"]
    assert existing(made) == made
    elsewhere = {"addresses": hosts.profile()["addresses"][1:2]}
    again = submit("wait_for_go", number=2, settings=elsewhere, **call)
    assert again.wait_seconds(400), again.status()
    clean()

    assert result_is_there == "its result is not in the launcher's workspace"
    assert again.state == "COMPLETED", again.status()
    assert existing(made) == []
    assert attempt.log_path().read_bytes() == log
    assert attempt.rank_exit_path(0).read_bytes() == ending
    assert (attempt.path / "tensorboard/events").read_bytes() == b"drawn"
    assert attempt.read_exit().cause == "node_failure"


def test_a_cancelled_job_goes_when_asked_once_all_its_checkpoints_are_here(
    submit, host, settings, workspace, folder, clean
):
    config = {"folder": str(folder)}
    job = submit("save_twice", config=config, settings=settings)
    wait_until(lambda: any(workspace.glob("work/*/checkpoints/1/commit.json")))
    job.cancel()
    made = things_of(host, job)
    assert existing(made) == made

    clean()

    assert job.state == "CANCELLED"
    assert existing(made) == []


def test_a_checkpoint_that_only_the_host_has_keeps_its_job(
    submit, host, settings, workspace, folder, clean
):
    job = submit("save_twice", config={"folder": str(folder)}, settings=settings)
    wait_until(lambda: any(workspace.glob("work/*/checkpoints/1/commit.json")))
    job.cancel()
    made = things_of(host, job)
    for commit in workspace.glob("work/*/checkpoints/*/commit.json"):
        commit.unlink()

    reason = clean("--json")[str(made[0])]["reason"]

    assert reason == "its checkpoint 1 is not in the launcher's workspace"
    assert existing(made) == made


def test_what_a_running_job_reads_stays(submit, host, settings, workspace, folder, clean, tmp_path):
    source = tmp_path / "input"
    source.write_text("an input")
    artifact = ArtifactStore(Workspace.open(workspace)).publish("dataset", source)
    job = submit(
        "wait_for_go", inputs=[artifact], config={"folder": str(folder)}, settings=settings
    )
    wait_until(lambda: phase_of(job.attempt) == "waiting")
    put_two_hours_back(host)
    brought = host.directory / "workspace/artifacts/dataset" / artifact.id[:16]

    found = clean("--json")
    kept = existing([brought, *things_of(host, job)])
    (folder / "go").touch()
    assert job.wait_seconds(400), job.status()

    assert found[str(brought)]["reason"] == "a running job uses it"
    assert kept == [brought, *things_of(host, job)]
    assert job.state == "COMPLETED", job.status()


def test_a_host_that_does_not_answer_is_told_and_the_others_are_cleaned(
    submit, hosts, host, settings, workspace, folder, tmp_path, capsys
):
    job = submit("save_when_stopped", config={"folder": str(folder)}, settings=settings)
    wait_until(lambda: phase_of(job.attempt) == "training")
    job.cancel()
    here = hosts.profile()["addresses"][0]
    section = hosts.profile(addresses=[here | {"port": 9}, here])
    path = tmp_path / "two.yaml"
    profile = {"executor": "hosts", "workspace": str(workspace), "hosts": section}
    path.write_text(yaml.safe_dump(profile))

    code = run_command(["clean", "-p", str(path)])

    assert code == 4
    assert f"{host.address}:9: " in capsys.readouterr().out
    assert existing(things_of(host, job)) == []
