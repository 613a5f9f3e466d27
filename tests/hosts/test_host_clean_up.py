"""What real hosts remove, by themselves beside a job and when asked, and what they never do."""

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

SECONDS_PER_DAY = 86_400


@pytest.fixture
def folder(hosts, request):
    """A folder that everybody sees."""
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
def clean(hosts, host, settings, workspace, tmp_path, capsys):
    """Run the verb as a person does; its text, or its JSON's first host."""
    path = tmp_path / "one-host.yaml"
    profile = {"executor": "hosts", "workspace": str(workspace)}
    path.write_text(yaml.safe_dump({**profile, "hosts": hosts.profile(**settings)}))

    def clean(*words):
        assert run_command(["clean", "-p", str(path), *words]) == 0
        said = capsys.readouterr().out
        return json.loads(said)[0] if "--json" in words else said

    return clean


def age(host, days):
    """Make everything on a host look as if it had last been used so long ago."""
    ago = time.time() - days * SECONDS_PER_DAY
    for place in ("copies", "code", "incoming", "workspace"):
        for path in (host.directory / place).rglob("*"):
            os.utime(path, (ago, ago), follow_symlinks=False)


def things_of(host, job):
    """A job's run and working directory on a host."""
    call = job.attempt.read_call()
    root = Workspace(host.directory / "workspace")
    run = root.runs / f"{call['run']}-{job.job_id}"
    return [run, root.work_directory(call["fingerprint"])]


def test_what_is_old_goes_beside_the_next_job_and_the_result_stays_at_home(
    submit, host, settings, workspace
):
    first = submit("write", config={"text": "old"}, settings=settings)
    assert first.wait_seconds(60), first.status()
    old = things_of(host, first)
    assert all(path.exists() for path in old)

    age(host, 15)
    second = submit("write", number=2, config={"text": "new"}, settings=settings)
    assert second.wait_seconds(60), second.status()
    wait_until(lambda: not any(path.exists() for path in old), 20)

    assert (first.state, second.state) == ("COMPLETED", "COMPLETED")
    assert all(path.exists() for path in things_of(host, second))
    store = ArtifactStore(Workspace(workspace))
    assert store.verify(first.result()["outputs"]["dataset"]) == []


def test_nothing_goes_where_the_profile_keeps_all(submit, host, settings):
    first = submit("write", config={"text": "kept"}, settings=settings)
    assert first.wait_seconds(60), first.status()
    age(host, 1000)

    keeps_all = settings | {"keep_days": 0}
    second = submit("write", number=2, config={"text": "new"}, settings=keeps_all)
    assert second.wait_seconds(60), second.status()

    assert all(path.exists() for path in things_of(host, first))


def test_work_whose_launcher_is_dead_stays_however_old_until_it_is_fetched(
    lose_launcher, host, settings, workspace, folder, submit, clean
):
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(folder)})
    there = lose_launcher(attempt)
    (folder / "go").touch()
    wait_until(lambda: there.rank_exit_path(0).exists() and processes_of(there) == [], 30)

    age(host, 1000)
    other = submit("write", run="other-run", settings=settings)
    assert other.wait_seconds(60), other.status()
    said = clean("--older-than", "0")
    job = reattach(attempt.read_job())
    made = things_of(host, job)
    kept = [path.exists() for path in made]
    assert job.wait_seconds(60), job.status()

    assert kept == [True, True]
    assert "nowhere else" in said
    assert str(made[1]) in said
    assert job.state == "COMPLETED", job.status()
    assert job.result()["outputs"].keys() == {"dataset"}
    clean("--older-than", "0")
    assert not any(path.exists() for path in made)


def test_what_a_launcher_has_given_up_is_brought_home_and_goes_once_the_stage_has_its_result(
    lose_launcher, hosts, host, workspace, folder, submit, clean
):
    call = {"config": {"folder": str(folder)}}
    attempt = make_attempt(workspace, "wait_for_go", **call)
    there = lose_launcher(attempt)
    (folder / "go").touch()
    wait_until(lambda: there.rank_exit_path(0).exists() and processes_of(there) == [], 30)
    message = "the host has not answered for too long"
    given_up = {"exit_code": None, "cause": "node_failure", "message": message}
    write_json(attempt.exit_path, given_up)
    run, work = things_of(host, reattach(attempt.read_job()))
    log, ending = there.log_path(0).read_bytes(), there.rank_exit_path(0).read_bytes()

    clean("--older-than", "0", "--dry-run")
    assert not attempt.rank_exit_path(0).exists()
    clean("--older-than", "0")
    assert [run.exists(), work.exists()] == [True, True]
    elsewhere = {"addresses": hosts.profile()["addresses"][1:2]}
    again = submit("wait_for_go", number=2, settings=elsewhere, **call)
    assert again.wait_seconds(60), again.status()
    clean("--older-than", "0")

    assert again.state == "COMPLETED", again.status()
    assert [run.exists(), work.exists()] == [False, False]
    assert attempt.log_path().read_bytes() == log
    assert attempt.rank_exit_path(0).read_bytes() == ending
    assert attempt.read_exit().cause == "node_failure"


def test_what_a_running_job_reads_stays_however_old_it_is(
    submit, host, settings, workspace, folder, clean, tmp_path
):
    source = tmp_path / "input"
    source.write_text("an input")
    artifact = ArtifactStore(Workspace.open(workspace)).publish("dataset", source)
    job = submit(
        "wait_for_go", inputs=[artifact], config={"folder": str(folder)}, settings=settings
    )
    wait_until(lambda: phase_of(job.attempt) == "waiting")

    age(host, 1000)
    found = {one["path"]: one for one in clean("--older-than", "0", "--json")["leftovers"]}
    brought = host.directory / "workspace/artifacts/dataset" / artifact.id[:16]
    assert found[str(brought)]["fate"] == "in use"
    assert brought.is_dir()
    (folder / "go").touch()
    assert job.wait_seconds(60), job.status()

    assert job.state == "COMPLETED", job.status()


def test_a_dry_run_lists_sizes_and_ages_and_removes_nothing(submit, host, settings, clean):
    job = submit("write", config={"text": "x" * 5000}, settings=settings)
    assert job.wait_seconds(60), job.status()
    age(host, 20)

    said = clean("--dry-run")
    found = {one["path"]: one for one in clean("--dry-run", "--json")["leftovers"]}

    run, work = things_of(host, job)
    assert run.exists()
    assert work.exists()
    assert found[str(work)]["fate"] == "old"
    assert 5000 <= found[str(work)]["bytes"] < 10_000
    assert found[str(work)]["age_days"] == pytest.approx(20, abs=0.1)
    assert not found[str(work)]["is_removed"]
    assert "would be removed" in said
    assert f"20.0 days  {work}" in said


def test_a_host_that_does_not_answer_is_told_and_the_others_are_cleaned(
    submit, hosts, host, workspace, tmp_path, capsys
):
    job = submit("write", settings={"addresses": hosts.profile()["addresses"][:1]})
    assert job.wait_seconds(60), job.status()
    gone = hosts.profile()["addresses"][0] | {"port": 9}
    section = hosts.profile(addresses=[gone, hosts.profile()["addresses"][0]])
    path = tmp_path / "two.yaml"
    profile = {"executor": "hosts", "workspace": str(workspace), "hosts": section}
    path.write_text(yaml.safe_dump(profile))

    code = run_command(["clean", "-p", str(path), "--older-than", "0"])

    assert code == 4
    assert f"{host.address}:9: " in capsys.readouterr().out
    assert not any(path.exists() for path in things_of(host, job))
