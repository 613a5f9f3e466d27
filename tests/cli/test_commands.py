import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redco_flow.cli import main
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command, wait_for

pytestmark = pytest.mark.slow


def test_run_prints_one_json_object_with_stages_artifacts_and_metrics(finished):
    _, result = finished

    assert result["state"] == "completed"
    assert result["exit_code"] == 0
    assert set(result["stages"]) == {"numbers", "total"}
    assert result["metrics"]["total"] == 12.0
    assert re.fullmatch("[0-9a-f]{64}", result["stages"]["numbers"]["artifacts"]["dataset"])
    assert not result["stages"]["total"]["reused"]


def test_no_run_is_started_where_nothing_is_new(finished):
    command, _ = finished
    before = command("ls")

    same = command.json("run", "sums.yaml", "--if-new")
    other = command.json("run", "sums.yaml", "learning_rate=5.0", "--if-new", "--since", "x")
    known = command.json("plan", "sums.yaml", "learning_rate=6.0")["identity"]
    since = command.json("run", "sums.yaml", "learning_rate=6.0", "--if-new", "--since", known)

    assert (same["run"], since["run"]) == (None, None)
    assert other["metrics"]["total"] == 30.0
    assert len(command("ls").splitlines()) == len(before.splitlines()) + 1


def test_a_run_of_a_given_id_is_started_once(finished):
    command, summary = finished
    said = command("run", "sums.yaml", "--run-id", summary["run"], code=2)
    assert f"there is a run {summary['run']} already" in said
    assert len(list((command.folder / "redco-workspace/runs").glob(f"{summary['run']}*"))) == 1


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


def test_the_newest_artifacts_are_listed_first_and_older_ones_are_counted(finished):
    command, _ = finished

    everything = command.json("artifacts")
    title, newest, count = command("artifacts", "-n", "1").splitlines()

    assert title.startswith("ARTIFACT")
    last = max(everything, key=lambda artifact: artifact["sequence"])
    assert newest.startswith(last["id"][:12])
    assert count.startswith(f"{len(everything) - 1} older artifacts")


def test_logs_print_what_a_stage_printed(finished):
    command, result = finished

    everything = command("logs", result["run"])
    one_stage = command("logs", f"{result['run']}/numbers")
    path = command.json("status", result["run"])["report"].removesuffix("/report.html")

    assert "numbers | writing 3 numbers" in everything
    assert "writing 3 numbers" in one_stage
    assert "learning rate" not in one_stage
    assert [command("logs", path), command("logs", f"{path}/numbers")] == [everything, one_stage]


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
    """Fault 27: all mistakes are reported at once, each with its line; nothing is submitted. Engine
    cases 3 and 4: the error names its position and the nearest known name; the error comes before
    any job.
    """
    (command.folder / "bad.yaml").write_text(
        "name: bad\n"
        "stages:\n"
        "  numbers: {kind: orchestrate_kinds.numbers, cuont: 3}\n"
        "  total: {kind: orchestrate_kinds.total, learning_rate: fast}\n"
    )
    (command.folder / "site.yaml").write_text("executor: slurm\nslurm: {partitio: gpu}\n")

    message = command("run", "bad.yaml", "-p", "site.yaml", code=2)

    assert "site.yaml:2:" in message

    assert "bad.yaml:3:" in message
    assert "did you mean 'count'" in message
    assert "bad.yaml:4:" in message
    assert not list(command.folder.glob("redco-workspace/runs/*"))


def test_an_unwritable_workspace_is_refused_before_anything_starts(command):
    """Fault 21: the run is refused before anything is submitted."""
    (command.folder / "file").write_text("in the way")

    message = command("run", "sums.yaml", "profile.workspace=file/below", code=2)

    assert "file/below" in message
    assert "cannot be written" in message


def test_shell_words_in_settings_are_only_text(command):
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    bait = command.folder / "X"

    command("plan", "sums.yaml", f"description=$(touch {bait}); `touch {bait}`")
    message = command("plan", f"$(touch {bait}).yaml", code=2)

    assert not bait.exists()
    assert "$(touch" in message


def test_a_token_in_a_setting_is_refused_and_not_repeated(command):
    """Fault 31: no log, record, job script, process list, error or page shows the secret."""
    token = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"

    message = command("run", "sums.yaml", f"description={token}", code=2)

    assert token not in message


