"""A whole training, supervised and tried again: what happens to its disk and to its last moments.

Driven by the test itself, without Prefect, so that it can stop the world between two of its steps.
"""

import os
import signal
from datetime import datetime

import pytest

from redco_flow.records import read_json
from redco_flow.report.page import build_report
from redco_flow.report.run_time import time_shares
from redco_flow.report.stage_facts import read_stages
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.journal import read_journal
from redco_flow.tracking.locks import exclusive
from tests.cli.conftest import wait_for
from tests.cluster.pipelines import Driven, losses, make_run, same_parameters
from tests.cluster.small_disk import committed_steps, fill, small_disk, trained_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The same training, left alone."""
    driven = Driven(make_run(folder, workspace="undisturbed", num_epochs=6))
    assert driven.end().state == "completed", "\n".join(driven.said)
    return driven


def test_the_parts_of_a_real_runs_time_add_up_to_its_wall_time(undisturbed):
    run = undisturbed.run
    workspace = undisturbed.session.context.workspace
    stages = read_stages(run, workspace, pytest.fail).values()
    told = [datetime.fromisoformat(one["time"]) for one in read_journal(run.journal_path)]
    wall = (told[-1] - told[0]).total_seconds()
    logged = [one for one in run.attempt("train", 1).read_metrics() if one["kind"] == "training"]

    found = {one.part: one.seconds for one in time_shares(run, stages, "")}

    assert sum(found.values()) == pytest.approx(wall, rel=0.01)
    # Times are whole milliseconds, of steps that take about ten; a busy machine adds its own.
    assert found["steps"] == pytest.approx(sum(one["steps_seconds"] for one in logged), rel=0.3)
    assert min(found[part] for part in ("compile", "start-up", "data")) > 0
    page = build_report(run, workspace).read_text(encoding="utf-8")
    assert 'class="part steps"' in page


def test_a_trainer_killed_before_its_checkpoint_is_registered_registers_it_once(
    folder, undisturbed
):
    """Fault 4: the last save is committed, and the artifact's directory is still hidden."""
    run = make_run(folder, workspace="unregistered", num_epochs=6, retries={"failed": 1})
    workspace = folder / "unregistered"
    checkpoints = workspace / "artifacts/checkpoint"
    driven = Driven(run)
    wait_for(lambda: run.latest_attempt("train"))
    with exclusive(workspace / "sequence"):  # registering waits for its sequence number here
        wait_for(lambda: next(checkpoints.glob(".publishing*"), None))
        last_step = wait_for(lambda: max(committed_steps(workspace), default=0))
        os.kill(worker_of(run.latest_attempt("train")), signal.SIGKILL)
        wait_for(run.attempt("train", 1).exit_path.exists)
    outcome = driven.end()

    assert outcome.state == "completed", "\n".join(driven.said)
    _, second = run.attempts("train")
    assert last_step == max(losses(run))
    assert trained_steps(second) == []
    store = ArtifactStore(driven.session.context.workspace)
    published = driven.stage("train")["artifacts"]
    assert {one.id for one in store.list("checkpoint")} == set(published.values())
    assert len(list(workspace.glob("results/*.json"))) == 2  # of preprocess and of train
    assert list(checkpoints.glob(".publishing*")) == []
    assert same_parameters(driven, undisturbed)


@pytest.fixture
def small_workspace(folder):
    """A workspace on a disk of its own."""
    with small_disk(folder / "small") as workspace:
        yield workspace


def test_a_training_whose_disk_fills_up_says_which_and_goes_on_once_there_is_room(
    small_workspace, folder, undisturbed
):
    """Fault 20: checkpoint, metrics and records at once, on a disk that is really full."""
    run = make_run(folder, workspace="small", num_epochs=6)
    ballast = small_workspace / "another-users"
    driven = Driven(run)
    wait_for(lambda: committed_steps(small_workspace))
    worker = worker_of(run.attempt("train", 1))
    os.kill(worker, signal.SIGSTOP)  # it would end before the disk is full
    fill(ballast)
    os.kill(worker, signal.SIGCONT)
    outcome = driven.end()

    attempt = run.attempt("train", 1)
    message = attempt.read_exit().message
    assert outcome.state == "failed"
    assert str(small_workspace) in message
    assert "No space left on device" in message
    assert "Free space" in message
    intact = committed_steps(small_workspace)
    assert intact
    ballast.unlink()
    resumed = Driven(run)
    assert resumed.end().state == "completed", "\n".join(resumed.said)

    assert trained_steps(run.attempt("train", 2))[0] == max(intact) + 1
    assert same_parameters(resumed, undisturbed)


def worker_of(attempt):
    """The process id of the attempt's worker."""
    supervisor = read_json(attempt.job_path)["supervisor"]["pid"]
    with open(f"/proc/{supervisor}/task/{supervisor}/children") as file:
        return int(file.read().split()[0])
