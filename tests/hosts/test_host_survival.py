"""What may break around a job on hosts: the launcher, the link, a host, a key, a lease."""

import json
import os
import signal
import subprocess

import pytest
from job_processes import phase_of, processes_of, worker_of
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import reattach
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


TWO_HOSTS = JobResources(num_hosts=2)


@pytest.fixture
def folder(hosts, request):
    """A folder that everybody sees."""
    folder = hosts.shared / f"for-{request.node.name.replace('[', '-').strip(']')}"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("moment", ["at once", "once hosts are chosen", "while it runs"])
def test_a_launcher_that_is_killed_is_replaced_and_nothing_starts_twice(
    launch, workspace, hosts, folder, moment
):
    """Faults 12 and 17: the job is found by its name; nothing is submitted twice; `redco-flow
    resume` finds the running job again; the flow run that died is marked as crashed.
    """
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(folder)})
    launcher = launch(attempt)
    wait_until(attempt.job_path.exists)
    if moment == "once hosts are chosen":
        wait_until(lambda: attempt.read_job()["hosts"])
    if moment == "while it runs":
        wait_until(lambda: phase_of(attempt) == "waiting")

    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    (folder / "go").touch()
    job = reattach(attempt.read_job())
    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    assert (folder / "starts").read_text() == "x"
    assert job.result()["outputs"].keys() == {"dataset"}
    assert "stage 'act' of run" in attempt.log_path(0).read_text()


def test_a_job_that_ends_while_no_launcher_follows_is_taken_up_with_its_result(
    lose_launcher, workspace, folder
):
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(folder)})
    there = lose_launcher(attempt)

    (folder / "go").touch()
    wait_until(lambda: there.rank_exit_path(0).exists())
    wait_until(lambda: processes_of(there) == [])
    job = reattach(attempt.read_job())

    assert job.wait_seconds(400), job.status()
    assert job.state == "COMPLETED", job.status()


def test_a_cancel_reaches_a_job_whose_launcher_is_gone_once_its_host_answers_again(
    launch, workspace, hosts, folder
):
    attempt = make_attempt(workspace, "save_when_stopped", config={"folder": str(folder)})
    launcher = launch(attempt)
    wait_until(lambda: phase_of(attempt) == "training")
    launcher.kill()
    launcher.wait()
    host = hosts.hosts[0]

    hosts.cut(host)
    try:
        job = reattach(attempt.read_job())
        job.cancel(check=False)
        wait_until(lambda: job.done() or "no word since" in job.status().message)
        assert not job.done()
    finally:
        hosts.mend(host)
    assert job.wait_seconds(400), job.status()

    assert job.state == "CANCELLED"
    assert (folder / "saved").exists()


def test_a_host_that_was_lost_while_no_launcher_followed_counts_as_lost(
    lose_launcher, workspace, hosts, folder
):
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(folder)})
    lose_launcher(attempt)
    record = attempt.read_job()
    record["settings"]["lost_after_minutes"] = 0.05
    write_json(attempt.job_path, record)
    host = hosts.hosts[0]

    hosts.cut(host)
    try:
        job = reattach(record)
        assert job.wait_seconds(400), job.status()
    finally:
        hosts.mend(host)
        (folder / "go").touch()

    assert job.state == "NODE_FAILURE", job.status()
    assert "lost_after_minutes" in job.status().message


def test_a_group_ends_with_its_first_dead_rank_while_no_launcher_follows(launch, workspace, hosts):
    """Fault 2 without a launcher: the ranks miss each other's heartbeats, which takes longer."""
    two_hosts = JobResources(num_hosts=2)
    attempt = make_attempt(workspace, "hang", resources=two_hosts, num_cpu_devices=1)
    launcher = launch(attempt)
    ranks = [AttemptDirectory(attempt.path, rank) for rank in range(2)]
    wait_until(lambda: all(phase_of(rank) == "hanging" for rank in ranks))
    launcher.kill()
    launcher.wait()
    run = f"tiny-abcd-{attempt.read_job()['job_id']}/stages/act/attempts/1"
    places = [AttemptDirectory(one.directory / "workspace/runs" / run) for one in hosts.hosts]

    os.kill(worker_of(places[1], rank=1), signal.SIGKILL)
    wait_until(lambda: not any(processes_of(place) for place in places))
    job = reattach(attempt.read_job())
    assert job.wait_seconds(400), job.status()

    assert job.state == "FAILED"
    assert f"rank 1 of 2 on {hosts.hosts[1].name}" in job.status().message


def test_a_link_that_is_cut_ends_nothing_and_is_told(submit, hosts, folder):
    """Fault 33: the job runs on there, and is found again."""
    job = submit("wait_for_go", config={"folder": str(folder)})
    wait_until(lambda: phase_of(job.attempt) == "waiting")
    host = hosts.hosts[0]

    hosts.cut(host)
    try:
        told = wait_until(lambda: "no word since" in job.status().message and job.status())
        (folder / "go").touch()
        assert told.state == "running"
    finally:
        hosts.mend(host)
    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    assert (folder / "starts").read_text() == "x"


def test_a_host_that_loses_power_is_told_when_it_is_back(submit, hosts, folder):
    job = submit("hang")
    wait_until(lambda: phase_of(job.attempt) == "hanging")
    host = hosts.hosts[0]

    hosts.kill_host(host)
    hosts.start_host(host)
    assert job.wait_seconds(400), job.status()

    assert job.state == "NODE_FAILURE", job.status()
    assert f"rank 0 on {host.address}" in job.status().message


