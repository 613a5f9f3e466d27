"""A disk that fills up under a training on a real host."""

import pytest
from job_processes import held
from small_disk import committed_steps, fill, small_disk, trained_steps
from tiny_stages.calls import wait_until

from pipelines import Driven, make_run
from redco_flow.tracking.attempt import AttemptDirectory

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HOST_DISK_BYTES = 96 << 20


@pytest.fixture
def host(hosts):
    """A host whose working directory is on a small disk."""
    host = hosts.hosts[0]
    hosts.kill_host(host)  # what is mounted later, it does not see
    with small_disk(host.directory, HOST_DISK_BYTES):
        hosts.start_host(host)
        yield host
        hosts.kill_host(host)
    hosts.start_host(host)


def test_a_host_whose_disk_fills_up_is_told_and_goes_on_once_there_is_room(
    hosts, host, on_hosts_environment, monkeypatch, request
):
    """Fault 20: checkpoint, metrics, log and records of a job over SSH at once."""
    folder = hosts.private / request.node.name
    folder.mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(hosts.shared / "compiled"))
    one_host = hosts.profile(
        addresses=hosts.profile()["addresses"][:1],
        forward_environment=["JAX_COMPILATION_CACHE_DIR"],
    )
    on_host = {"executor": "hosts", "hosts": one_host, "environment": on_hosts_environment}
    run = make_run(folder, num_epochs=2, **on_host)
    ballast = host.directory / "another-users"

    driven = Driven(run)
    wait_until(lambda: committed_steps(host.directory / "workspace"))
    job_id = run.attempt("train", 1).read_job()["job_id"]
    there = host.directory / f"workspace/runs/{run.id}-{job_id}/stages/train/attempts/1"
    with held(AttemptDirectory(there)):
        wait_until(lambda: committed_steps(folder / "workspace"))
        fill(ballast)
    outcome = driven.end()
    message = run.attempt("train", 1).read_exit().message
    fetched = committed_steps(folder / "workspace")
    ballast.unlink()
    resumed = Driven(run)

    assert resumed.end().state == "completed", "\n".join(resumed.said)
    assert outcome.state == "failed"
    assert str(host.directory) in message
    assert "No space left on device" in message
    assert "Free space" in message
    assert fetched
    assert trained_steps(run.attempt("train", 2))[0] == max(fetched) + 1
