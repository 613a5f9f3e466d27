"""A workspace that the version before wrote, read and taken up by this one.

`workspaces/0.1.tar.xz` was made by redco-flow 0.1.0 in /home/user/project on a machine called
old-host: a run of `small.yaml`, a sweep over `stages.predict.num_beams=2,3`, and a run all of whose
processes were killed after the training's checkpoint of step 10 had been committed.
"""

import json
import socket
import tarfile
from pathlib import Path

import pytest
from blake3 import blake3

from redco_flow import __version__
from tests.cli.conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]

ARCHIVE = Path(__file__).parent / "workspaces" / "0.1.tar.xz"
FINISHED, KILLED, SWEEP = "small-8qazzj", "small-9x65rm", "small-sweep-3eynb4"
# Their files are digested, so that they must stay as they were written.
AS_WRITTEN = ("artifacts", "checkpoints")


@pytest.fixture
def command(tmp_path):
    """redco-flow in the folder to which the old project was moved, with its workspace."""
    with tarfile.open(ARCHIVE) as archive:
        # Python before 3.11.4 has no filters.
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    for path in tmp_path.rglob("*"):
        if path.is_file() and not set(AS_WRITTEN) & set(path.parts):
            text = path.read_bytes().replace(b"/home/user/project", str(tmp_path).encode())
            path.write_bytes(text.replace(b"old-host", socket.gethostname().encode()))
    return Command(tmp_path)


def contents(folder):
    """The files below a folder but for what a look at them writes: lease and journal."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lease.json", "journal.jsonl")
    }


def test_old_runs_and_sweeps_are_listed_and_shown_with_stages_scores_and_logs(command):
    states = {run["run"]: run["state"] for run in command.json("ls")}
    finished = command.json("status", FINISHED)
    sweep = command.json("status", SWEEP)

    assert sorted(states.values()) == ["completed"] * 3 + ["interrupted"]
    assert states[KILLED] == "interrupted"
    assert [stage["state"] for stage in finished["stages"].values()] == ["completed"] * 4
    assert finished["metrics"]["val/eval_loss"] == pytest.approx(
        5.441, abs=1e-3
    )  # as its log has it
    assert [point["state"] for point in sweep["points"]] == ["completed"] * 2
    assert "step 10/68" in command("status", KILLED)
    assert "step 34/34 · evaluation: eval_loss 5.441" in command("logs", f"{FINISHED}/train")
    assert "attempt 1" in command("logs", KILLED)


def test_old_scores_are_followed_to_settings_and_data_and_their_artifacts_are_whole(command):
    digest = blake3((command.folder / "rows.jsonl").read_bytes()).hexdigest()

    why = command("why", f"{FINISHED}/exact_match")

    assert "learning_rate = 0.001  (small.yaml:16)" in why
    assert f"data rows.jsonl  blake3 {digest}" in why
    assert "8 of 8 artifacts are whole" in command("verify")
    assert len(command.json("artifacts")) == 8
    assert "metrics" in command("impact", digest)


def test_a_killed_old_training_is_not_started_over_and_both_ways_on_are_told(command):
    """Its checkpoint belongs to the code that wrote it."""
    workspace = command.folder / "redco-workspace"
    before = contents(workspace)

    told = command("resume", KILLED, code=2)

    assert f"a version before 0.2.0; this is {__version__}" in told
    assert "checkpoint of step 10 is kept" in told
    assert "`redco-flow run small.yaml learning_rate=2e-3 num_epochs=4`" in told
    assert contents(workspace) == before
    assert command.json("status", KILLED)["state"] == "interrupted"


def test_a_killed_old_training_that_was_submitted_ahead_is_not_started_over_either(command):
    """Its call names no inputs, only the attempt that makes them."""
    runs = command.folder / "redco-workspace" / "runs"
    path = runs / KILLED / "stages" / "train" / "attempts" / "1" / "call.json"
    call = json.loads(path.read_text())
    call["inputs"]["dataset"][0] |= {"id": "", "path": ""}
    call["upstream"] = {"preprocess": str(runs / FINISHED / "stages/preprocess/attempts/1")}
    call["ingredients"]["inputs"], call["fingerprint"] = {}, ""
    path.write_text(json.dumps(call))

    told = command("resume", KILLED, code=2)

    assert "checkpoint of step 10 is kept" in told


def test_of_an_old_sweep_with_a_killed_training_no_point_is_reopened(command):
    record = next(command.folder.glob("redco-workspace/sweeps/*/sweep.json"))
    sweep = json.loads(record.read_text())
    sweep["points"].append({"run": KILLED, "overrides": []})
    record.write_text(json.dumps(sweep))
    before = contents(command.folder / "redco-workspace")

    told = command("resume", SWEEP, code=2)

    assert "checkpoint of step 10 is kept" in told
    assert contents(command.folder / "redco-workspace") == before


def test_a_cancelled_old_training_is_not_started_over_by_retry(command):
    command("cancel", KILLED)

    told = command("retry", KILLED, code=2)

    assert "checkpoint of step 10 is kept" in told
    assert command.json("status", KILLED)["state"] == "cancelled"


def test_an_old_run_without_a_checkpoint_is_resumed_to_its_end(command):
    (commit,) = command.folder.glob("redco-workspace/work/*/checkpoints/10/commit.json")
    commit.unlink()

    resumed = command.json("resume", KILLED, timeout=500)

    assert resumed["state"] == "completed"
    stages = command.json("status", KILLED)["stages"]
    assert stages["train"]["attempt"] == 2
    # The old tokenizer and rows are what this version makes of the same data.
    old = command.json("status", FINISHED)["stages"]
    assert stages["preprocess"]["artifacts"] == old["preprocess"]["artifacts"]


def test_the_old_pipeline_is_planned_anew_because_the_code_is_another(command):
    stages = command.json("plan", "small.yaml")["stages"]

    assert stages["preprocess"]["action"] == "run"
    assert stages["preprocess"]["reason"].startswith("code redco_flow.")