def test_what_was_saved_and_logged_on_a_lost_host_is_fetched_by_the_next_attempt_there(
    submit, hosts, folder, workspace
):
    """Fault 33, longer than a launcher waits: the host saves, loses power, and comes back."""
    config = {"folder": str(folder)}
    job = submit("save_twice", config=config, settings={"lost_after_minutes": 0.3})
    wait_until(lambda: any(workspace.glob("work/*/checkpoints/1/commit.json")))
    wait_until(lambda: any(job.attempt.read_metrics()))
    host = hosts.hosts[0]
    run = host.directory / "workspace/runs" / f"tiny-abcd-{job.job_id}"

    hosts.cut(host)
    try:
        (folder / "again").touch()
        wait_until((folder / "saved-2").exists)
        assert job.wait_seconds(400), job.status()
        hosts.kill_host(host)
    finally:
        hosts.mend(host)
    hosts.start_host(host)
    assert not any(workspace.glob("work/*/checkpoints/2/commit.json"))
    assert [record["step"] for record in job.attempt.read_metrics()] == [1]
    assert run.is_dir()
    again = submit("save_twice", number=2, config=config)
    assert again.wait_seconds(400), again.status()

    assert job.state == "NODE_FAILURE", job.status()
    assert again.state == "COMPLETED", again.status()
    assert json.loads((folder / "restored.json").read_text())["step"] == 2
    assert [record["step"] for record in job.attempt.read_metrics()] == [1, 2]
    said = job.attempt.log_path().read_text()
    assert [said.count(f"saved step {step}\n") for step in (1, 2)] == [1, 1]
    work = Workspace(host.directory / "workspace").work_directory(
        job.attempt.read_call()["fingerprint"]
    )
    # Both attempts' folders go once the result is here.
    wait_until(lambda: not run.exists() and not work.exists())


def test_all_hosts_go_on_from_the_newest_checkpoint_whichever_of_them_has_it(
    launch, submit, hosts, folder, workspace
):
    """It was saved on a host that is not the first any more, while no launcher followed."""
    config = {"folder": str(folder)}
    launcher = launch(make_attempt(workspace, "save_twice_or_list", config=config))
    wait_until(lambda: any(workspace.glob("work/*/checkpoints/1/commit.json")))
    launcher.kill()
    launcher.wait()
    (folder / "again").touch()
    wait_until((folder / "saved-2").exists)
    hosts.kill_host(hosts.hosts[0])
    hosts.start_host(hosts.hosts[0])

    again = submit(
        "save_twice_or_list",
        number=2,
        config=config,
        resources=TWO_HOSTS,
        settings={"addresses": hosts.profile()["addresses"][::-1]},
    )
    assert again.wait_seconds(400), again.status()

    assert again.state == "COMPLETED", again.status()
    on_first, on_second = (
        json.loads((folder / f"checkpoints-of-{rank}.json").read_text()) for rank in range(2)
    )
    assert on_first == on_second == [1, 2]


def test_a_changed_host_key_is_refused_and_says_what_to_do(submit, hosts):
    """Fault 32: the connection is refused, with what to do; no new key is accepted by itself."""
    host = hosts.hosts[0]
    one_host = hosts.profile()["addresses"][:1]
    kept = (host.folder / "host_key").read_bytes(), (host.folder / "host_key.pub").read_bytes()
    known = hosts.known_hosts.read_text()
    hosts.kill_host(host)
    hosts.make_host_key(host)
    hosts.start_host(host)
    try:
        job = submit("write", settings={"addresses": one_host})
        job.wait()
    finally:
        hosts.kill_host(host)
        for name, content in zip(("host_key", "host_key.pub"), kept, strict=True):
            (host.folder / name).write_bytes(content)
        hosts.start_host(host)

    assert job.state == "FAILED"
    assert f"the host key of {host.address} has changed" in job.status().message
    assert f"ssh-keygen -R '{host.address}' -f {hosts.known_hosts}" in job.status().message
    assert hosts.known_hosts.read_text() == known


def test_an_unknown_host_key_is_refused_and_says_how_to_add_it(submit, hosts, tmp_path):
    empty = tmp_path / "known_hosts"

    job = submit("write", settings={"known_hosts": str(empty)})
    job.wait()

    assert job.state == "FAILED"
    assert f"ssh-keyscan {hosts.hosts[0].address} >> {empty}" in job.status().message
    assert not empty.exists()


def test_a_key_that_no_host_accepts_is_refused_without_asking_for_a_password(
    submit, hosts, tmp_path
):
    other = tmp_path / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    addresses = [one | {"key": str(other)} for one in hosts.profile()["addresses"]]

    job = submit("write", settings={"addresses": addresses})
    job.wait()

    assert job.state == "FAILED"
    assert "accepts none of our keys" in job.status().message
    assert "ssh-add" in job.status().message


def test_a_host_that_does_not_answer_is_passed_over(submit, hosts):
    gone = hosts.profile()["addresses"][0] | {"address": "192.0.2.1"}
    addresses = [gone, hosts.profile()["addresses"][1]]

    job = submit("write", settings={"addresses": addresses})

    assert job.wait_seconds(400), job.status()
    assert job.state == "COMPLETED", job.status()
    assert job.record()["hosts"] == [hosts.hosts[1].address]


def test_a_host_behind_another_is_reached_through_it(submit, hosts):
    first, second = hosts.profile()["addresses"]
    through = second | {"jump_host": f"root@{first['address']}"}

    job = submit("write", settings={"addresses": [through]})

    assert job.wait_seconds(400), job.status()
    assert job.state == "COMPLETED", job.status()
    assert job.attempt.read_exit().host == hosts.hosts[1].name


def test_an_interpreter_that_is_not_there_is_told_in_the_hosts_words(submit):
    job = submit("write", settings={"python": "/nowhere/python"})

    job.wait()

    assert job.state == "FAILED"
    assert "/nowhere/python" in job.status().message