def test_ctrl_c_detaches_and_says_how_to_come_back(command):
    gate = command.folder / "gate"
    words = ("run", "sums.yaml", f"total.gate={gate}")
    end, of_terminal = os.pipe()
    process = command.start(*words, start_new_session=True, pass_fds=[of_terminal])
    os.close(of_terminal)
    workspace = command.folder / "redco-workspace"
    wait_for(lambda: list(workspace.glob("runs/*/stages/total/attempts/1/job.json")))

    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=400)

    assert process.returncode == 130
    os.set_blocking(end, False)
    assert os.read(end, 1) == b""  # what drives the run has no file of the terminal's open
    run = json.loads(next(workspace.glob("runs/*/run.json")).read_text())["id"]
    assert f"redco-flow attach {run}" in err
    gate.touch()
    assert "completed" in command("attach", run)


def test_a_run_whose_launcher_is_killed_while_it_is_followed_is_continued_by_another(command):
    gate = command.folder / "gate"
    process = command.start("run", "sums.yaml", f"total.gate={gate}", "--json")
    leases = command.folder / "redco-workspace" / "runs"
    wait_for(lambda: command("ls").count("running") == 1 and list(leases.glob("*/lease.json")))
    (lease,) = leases.glob("*/lease.json")
    wait_for(lambda: (lease.parent / "stages/total/attempts/1/job.json").exists())

    os.kill(json.loads(lease.read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: find_holder(lease.parent) is None)
    gate.touch()
    said, errors = process.communicate(timeout=400)

    assert json.loads(said)["state"] == "completed"
    assert "was killed; another one continues" in errors
    assert not (lease.parent / "stages/total/attempts/2").exists()


def test_cancel_stops_the_run_with_its_exit_code(command):
    gate = command.folder / "never"
    process = command.start("run", "sums.yaml", f"total.gate={gate}", "--json")
    workspace = command.folder / "redco-workspace"
    wait_for(lambda: list(workspace.glob("runs/*/stages/total/attempts/1/job.json")))

    command("cancel", "@last")
    out, _ = process.communicate(timeout=400)

    assert process.returncode == 5
    assert json.loads(out)["state"] == "cancelled"


def test_the_command_imports_nothing_heavy():
    program = (
        "import sys, redco_flow.cli.main as m; m.build_parser();"
        "bad = {'jax', 'prefect', 'pydantic', 'rich', 'numpy', 'yaml'} & set(sys.modules);"
        "assert not bad, bad"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_verb_is_declared_by_the_module_that_the_table_says():
    """In its order: the help page is made of the table alone."""
    verbs = next(
        action.choices
        for action in main.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )

    declared = [(verb, own.get_default("verb").__module__) for verb, own in verbs.items()]

    assert declared == [
        (verb, f"redco_flow.cli.{module}") for verb, (module, _) in main.VERBS.items()
    ]


def test_the_help_page_imports_no_verb_and_a_verb_only_what_it_needs():
    program = (
        "import sys, redco_flow.cli.main as m\n"
        "try: m.run_command(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "modules = {f'redco_flow.cli.{module}' for module, _ in m.VERBS.values()}\n"
        "print(*sorted(modules & set(sys.modules)))"
    )

    def imported(*words):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()[-1].split()

    assert imported("--help") == imported() == imported("--version") == []
    assert imported("init", "--help") == ["redco_flow.cli.init"]
    assert imported("run", "--help") == ["redco_flow.cli.run", "redco_flow.cli.status"]


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
    error = command("plan", "sums.yaml", "--ahead", code=2)
    assert command("run", "sums.yaml", "--ahead", code=2) == error

    assert "executor 'local' of profile 'local' cannot have jobs wait for each other" in error
    assert "leave --ahead out" in error
    assert not list((command.folder / "redco-workspace" / "runs").iterdir())


def test_a_retry_says_nothing_of_how_its_stages_ended_before(command, tmp_path):
    cured = tmp_path / "cured"
    command("run", "sums.yaml", f"total.fails_until={cured}", code=1)
    cured.touch()

    retry = command.start("retry")
    out, err = retry.communicate(timeout=400)

    assert retry.returncode == 0, err
    assert "failed" not in err
    assert "total: completed" in err
    assert "stages completed" not in out


def test_code_of_the_users_that_ends_the_process_fails_the_run(command, tmp_path):
    package = tmp_path / "own_ends"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "def make(profile, environment): raise SystemExit(3)\ndef reattach(record): ...\n"
    (package / "executor.py").write_text(text)

    out = command.start("run", "sums.yaml", "profile.executor=own_ends.executor").communicate()[0]

    assert "failed  stage 'numbers': SystemExit: 3" in out
    assert command.json("status")["exit_code"] == 1


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_an_unknown_executor_is_refused_with_the_nearest_and_its_line(command, verb):
    folder = command.folder / "cluster_profiles"
    folder.mkdir()
    (folder / "mine.yaml").write_text("extends: local\nexecutor: lokal\n")

    message = command(verb, "sums.yaml", "-p", "mine", code=2)

    assert "mine.yaml:2:" in message
    assert "did you mean 'local'?" in message
    assert not (command.folder / "redco-workspace").exists()


def test_the_command_alone_prints_its_help(command):
    assert command() == command("--help")


def test_verbs_that_only_read_make_no_workspace(command):
    command("plan", "sums.yaml")
    command("run", "-n", "sums.yaml")
    command("run", "-n", "sums.yaml", "--sweep", "count=1,2")
    listed = command("ls")
    message = command("status", code=2)

    assert f"no runs in {command.folder / 'redco-workspace'}" in listed
    assert "no runs in" in message
    assert not (command.folder / "redco-workspace").exists()


_INTERRUPTED = """
import importlib.abc, os, signal, sys
from redco_flow.cli.entry import main

wanted = sys.argv.pop(1)

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
main()
"""


@pytest.mark.parametrize(
    "module", ["redco_flow.cli.main", "redco_flow.cli.status", "redco_flow.spec.load", "yaml"]
)
def test_ctrl_c_is_quiet_while_modules_are_imported(command, module):
    words = [sys.executable, "-c", _INTERRUPTED, module, "plan", "sums.yaml"]

    done = subprocess.run(words, cwd=command.folder, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_who_follows_without_a_terminal_reads_what_is_waited_for_and_no_line_twice(command):
    process = command.start("run", "sums.yaml")
    _, err = process.communicate(timeout=400)

    lines = err.splitlines()
    assert process.returncode == 0, err
    waits = next(i for i, line in enumerate(lines) if "starting the launcher" in line)
    begins = next(i for i, line in enumerate(lines) if line.startswith("numbers:"))
    assert waits < begins
    assert len(set(lines)) == len(lines)


def test_bash_completes_verbs_options_files_and_runs(finished):
    command, result = finished
    script = """
        eval "$(cat)"
        complete_words() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=()
            _shtab_redco_flow; echo "${COMPREPLY[@]}"
        }
        complete_words redco-flow stat
        complete_words redco-flow run --ah
        complete_words redco-flow run su
        complete_words redco-flow status sums-
    """

    done = subprocess.run(
        ["bash", "-c", script],
        input=command("completion", "bash"),
        cwd=command.folder,
        capture_output=True,
        text=True,
        check=True,
    )

    verbs, options, files, runs = done.stdout.splitlines()
    assert (verbs, options, files) == ("status", "--ahead", "sums.yaml")
    assert result["run"] in runs.split()


def test_a_job_in_the_queue_is_waiting_and_not_running(command):
    run = RunDirectory.create(Workspace.open(command.folder / "redco-workspace"), "sums")
    told = {"attempt": 1, "told_at": "2026-01-31T12:00:00.000+00:00", "state": "running"}
    waits = "job 7 waits in the queue: Resources"
    run.write_state({"state": "running", "stages": {"numbers": {**told, "message": waits}}})

    status = command("status")

    assert f"numbers: waiting  {waits}" in status
    assert "numbers: running" not in status


def test_a_pipeline_without_a_tokenizer_is_refused_by_plan(command):
    (command.folder / "rows.csv").write_text("a,b\n1,2\n")
    (command.folder / "tiny.yaml").write_text(
        "name: tiny\n"
        "recipe: text_to_text\n"
        "data: {dataset: rows.csv, source_key: a, target_key: b}\n"
        "stages: {preprocess: {}}\n"
    )

    message = command("plan", "tiny.yaml", code=2)

    assert message.startswith("redco-flow: tiny.yaml:3:")
    assert "there is no tokenizer: give data.tokenizer" in message


def test_a_directory_whose_name_is_not_text_is_refused(command):
    folder = Path(os.fsdecode(os.fsencode(command.folder) + b"/\xff"))
    folder.mkdir()

    assert "is not UTF-8: change to another one." in Command(folder)("ls", code=2)
    assert "usage:" in Command(folder)("--help")


def test_a_schedule_takes_no_time_zone_of_a_machine_that_is_not_that_of_a_place(command):
    words = ("schedule", "add", "sums.yaml", "--cron", "0 3 * * *")

    error = command(*words, code=2, environment={"TZ": "CET-1CEST"})

    assert "(TZ=CET-1CEST) is not that of a place: give --timezone" in error
