"""Jobs of several processes on several hosts: all of them run, or none, and all end together."""

import os
import signal
import socket
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from job_processes import phase_of, processes_of, worker_of
from tiny_stages.calls import wait_until

from redco_flow.launch.call import JobResources
from redco_flow.records import read_json_if_present
from redco_flow.tracking.attempt import AttemptDirectory

# Run on each host in front of everything else, as a container would be.
ODD_HOST = 'if [ "$SLURM_PROCID" = 1 ]; then export JAX_ENABLE_X64=1; fi; exec "$@"'
LATE_HOST = 'if [ "$SLURM_PROCID" = 1 ]; then sleep 600; fi; exec "$@"'

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO_HOSTS = JobResources(num_hosts=2)


def started(job, num_ranks=2):
    """Wait until every rank is inside the stage."""
    ranks = [AttemptDirectory(job.attempt.path, rank) for rank in range(num_ranks)]
    wait_until(lambda: all(phase_of(rank) == "hanging" for rank in ranks))
    return [worker_of(job.attempt, rank) for rank in range(num_ranks)]


def test_every_rank_takes_part_and_rank_zero_alone_publishes(submit, tmp_path):
    resources = JobResources(num_hosts=2, processes_per_host=2)
    config = {"folder": str(tmp_path)}
    job = submit("note_process", resources=resources, config=config, num_cpu_devices=1)

    assert job.wait_seconds(400)

    assert job.state == "COMPLETED", job.status()
    noted = sorted(path.read_text() for path in tmp_path.glob("*.noted"))
    assert noted == [f"{rank} of 4, 4 devices, {rank % 2} on its host" for rank in range(4)]
    assert job.result()["outputs"].keys() == {"dataset"}
    assert AttemptDirectory(job.attempt.path, 3).read_result()["outputs"] == {}
    assert {path.name for path in job.attempt.logs.iterdir()} == {
        *("slurm.log", "rank0.log", "rank1.log", "rank2.log", "rank3.log")
    }


def test_the_death_of_one_rank_ends_the_group_and_names_it(submit):
    """Fault 2: all ranks end, the rank that failed first is named, and the stage is retried.

    Engine case 21: all ranks end with that rank's error, long before the stall timeout.
    """
    nodes = {f"fabric{last}": f"127.0.0.{last}" for last in (14, 13, 12, 11)}
    job = submit("hang", resources=TWO_HOSTS, settings={"fabrics": nodes})
    workers = started(job)

    variables = [Path(f"/proc/{worker}/environ").read_bytes().split(b"\0") for worker in workers]
    assert [b"SLURM_NODEID=1" in one for one in variables] == [True, False]  # in that order
    os.kill(workers[1], signal.SIGKILL)
    wait_until(lambda: processes_of(job.attempt, "redco_flow.worker") == [])
    assert job.wait_seconds(400)

    assert job.state == "FAILED"
    assert "rank 1 of 2" in job.status().message
    assert "SIGKILL" in job.status().message
    assert "rank1.log" in str(job.exception())


def test_a_rank_that_raises_ends_the_group_and_its_error_is_the_jobs(submit):
    job = submit("raise_on_rank_one", resources=TWO_HOSTS)

    assert job.wait_seconds(400)

    assert job.state == "FAILED"
    assert "rank 1 of 2" in job.status().message
    assert "RuntimeError: only rank 1 does this" in job.status().message


def test_a_rank_that_is_stopped_is_noticed_and_the_group_ends_with_its_stacks(submit):
    """Fault 7: it runs no code, so the others notice, by the missing heartbeat."""
    job = submit("hang", resources=TWO_HOSTS, stall_seconds=300)
    workers = started(job)

    os.kill(workers[1], signal.SIGSTOP)
    assert job.wait_seconds(400)

    assert job.state == "STALLED", job.status()
    assert "rank 1 of 2 no longer answered the others" in job.status().message
    assert "in hang" in job.attempt.log_path(1).read_text()
    wait_until(lambda: processes_of(job.attempt) == [])


def test_a_port_that_another_program_takes_after_the_meeting_is_a_clear_error(submit, tmp_path):
    """Engine case 24: another port is taken, or the error names it."""
    job = submit("count_starts", resources=TWO_HOSTS, config={"folder": str(tmp_path)})
    meeting = job.attempt.path / "ranks/meeting0.json"
    port = wait_until(lambda: read_json_if_present(meeting))["port"]

    with taken_as_soon_as_free(port):
        assert job.wait_seconds(400)

    assert job.state == "FAILED", job.status()
    assert f":{port} " in job.status().message
    assert "another program took the port" in job.status().message
    assert not (tmp_path / "starts").exists()
    wait_until(lambda: processes_of(job.attempt) == [])


@contextmanager
def taken_as_soon_as_free(port):
    """Listen at a port of this machine, as soon as it is free."""

    def take():
        with suppress(OSError):
            return socket.create_server(("", port))

    with wait_until(take):
        yield


def test_ranks_that_would_run_something_else_all_stop_before_the_stage(submit, tmp_path):
    """Engine case 18: the second host has another setting of JAX."""
    job = submit(
        "count_starts",
        resources=TWO_HOSTS,
        config={"folder": str(tmp_path)},
        settings={"container": ["/bin/sh", "-c", ODD_HOST, "odd-host"]},
    )

    assert job.wait_seconds(400)

    assert job.state == "FAILED"
    assert "environment.JAX_ENABLE_X64 is 'not set' on rank 0, '1' on rank 1" in (
        job.status().message
    )
    assert not (tmp_path / "starts").exists()


def test_a_rank_that_never_arrives_is_named_after_the_time_for_it(submit, tmp_path):
    """Engine case 20: the error names the rank."""
    job = submit(
        "count_starts",
        resources=TWO_HOSTS,
        config={"folder": str(tmp_path)},
        settings={
            "rendezvous_seconds": 5,
            "container": ["/bin/sh", "-c", LATE_HOST, "late-host"],
        },
    )

    assert job.wait_seconds(400)

    assert job.state == "FAILED"
    assert "rank 1 of 2 did not arrive within 5 s" in job.status().message
    assert not (tmp_path / "starts").exists()
