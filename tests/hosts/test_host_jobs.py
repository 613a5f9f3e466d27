"""How jobs on hosts begin and end, over real SSH."""

import json
import os
import signal
from pathlib import Path

import pytest
from blake3 import blake3
from job_processes import phase_of, processes_of, worker_of
from tiny_stages.calls import wait_until

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def on_host(job, host):
    """A job's attempt as a host without the launcher's disk sees it."""
    run = host.directory / "workspace/runs" / f"{job.attempt.read_call()['run']}-{job.job_id}"
    return AttemptDirectory(run / "stages/act/attempts" / job.attempt.path.name)


def runs_on(job, hosts):
    """The host that a job of one host runs on."""
    labels = wait_until(lambda: job.record()["hosts"])
    return next(host for host in hosts.hosts if host.address == labels[0])


def test_a_shared_workspace_is_found_out_and_nothing_is_copied(submit, hosts, shared_workspace):
    job = submit("write", into=shared_workspace)

    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    assert job.record()["is_shared"]
    assert job.result()["outputs"].keys() == {"dataset"}
    assert not on_host(job, hosts.hosts[0]).path.exists()


def test_inputs_go_to_the_host_and_what_is_there_goes_only_once(submit, hosts, workspace, tmp_path):
    store = ArtifactStore(Workspace.open(workspace))
    source = tmp_path / "text.txt"
    source.write_text("some input")
    artifact = store.publish("dataset", source)
    noted = hosts.shared / "noted"
    noted.mkdir(exist_ok=True)

    job = submit("note_inputs", inputs=[artifact], config={"folder": str(noted)})
    assert job.wait_seconds(400), job.status()
    arrived = next(hosts.hosts[0].directory.glob(f"workspace/artifacts/*/{artifact.id[:16]}"))
    before = (arrived / "manifest.json").stat().st_ino
    again = submit(
        "note_inputs", inputs=[artifact], number=2, config={"folder": str(noted), "text": "again"}
    )
    assert again.wait_seconds(400), again.status()

    assert (job.state, again.state) == ("COMPLETED", "COMPLETED")
    assert json.loads((noted / "inputs.json").read_text()) == {
        "id": artifact.id,
        "files": ["text.txt"],
    }
    assert (arrived / "manifest.json").stat().st_ino == before
    assert list(hosts.hosts[0].directory.glob("incoming/*")) == []


def test_copies_that_broke_off_go_on_where_they_broke(submit, hosts, workspace, tmp_path):
    store = ArtifactStore(Workspace.open(workspace))
    source = tmp_path / "big"
    source.write_bytes(os.urandom(20 << 20))
    artifact = store.publish("dataset", source)
    (entry,) = artifact.manifest["files"]
    arrived = hosts.hosts[0].directory / "incoming" / entry["blake3"]
    arrived.parent.mkdir(parents=True, exist_ok=True)
    arrived.write_bytes(source.read_bytes()[: 9 << 20])
    text = "y" * 1000
    back = Workspace(workspace).cache / "incoming" / blake3(text.encode()).hexdigest()
    back.parent.mkdir(parents=True)
    back.write_bytes(b"y" * 300)

    job = submit("write", inputs=[artifact], config={"text": text})
    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    there = ArtifactStore(Workspace(hosts.hosts[0].directory / "workspace"))
    assert there.verify(artifact.id) == []
    assert store.verify(job.result()["outputs"]["dataset"]) == []
    assert not back.exists()


def test_a_job_that_no_hosts_can_ever_hold_is_refused_at_once(submit):
    with pytest.raises(DoesNotFit, match="asks for 3 hosts, and the profile's largest group"):
        submit("write", resources=JobResources(num_hosts=3))
    with pytest.raises(DoesNotFit, match="with 2 GPUs"):
        submit("write", number=2, resources=JobResources(gpus_per_host=2))


def test_a_second_job_waits_for_free_hosts_and_is_told_who_has_them(submit, hosts):
    folder = hosts.shared / "waiting"
    folder.mkdir()
    both = JobResources(num_hosts=2)
    first = submit("save_when_stopped", config={"folder": str(folder)})
    wait_until(lambda: phase_of(first.attempt) == "training")

    second = submit("write", run="second-run", resources=both, num_cpu_devices=1)
    waiting = wait_until(lambda: (s := second.status()).message.startswith("waits") and s)
    first.cancel()
    assert second.wait_seconds(400), second.status()

    assert waiting.state == "pending"
    assert "used by run tiny-abcd (stage act)" in waiting.message
    assert second.state == "COMPLETED", second.status()


def test_a_job_that_waits_for_hosts_can_be_cancelled(submit, hosts):
    gone = hosts.profile()["addresses"][0] | {"address": "192.0.2.1"}
    job = submit("write", settings={"addresses": [gone]})
    wait_until(lambda: "192.0.2.1 cannot be reached" in job.status().message)

    job.cancel()

    assert (job.state, job.status().message) == ("CANCELLED", "it was cancelled before it ran.")


def test_two_jobs_of_one_host_each_run_side_by_side(submit, hosts):
    folder = hosts.shared / "beside"
    folder.mkdir()
    jobs = [
        submit("wait_for_go", run=f"run-{name}", config={"folder": str(folder), "text": name})
        for name in ("one", "two")
    ]
    wait_until(lambda: all(phase_of(job.attempt) == "waiting" for job in jobs))

    (folder / "go").touch()

    assert all(job.wait_seconds(400) for job in jobs)
    assert {job.record()["hosts"][0] for job in jobs} == {host.address for host in hosts.hosts}


def test_a_dead_supervisor_is_told_and_its_worker_dies_with_it(submit, hosts):
    job = submit("hang")
    wait_until(lambda: phase_of(job.attempt) == "hanging")
    attempt = on_host(job, hosts.hosts[0])
    (supervisor,) = processes_of(attempt, "redco_flow.launch.hosts.ranks")

    os.kill(supervisor, signal.SIGKILL)
    assert job.wait_seconds(400), job.status()

    assert job.state == "NODE_FAILURE"
    assert "its supervisor was killed" in job.status().message
    assert processes_of(attempt) == []


def test_code_that_was_changed_on_the_host_is_refused_before_anything_runs(submit, hosts):
    """Fault 34: the job is refused before anything runs."""
    assert submit("write").wait_seconds(400)
    host = hosts.hosts[0]
    changed = list(host.directory.glob("code/*/*/redco_flow/worker.py"))
    before = changed[0].read_bytes()
    for path in changed:
        path.write_bytes(before + b"# changed\n")
    one_host = hosts.profile()["addresses"][:1]

    try:
        job = submit("hang", run="other-run", settings={"addresses": one_host})
        job.wait()
    finally:
        for path in changed:
            path.write_bytes(before)

    assert job.state == "FAILED"
    assert "is not what was shipped" in job.status().message
    assert "redco_flow/worker.py" in job.status().message
    assert not on_host(job, host).path.exists()


def test_the_ranks_import_the_code_that_was_shipped(submit, hosts):
    job = submit("hang")
    wait_until(lambda: phase_of(job.attempt) == "hanging")

    worker = worker_of(on_host(job, hosts.hosts[0]))
    environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")

    job.cancel()
    (search,) = [one for one in environment if one.startswith(b"PYTHONPATH=")]
    assert search.startswith(f"PYTHONPATH={hosts.hosts[0].directory}/code/".encode())
