"""`logs`, `status` and `why` of a stage whose result another run made lead to that run."""

import json
import shutil
import threading

import pytest

from redco_flow.cli.main import run_command
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import note_shared_attempt
from redco_flow.tracking.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def twice(finished):
    """The command, a run, and a second one that reuses all of it."""
    command, first = finished
    second = command.json("run", "sums.yaml")
    assert all(stage["reused"] for stage in second["stages"].values())
    assert second["metrics"] == first["metrics"]
    assert second["run"] != first["run"]
    return command, first["run"], second["run"]


def logs(command, *words):
    """What `logs` prints, and what it says first."""
    process = command.start("logs", *words)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.parametrize("words", [(), ("--follow",)])
def test_the_log_of_a_reused_stage_is_that_of_the_run_that_made_it(twice, words):
    command, first, second = twice

    out, said = logs(command, f"{second}/numbers", *words)

    assert out == logs(command, f"{first}/numbers")[0]
    assert "writing 3 numbers" in out
    assert said == f"numbers: made by run {first}, stage numbers, attempt 1; this is its log.\n"


def test_the_logs_of_a_run_that_reuses_all_name_each_stage_and_its_maker(twice):
    command, first, second = twice

    out, said = logs(command, second)

    assert "numbers | writing 3 numbers" in out
    assert [line.partition(",")[0] for line in said.splitlines()] == [
        f"numbers: made by run {first}",
        f"total: made by run {first}",
    ]


@pytest.mark.parametrize("words", [(), ("--follow",)])
def test_a_maker_whose_directory_is_gone_is_named(twice, tmp_path, words):
    command, first, second = twice
    there = command.folder / "redco-workspace" / "runs" / first
    there.rename(tmp_path / first)
    try:
        out, said = logs(command, f"{second}/numbers", *words)
    finally:
        (tmp_path / first).rename(there)

    assert out == ""
    assert f"made by run {first}, stage numbers, attempt 1; {there} is gone" in said


def test_status_and_why_of_a_reused_stage_name_the_run_that_made_it(twice):
    command, first, second = twice

    status = command("status", second)
    why = command("why", f"{second}/numbers")

    assert [line for line in status.splitlines() if line.endswith(f"made by {first}")] == [
        line for line in status.splitlines() if ": reused" in line
    ]
    assert f"by stage numbers of run {first}, attempt 1" in why


def test_a_stage_without_a_log_says_how_it_is(twice):
    command, _, _ = twice
    left_out = command.json("run", "sums.yaml", "--until", "numbers")["run"]

    out, said = logs(command, f"{left_out}/total")

    assert out == ""
    assert said == "total: skipped, no log (left out by --from or --until)\n"


def test_a_verb_of_one_run_refuses_a_sweep_and_names_the_verb_that_lists_its_runs(command):
    words = ["--sweep", "total.learning_rate=1.0,2.0", "--max-parallel", "1"]
    sweep = command.json("run", "sums.yaml", *words)
    runs = [point["run"] for point in sweep["points"]]

    refused = [command(verb, sweep["sweep"], code=2) for verb in ("logs", "retry", "diff")]
    out, remark = logs(command, f"{runs[1]}/numbers")

    said = f"is a sweep; name one of its runs, which `redco-flow status {sweep['sweep']}` lists"
    assert all(said in one for one in refused)
    assert "writing 3 numbers" in out
    assert f"made by run {runs[0]}," in remark


@pytest.fixture
def shared(tmp_path):
    """A point whose stage waits for another point's attempt; that attempt; the workspace's root."""
    workspace = Workspace.open(tmp_path / "workspace")
    maker, point = (RunDirectory.create(workspace, "tiny") for _ in range(2))
    attempt = maker.new_attempt("train")
    note_shared_attempt(point, "train", attempt)
    stages = {"train": {"state": "waiting", "reused": False, "message": ""}}
    point.write_state({**point.read_state(), "state": "running", "stages": stages})
    return point, attempt, workspace.root


def test_a_point_follows_the_log_of_the_point_that_makes_its_result(shared, capsys):
    point, attempt, root = shared
    given = ["logs", f"{point.id}/train", "--follow", "--workspace", str(root)]
    following = threading.Thread(target=run_command, args=(given,))

    following.start()
    attempt.log_path().write_text("step 1\n")
    point.write_state({**point.read_state(), "state": "completed", "exit_code": 0})
    following.join(timeout=400)

    said = capsys.readouterr()
    assert said.out == "step 1\n"
    maker = attempt.path.parents[3].name
    assert said.err == f"train: made by run {maker}, stage train, attempt 1; this is its log.\n"


def test_a_record_of_an_earlier_version_is_read_by_the_result_it_names(twice, tmp_path):
    command, first, second = twice
    workspace = tmp_path / "workspace"
    shutil.copytree(command.folder / "redco-workspace", workspace)
    path = workspace / "runs" / second / "state.json"
    state = json.loads(path.read_text())
    for stage in state["stages"].values():
        del stage["made_by"]
    path.write_text(json.dumps(state))

    out, said = logs(command, f"{second}/total", "--workspace", str(workspace))

    assert out == logs(command, f"{first}/total")[0]
    assert f"made by run {first}," in said


def test_a_run_keeps_its_maker_though_another_one_makes_the_result_again(twice):
    command, first, second = twice
    forced = command.json("run", "sums.yaml", "--force", "numbers")
    assert not forced["stages"]["numbers"]["reused"]

    said = logs(command, f"{second}/numbers")[1]

    assert f"made by run {first}," in said
