"""Real training on the test cluster: the same result as at home, and no step lost."""

import os
import signal

import pytest
from job_processes import held
from tiny_stages.calls import wait_until

from pipelines import Driven, losses, make_run
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache"),
]

ONE_PROCESS = {"executor": "slurm", "slurm": {"walltime_minutes": 10}}
GROUP = {"num_hosts": 2, "num_cpu_devices": 2, **ONE_PROCESS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def trained(cluster, folder):
    """Training over two hosts, in the queue from the start, that gets SIGTERM in mid-training.

    Every rank finds the dataset by itself that was not there when the job was submitted, and reads
    it from the node's own disk.
    """
    disk = folder / "node-disk"
    disk.mkdir()
    staging = {"directory": "$NODE_DISK"}
    variables = {"NODE_DISK": str(disk)}
    driven = Driven(make_run(folder, ahead=True, staging=staging, environment=variables, **GROUP))
    attempt = wait_for_step(driven.run, 2)
    job_id = attempt.read_job()["job_id"]
    with held(attempt, num_ranks=2) as workers:
        cluster.run("scancel", "--signal=TERM", job_id)
        wait_until(lambda: "asking the worker to stop" in attempt.log_path().read_text())
        # JAX looks for the signal once a second, in which all steps would be over. Rank 0 sees it
        # while it waits for rank 1.
        os.kill(workers[0], signal.SIGCONT)
        wait_until(lambda: "SIGTERM caught" in attempt.log_path().read_text())
    wait_until(lambda: cluster.jobs().get(job_id) == "PENDING")
    assert not attempt.exit_path.exists()
    # Not at once: a node refuses a start in the second in which it ended the one before.
    cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+3")
    outcome = driven.end()
    assert outcome.state == "completed", "\n".join(driven.said)
    return driven


@pytest.fixture(scope="module")
def home(folder):
    """The same training by one process here, and what it predicts; four data shards in any case."""
    driven = Driven(make_run(folder, workspace="home", num_cpu_devices=4, predict=True))
    assert driven.end().state == "completed", "\n".join(driven.said)
    return driven


@pytest.mark.covers("a pipeline", family="t5", recipe="text_to_text", mesh="data", executor="slurm")
def test_a_group_that_gets_sigterm_goes_on_where_it_stopped_and_trains_as_one_process_does(
    trained, home
):
    """Fault 5: all ranks save the same step; Slurm queues the job again by itself.

    Engine case 23: 51 rows in batches of 16, so the last ones do not fill both processes. Sums over
    data shards may be added in another order.
    """
    attempt = trained.run.attempt("train", 1)
    steps = [record["step"] for record in attempt.read_metrics() if record["kind"] == "training"]
    assert attempt.read_exit().restart == 1
    assert trained.stage("train")["attempt"] == 1
    assert steps == list(losses(home.run)) == list(range(1, 9))
    assert losses(trained.run) == pytest.approx(losses(home.run), rel=1e-5)
    there, here = trained.stage("train"), home.stage("train")
    assert there["metrics"] == pytest.approx(here["metrics"], rel=1e-5)
    assert there["fingerprint"] == here["fingerprint"]


def test_rank_0_logs_steps_evaluations_and_checkpoints_and_names_the_devices(trained, folder):
    attempt = trained.run.attempt("train", 1)
    log = attempt.log_path().read_text()

    for line in ("step 1/8 · loss", "step 8/8 · loss", "val/eval_loss", "step 8/8 · check"):
        assert line in log
    assert attempt.read_progress()["devices"] == "4 × cpu"
    other_log = attempt.log_path(1).read_text()
    assert "step 1/8" not in other_log
    assert "copied dataset" in log + other_log  # once for both, which are on one machine
    assert list((folder / "node-disk").iterdir()) == []


def test_two_processes_of_a_host_predict_what_one_process_does(slurm, home, folder):
    """11 validation rows in batches of 4, two rows to each process, the last batch not full."""
    settings = {"processes_per_host": 2, "walltime_minutes": 10}
    away = Driven(
        make_run(
            folder, workspace="home", predict=True, force=["predict"],
            executor="slurm", slurm=settings,
        )
    )  # fmt: skip
    outcome = away.end()

    assert outcome.state == "completed", "\n".join(away.said)
    attempt = away.run.latest_attempt("predict")
    assert attempt.ranks_with_logs() == [0, 1]
    assert away.stage("train")["reused"]
    assert not away.stage("predict")["reused"]
    assert predictions_of(away) == predictions_of(home)
    assert len({one.prediction for one in predictions_of(away)}) > 1  # an order can be seen


def predictions_of(driven):
    """What the run's predict stage published, in its order."""
    store = ArtifactStore(driven.session.context.workspace)
    artifact = store.get(driven.stage("predict")["artifacts"]["predictions"])
    predictions, _ = read_predictions(artifact.path)
    return predictions


def test_nothing_runs_again_when_only_the_profile_changes(trained, folder):
    driven = Driven(make_run(folder, num_cpu_devices=4))

    outcome = driven.end()

    assert outcome.message == "2 stages completed, 2 of them reused"


def wait_for_step(run, step):
    """Wait until the train stage has logged a step; return its attempt."""

    def reached():
        attempt = run.latest_attempt("train")
        records = attempt.read_metrics() if attempt is not None else ()
        return attempt if any(record.get("step", 0) >= step for record in records) else None

    found: AttemptDirectory = wait_until(reached, 400)
    return found
