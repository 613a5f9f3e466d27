"""Jobs of several hosts without a common disk: all ranks run, or none, and all end together."""

import os
import signal

import pytest
from job_processes import phase_of, processes_of, worker_of
from tiny_stages.calls import wait_until

from redco_flow.launch.call import JobResources
from redco_flow.tracking.attempt import AttemptDirectory

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO_HOSTS = JobResources(num_hosts=2)


def attempts_on(job, hosts):
    """The job's attempt as each host sees it."""
    run = f"{job.attempt.read_call()['run']}-{job.job_id}/stages/act/attempts/1"
    return [AttemptDirectory(host.directory / "workspace/runs" / run) for host in hosts.hosts]


def started(job, hosts):
    """Wait until every rank is inside the stage; return their workers."""
    ranks = [AttemptDirectory(job.attempt.path, rank) for rank in range(2)]
    wait_until(lambda: all(phase_of(rank) == "hanging" for rank in ranks))
    return [worker_of(attempt, rank) for rank, attempt in enumerate(attempts_on(job, hosts))]


def all_processes(job, hosts, program=""):
    return [pid for one in attempts_on(job, hosts) for pid in processes_of(one, program)]


@pytest.mark.parametrize(("kind", "per_host"), [("private", 2), ("shared", 1)])
def test_every_rank_takes_part_and_rank_zero_alone_publishes(
    submit, hosts, workspace, shared_workspace, kind, per_host
):
    folder = hosts.shared / f"noted-{kind}"
    folder.mkdir()
    job = submit(
        "note_process",
        into=workspace if kind == "private" else shared_workspace,
        resources=JobResources(num_hosts=2, processes_per_host=per_host),
        config={"folder": str(folder)},
        num_cpu_devices=1,
    )

    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    noted = sorted(path.read_text() for path in folder.glob("*.noted"))
    ranks = range(2 * per_host)
    of_all = f"of {len(ranks)}, {len(ranks)} devices"
    assert noted == [f"{rank} {of_all}, {rank % per_host} on its host" for rank in ranks]
    # Where hosts have disks of their own, each saves all of a checkpoint.
    shares_disk = {path.read_text() for path in folder.glob("*.shares")}
    assert shares_disk == {str(kind == "shared")}
    assert job.result()["outputs"].keys() == {"dataset"}
    assert job.attempt.ranks_with_logs() == [*ranks]


def test_the_death_of_one_rank_ends_the_group_and_names_it(submit, hosts):
    """Fault 2: all ranks end, the rank that failed first is named, and the stage is retried."""
    job = submit("hang", resources=TWO_HOSTS, num_cpu_devices=1)
    workers = started(job, hosts)

    os.kill(workers[1], signal.SIGKILL)
    wait_until(lambda: all_processes(job, hosts, "redco_flow.worker") == [])
    assert job.wait_seconds(400)

    assert job.state == "FAILED"
    assert f"rank 1 of 2 on {hosts.hosts[1].name}" in job.status().message
    assert "SIGKILL" in job.status().message
    assert "rank1.log" in str(job.exception())


def test_ranks_whose_hosts_cannot_reach_each_other_give_up_at_the_configured_time(submit, hosts):
    """Engine case 19: before JAX starts, whose own timeout is an abort minutes later."""
    hosts.separate(*hosts.hosts)
    try:
        job = submit(
            "write",
            resources=TWO_HOSTS,
            num_cpu_devices=1,
            settings={"rendezvous_seconds": 5},
        )
        wait_until(lambda: "waiting for rank 1 of 2" in str(phase_of(job.attempt)))
        assert job.wait_seconds(400), job.status()
    finally:
        hosts.join(*hosts.hosts)

    assert job.state == "FAILED", job.status()
    assert "within 5 s" in job.status().message  # whichever of the two says it first
    assert "cannot reach rank 0 at port" in str(phase_of(AttemptDirectory(job.attempt.path, 1)))
    assert all_processes(job, hosts) == []


def test_a_host_that_dies_ends_the_group_and_is_named(submit, hosts):
    """Fault 8, a power cut: the other host's rank ends in seconds, and the host is named."""
    job = submit(
        "hang", resources=TWO_HOSTS, num_cpu_devices=1, settings={"lost_after_minutes": 0.5}
    )
    started(job, hosts)
    dead = hosts.hosts[1]

    hosts.kill_host(dead)
    try:
        told = wait_until(lambda: "no word since" in (s := job.status()).message and s.message)
        wait_until(lambda: all_processes(job, hosts) == [])
    finally:
        hosts.start_host(dead)
    # By the host's own word; by its silence, where that word comes late.
    assert job.wait_seconds(400), job.status()

    assert dead.address in told
    assert job.state == "NODE_FAILURE", job.status()
    assert f"rank 1 on {dead.address}" in job.status().message
