"""A stage's line in `status`: how well it uses its devices, as far as its progress says."""

import pytest

from redco_flow.cli.status import stage_line, status_text
from redco_flow.cli.view import read_run_view, with_goodput
from redco_flow.records import append_json_line, write_json
from redco_flow.tracking.attempt import State
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def run(tmp_path):
    """A run whose one stage has an attempt."""
    run = RunDirectory.create(Workspace.open(tmp_path), "demo")
    run.new_attempt("train")
    return run


def say(run, state, **progress):
    """Let the stage be in a state, with this in its progress.json."""
    stage = {"state": state, "reused": False, "attempt": 1, "seconds": 60.0, "artifacts": {}}
    told = {**run.read_state(), "state": State.COMPLETED, "stages": {"train": stage}}
    run.write_state(told)
    write_json(run.attempt("train", 1).progress_path, {**progress, "time": utc_now()})


@pytest.mark.parametrize("state", [State.RUNNING, State.COMPLETED])
def test_a_stage_tells_its_devices_and_their_use_while_it_runs_and_afterwards(run, state):
    say(
        run,
        state,
        devices="8 × NVIDIA H100",
        tflops_per_device=402.4,
        mfu=0.4067,
        peak_memory_bytes=65 * 2**30,
        warning="checkpoints may need 3 GiB at once",
    )

    view = read_run_view(run)

    stage = view["stages"]["train"]
    assert (stage["tflops_per_device"], stage["mfu"]) == (402.4, 0.4067)
    assert (
        "on 8 × NVIDIA H100, 402 TFLOP/s a device, MFU 40.7%, peak memory 65.0 GiB a device"
        in status_text(view)
    )
    assert "    warning: checkpoints may need 3 GiB at once" in status_text(view).splitlines()


def test_on_devices_that_are_not_known_there_is_no_mfu(run):
    say(run, State.COMPLETED, devices="cpu", tflops_per_device=0.0123, mfu=None)

    line = stage_line("train", read_run_view(run)["stages"]["train"])

    assert line == "train: completed in 1 min 00 s on cpu, 0.0123 TFLOP/s a device"


def test_the_newest_profile_of_a_stage_is_told_whichever_attempt_wrote_it(run):
    say(run, State.COMPLETED, devices="cpu")
    assert "profile" not in status_text(read_run_view(run))
    profile = run.attempt("train", 1).profile_path
    profile.mkdir()
    run.new_attempt("train")

    view = read_run_view(run)

    assert view["stages"]["train"]["profile"] == str(profile)
    assert f"    profile: {profile}" in status_text(view).splitlines()


def test_a_trainings_goodput_is_told_under_its_line(run):
    say(run, State.COMPLETED, devices="cpu")
    noon = "2026-01-31T12:00:"
    started = {"kind": "start", "start_step": 0, "process_started_at": f"{noon}00+00:00"}
    append_json_line(run.attempt("train", 1).metrics_path, {**started, "time": f"{noon}20+00:00"})
    step = {"kind": "training", "step": 3, "steps_seconds": 20.0, "time": f"{noon}40+00:00"}
    append_json_line(run.attempt("train", 1).metrics_path, step)

    view = with_goodput(run, read_run_view(run))

    assert view["stages"]["train"]["goodput"]["goodput"] == 0.5
    assert "    goodput 50.0% of 40 s: steps 20 s, starting 20 s" in status_text(view).splitlines()


def test_a_stage_of_an_earlier_version_has_its_devices_alone(run):
    say(run, State.COMPLETED, devices="cpu")

    line = stage_line("train", read_run_view(run)["stages"]["train"])

    assert line == "train: completed in 1 min 00 s on cpu"
