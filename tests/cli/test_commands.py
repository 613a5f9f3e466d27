import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import wait_for

pytestmark = pytest.mark.slow


def test_run_prints_one_json_object_with_stages_artifacts_and_metrics(finished):
    _, result = finished

    assert result["state"] == "completed"
    assert result["exit_code"] == 0
    assert set(result["stages"]) == {"numbers", "total"}
    assert result["metrics"]["total"] == 12.0
    assert re.fullmatch("[0-9a-f]{64}", result["stages"]["numbers"]["artifacts"]["dataset"])
    assert not result["stages"]["total"]["reused"]


def test_a_second_run_reuses_every_stage(finished):
    command, first = finished

    second = command.json("run", "sums.yaml")

    assert all(stage["reused"] for stage in second["stages"].values())
    assert second["metrics"] == first["metrics"]
    assert second["run"] != first["run"]


def test_plan_names_the_first_setting_that_differs(finished):
    command, _ = finished

    plan = command.json("plan", "sums.yaml", "learning_rate=3.0")

    assert plan["stages"]["numbers"]["action"] == "reuse"
    assert plan["stages"]["total"]["action"] == "run"
    assert "learning_rate" in plan["stages"]["total"]["reason"]


def test_why_leads_from_a_metric_to_the_line_in_the_file(finished):
    command, result = finished

    text = command("why", f"{result['run']}/total/total")

    assert "total = 12" in text
    assert "learning_rate = 2.0" in text
    assert "sums.yaml:6" in text
    assert result["stages"]["numbers"]["artifacts"]["dataset"][:12] in text


def test_status_ls_artifacts_and_verify_agree(finished):
    command, result = finished

    status = command.json("status", result["run"])
    listed = command.json("ls")
    artifacts = command.json("artifacts")

    assert status["state"] == "completed"
    assert result["run"] in [run["run"] for run in listed]
    assert result["stages"]["total"]["artifacts"]["checkpoint"] in [one["id"] for one in artifacts]
    assert command.json("verify")["problems"] == {}


def test_logs_print_what_a_stage_printed(finished):
    command, result = finished

    everything = command("logs", result["run"])
    one_stage = command("logs", f"{result['run']}/numbers")

    assert "numbers | writing 3 numbers" in everything
    assert "writing 3 numbers" in one_stage
    assert "learning rate" not in one_stage


def test_mistakes_in_the_data_s_first_rows_are_told_by_plan_and_run_before_anything_starts(command):
    (command.folder / "train.csv").write_text("text,summary\na,b\n")
    (command.folder / "test.csv").write_text("")
    (command.folder / "data.yaml").write_text(
        "name: data\n"
        "model: {name_or_path: any/model}\n"
        "data: {train: train.csv, test: test.csv, target_key: summary}\n"
        "stages: {preprocess: {}}\n"
    )

    for verb in ("plan", "run"):
        error = command(verb, "data.yaml", code=2)
        assert f"data.yaml:3:8: 'data.train': {command.folder}/train.csv:2: no field " in error
        assert "'source': its fields are text, summary" in error
        assert f"'data.test': {command.folder}/test.csv: no rows in it" in error

    assert not list(command.folder.glob("redco-workspace/runs/*"))


def test_every_mistake_is_reported_at_once_with_its_line_and_nothing_starts(command):
    """Fault 27. Engine cases 3 and 4."""
    (command.folder / "bad.yaml").write_text(
        "name: bad\n"
        "stages:\n"
        "  numbers: {kind: orchestrate_kinds.numbers, cuont: 3}\n"
        "  total: {kind: orchestrate_kinds.total, learning_rate: fast}\n"
    )

    message = command("run", "bad.yaml", code=2)

    assert "bad.yaml:3:" in message
    assert "did you mean 'count'" in message
    assert "bad.yaml:4:" in message
    assert not list(command.folder.glob("redco-workspace/runs/*"))


def test_an_unwritable_workspace_is_refused_before_anything_starts(command):
    """Fault 21."""
    (command.folder / "file").write_text("in the way")

    message = command("run", "sums.yaml", "profile.workspace=file/below", code=2)

    assert "file/below" in message
    assert "cannot be written" in message


def test_shell_words_in_settings_are_only_text(command):
    """Fault 30."""
    bait = command.folder / "X"

    command("plan", "sums.yaml", f"description=$(touch {bait}); `touch {bait}`")
    message = command("plan", f"$(touch {bait}).yaml", code=2)

    assert not bait.exists()
    assert "$(touch" in message


def test_a_token_in_a_setting_is_refused_and_not_repeated(command):
    """Fault 31."""
    token = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"

    message = command("run", "sums.yaml", f"description={token}", code=2)

    assert token not in message


def test_ctrl_c_detaches_and_says_how_to_come_back(command, prefect_server):
    gate = command.folder / "gate"
    # Whoever started the tests may have had this signal ignored.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    words = ("run", "sums.yaml", f"total.gate={gate}")
    process = command.start(*words, start_new_session=True, preexec_fn=heeding)
    workspace = command.folder / "redco-workspace"
    wait_for(lambda: list(workspace.glob("runs/*/stages/total/attempts/1/job.json")))

    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 130
    run = json.loads(next(workspace.glob("runs/*/run.json")).read_text())["id"]
    assert f"redco-flow attach {run}" in err
    gate.touch()
    assert "completed" in command("attach", run)


def test_cancel_stops_the_run_with_its_exit_code(command, prefect_server):
    gate = command.folder / "never"
    process = command.start("run", "sums.yaml", f"total.gate={gate}", "--json")
    workspace = command.folder / "redco-workspace"
    wait_for(lambda: list(workspace.glob("runs/*/stages/total/attempts/1/job.json")))

    command("cancel", "@last")
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 5
    assert json.loads(out)["state"] == "cancelled"


def test_the_command_imports_nothing_heavy():
    program = (
        "import sys, redco_flow.cli.main as m; m.build_parser();"
        "bad = {'jax', 'prefect', 'pydantic', 'rich', 'numpy', 'yaml'} & set(sys.modules);"
        "assert not bad, bad"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_verb_is_answered_with_the_nearest(command):
    assert "did you mean 'status'?" in command("statu", code=2)


def test_doctor_finds_this_machine_fit(command):
    findings = command.json("doctor")

    assert {finding["check"] for finding in findings} >= {"workspace", "devices", "prefect"}
    assert all(finding["is_good"] for finding in findings)


def test_a_pipeline_that_is_not_there_is_named(command):
    message = command("run", "nowhere.yaml", code=2)

    assert "nowhere.yaml" in message
    assert not Path(command.folder / "redco-workspace").exists()


def test_a_run_ahead_where_nothing_queues_is_refused_with_what_to_do(command):
    error = command("run", "sums.yaml", "--ahead", code=2)

    assert "executor 'local' of profile 'local' cannot have jobs wait for each other" in error
    assert "leave --ahead out" in error
    assert not list((command.folder / "redco-workspace" / "runs").iterdir())


def test_a_retry_says_nothing_of_how_its_stages_ended_before(command, tmp_path):
    cured = tmp_path / "cured"
    command("run", "sums.yaml", f"total.fails_until={cured}", code=1)
    cured.touch()

    retry = command.start("retry")
    out, err = retry.communicate(timeout=120)

    assert retry.returncode == 0, err
    assert "failed" not in err
    assert "total: completed" in err
    assert "stages completed" not in out
