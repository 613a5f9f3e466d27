"""Real training on hosts that share no disk with the launcher: the same result as at home."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from job_processes import worker_of
from tiny_stages.calls import wait_until

from pipelines import Driven, losses, make_run, same_parameters
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_EPOCHS = 2
AT_HOME = {"num_cpu_devices": 4, "num_epochs": NUM_EPOCHS}


@pytest.fixture(autouse=True, scope="module")
def compile_cache(ssh_hosts):
    """Equal programs are compiled once for all tests of this file, wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(ssh_hosts.shared / "compiled"))
        yield


@pytest.fixture(scope="module")
def folder(ssh_hosts):
    """A folder that the hosts do not see; a new one each time that a worker comes to this file."""
    return Path(tempfile.mkdtemp(prefix="training-", dir=ssh_hosts.private))


@pytest.fixture(scope="module")
def on_hosts(ssh_hosts, on_hosts_environment):
    """A profile's keys."""
    return {
        "executor": "hosts",
        "hosts": ssh_hosts.profile(forward_environment=["JAX_COMPILATION_CACHE_DIR"]),
        "environment": on_hosts_environment,
    }


@pytest.fixture(scope="module")
def trained(folder, on_hosts):
    """Training over two hosts with one process each."""
    settings = {"num_cpu_devices": 2, "num_epochs": NUM_EPOCHS}
    driven = Driven(make_run(folder, num_hosts=2, **settings, **on_hosts))
    outcome = driven.end()
    assert outcome.state == "completed", "\n".join(driven.said)
    return driven


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The same training by one process here; four data shards in any case."""
    driven = Driven(make_run(folder, workspace="home", **AT_HOME))
    assert driven.end().state == "completed"
    return driven


@pytest.mark.covers("a pipeline", family="t5", recipe="text_to_text", mesh="data", executor="hosts")
def test_two_hosts_without_a_common_disk_train_as_one_process_does(trained, undisturbed):
    """Sums over data shards may be added in another order."""
    driven = undisturbed
    home, away = losses(driven.run), losses(trained.run)
    assert list(away) == list(home) == list(range(1, 4 * NUM_EPOCHS + 1))
    assert away == pytest.approx(home, rel=1e-5)
    there, here = trained.stage("train")["metrics"], driven.stage("train")["metrics"]
    assert there == pytest.approx(here, rel=1e-5)
    assert trained.stage("train")["fingerprint"] == driven.stage("train")["fingerprint"]


def test_nothing_runs_again_when_only_the_profile_changes(trained, folder):
    driven = Driven(make_run(folder, **AT_HOME))

    outcome = driven.end()

    assert outcome.message == "2 stages completed, 2 of them reused"


def test_a_training_whose_host_dies_with_its_disk_goes_on_to_the_same_result(
    ssh_hosts, folder, on_hosts, undisturbed
):
    """Fault 8 without a scheduler: all that the retry needs is in the launcher's workspace."""
    settings = {"retries": {"node_failure": 1}, **AT_HOME, **on_hosts}
    run = make_run(folder, workspace="dead-host", **settings)
    driven = Driven(run)
    host = hold_once_saved(ssh_hosts, run)
    at_home = folder / "dead-host" / "work"
    wait_until(lambda: any(at_home.glob("*/checkpoints/*/commit.json")))

    ssh_hosts.kill_host(host)
    shutil.rmtree(host.directory)
    ssh_hosts.start_host(host)
    outcome = driven.end()

    assert outcome.state == "completed", "\n".join(driven.said)
    first, second = run.attempts("train")
    assert first.read_exit().cause == "node_failure"
    assert min(one["step"] for one in second.read_metrics() if one["kind"] == "training") > 1
    assert same_parameters(driven, undisturbed)


def hold_once_saved(ssh_hosts, run):
    """Stop a training's process on its host at its first checkpoint; return the host.

    With warm compile caches its other steps would be over before the checkpoint is copied.
    """
    wait_until(lambda: run.attempts("train"))
    attempt = run.latest_attempt("train")
    wait_until(lambda: attempt.job_path.exists() and attempt.read_job()["hosts"])
    job, call = attempt.read_job(), attempt.read_call()
    host = next(host for host in ssh_hosts.hosts if host.address in job["hosts"])
    there = Workspace(host.directory / "workspace")
    folder = f"{call['run']}-{job['job_id']}/stages/train/attempts/1"
    worker = wait_until(lambda: worker_of(AttemptDirectory(there.runs / folder)))
    saved = there.work_directory(call["fingerprint"])
    wait_until(lambda: any(saved.glob("checkpoints/*/commit.json")))
    os.kill(worker, signal.SIGSTOP)
    return host
