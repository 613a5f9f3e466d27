"""A user's script as a stage of a real run: reused, run again for a reason, killed and resumed."""

import os
import signal

import pytest
from orchestrate_runs import InProcess, Runs, until
from script_of_a_line import SCRIPT, is_in_second_epoch, steps, write_line

from redco_flow.records import read_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]


@pytest.fixture
def text(tmp_path):
    return write_line(tmp_path)


def test_a_script_killed_in_its_training_goes_on_to_the_same_bits_and_runs_again_where_it_changed(
    tmp_path, text
):
    runs = [Runs(tmp_path / name, {"retries": {"failed": 1}}) for name in ("whole", "killed")]
    for one in runs:
        one.folder.mkdir()
    overrides = ["stages.fit.arguments.num_epochs=4", "stages.fit.arguments.seconds=0.1"]
    whole = InProcess(runs[0].write(text, overrides))
    killed = InProcess(runs[1].write(text, overrides))
    attempt = until(lambda: killed.run.latest_attempt("fit"))

    until(lambda: is_in_second_epoch(attempt, runs[1].workspace), 400)
    os.kill(worker_of(attempt), signal.SIGKILL)

    for driven in (whole, killed):
        assert driven.end(400).state == "completed", "\n".join(driven.said)
    first, second = killed.run.attempts("fit")
    assert 8 < steps(second)[0] <= steps(first)[-1] + 1
    assert steps(second)[-1] == 32
    results = [driven.run.read_state()["stages"]["fit"] for driven in (whole, killed)]
    assert results[0]["artifacts"] == results[1]["artifacts"]
    assert results[0]["metrics"] == results[1]["metrics"]

    def reason(*more):
        plan = runs[0].plan(text, [*overrides, *more]).stages["fit"]
        return plan.action, plan.reason

    assert reason()[0] == "reuse"
    assert reason("stages.fit.resources.cpus_per_host=1")[0] == "reuse"
    changed = "stages.fit.arguments.num_epochs=2"
    assert reason(changed) == ("run", "arguments.num_epochs: 4 → 2 (command line)")
    (tmp_path / "line.py").write_text(
        "def apply(params, x): return params['b'] + params['w'] * x\n"
    )
    assert reason() == ("run", "code line.py changed")
    (tmp_path / "fit.py").write_text(SCRIPT.replace("0.1", "0.2"))
    assert reason() == ("run", "code fit.py changed")
    (tmp_path / "rows.json").write_text("[0, 1, 2, 3]")
    assert reason() == ("run", "data rows.json changed")
    for one in runs:
        one.clean_up()


def test_a_scripts_error_is_the_runs(runs, text, tmp_path):
    (tmp_path / "line.py").write_text("def apply(params, x):\n    return params['slope'] * x\n")

    driven = InProcess(runs.write(text))

    assert driven.end(400).state == "failed"
    message = runs.started[0].attempt("fit", 1).read_exit().message
    assert f"ScriptFailed: fit.py failed at {tmp_path}/line.py:2: KeyError: 'slope'" in message


def worker_of(attempt):
    """The process id of the attempt's worker."""
    supervisor = read_json(attempt.job_path)["supervisor"]["pid"]
    with open(f"/proc/{supervisor}/task/{supervisor}/children") as file:
        return int(file.read().split()[0])
