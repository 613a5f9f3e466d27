"""A disk that fills up under a job on a real host."""

import json

import pytest
from small_disk import committed_steps, fill, small_disk
from tiny_stages.calls import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HOST_DISK_BYTES = 96 << 20


@pytest.fixture
def host(hosts):
    """A host whose working directory is on a small disk."""
    host = hosts.hosts[0]
    hosts.kill_host(host)  # it does not see what is mounted later
    with small_disk(host.directory, HOST_DISK_BYTES):
        hosts.start_host(host)
        yield host
        hosts.kill_host(host)
    hosts.start_host(host)


def test_a_host_whose_disk_fills_up_is_named_and_the_stage_resumes_once_there_is_room(
    submit, hosts, host, folder, workspace
):
    """Fault 20: checkpoint, metrics, log and records of a job over SSH at once."""
    call = {"config": {"folder": str(folder)}}
    settings = {"addresses": hosts.profile()["addresses"][:1]}
    ballast = host.directory / "another-users"

    job = submit("save_twice", settings=settings, **call)
    wait_until(lambda: committed_steps(workspace))
    fill(ballast)
    (folder / "again").touch()
    assert job.wait_seconds(400), job.status()
    ballast.unlink()
    again = submit("save_twice", number=2, settings=settings, **call)
    assert again.wait_seconds(400), again.status()

    assert job.state == "FAILED", job.status()
    message = job.status().message
    assert str(host.directory) in message
    assert "No space left on device" in message
    assert "Free space" in message
    assert again.state == "COMPLETED", again.status()
    assert json.loads((folder / "restored.json").read_text())["step"] == 1
