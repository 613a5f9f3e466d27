"""The command as a person runs it with `-p slurm`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_stages.calls import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KINDS = Path(__file__).parent.parent / "orchestrate" / "kinds"
PIPELINE = """\
name: sums
stages:
  numbers: {kind: orchestrate_kinds.numbers, count: 3}
"""


@pytest.fixture
def redco_flow(slurm, tmp_path):
    """Run the command in a directory of its own; return what it printed."""
    (tmp_path / "sums.yaml").write_text(PIPELINE)

    def run(*words, code=0, environment=None):
        done = subprocess.run(
            [sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(KINDS), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    return run


def test_a_run_that_waits_in_the_queue_says_why_and_leaves_it_when_cancelled(redco_flow, slurm):
    asked = ("--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    blocker = slurm.run("sbatch", "--parsable", *asked).strip()
    run = redco_flow("run", "sums.yaml", "-p", "slurm", "--detach").strip()

    shown = wait_until(lambda: said_of_the_queue(redco_flow("status", run)))
    waiting = set(slurm.jobs()) - {blocker}
    redco_flow("cancel", run)

    job = waiting.pop()
    assert shown == f"numbers: waiting  job {job} waits in the queue: Resources"
    assert not waiting
    assert json.loads(redco_flow("status", run, "--json"))["state"] == "cancelled"
    slurm.wait_for("the job has left the queue", lambda: job not in slurm.jobs())


def said_of_the_queue(status):
    """The line of `status` on a stage that waits in the queue."""
    return next((line.strip() for line in status.splitlines() if "queue" in line), None)


def test_logs_of_a_rank_that_there_was_not_name_those_that_there_were(redco_flow):
    run = json.loads(redco_flow("run", "sums.yaml", "-p", "slurm", "--json").splitlines()[-1])

    assert "writing 3 numbers" in redco_flow("logs", run["run"], "--rank", "0")
    message = redco_flow("logs", run["run"], "--rank", "3", code=2)
    assert "no process of rank 3 has a log; those of 0 have" in message


def test_a_run_ahead_is_shown_submitted_and_followed_to_its_end(redco_flow, tmp_path):
    chain = PIPELINE + "  total: {kind: orchestrate_kinds.total, learning_rate: 2.0}\n"
    (tmp_path / "chain.yaml").write_text(chain)

    shown = redco_flow("plan", "chain.yaml", "-p", "slurm", "--render", "--ahead")
    run = json.loads(redco_flow("run", "chain.yaml", "-p", "slurm", "--ahead", "--json"))

    assert "#SBATCH --dependency=afterok:JOB_OF_numbers\n" in shown
    assert (run["state"], run["metrics"]) == ("completed", {"total": 12.0})
    (script,) = tmp_path.glob("redco-workspace/runs/*/stages/total/attempts/1/job.sh")
    assert "#SBATCH --dependency=afterok:" in script.read_text()


def test_each_stage_runs_where_it_says(redco_flow, tmp_path, slurm):
    total = "kind: orchestrate_kinds.total, learning_rate: 2.0, runs_on: {slurm: {partition: high}}"
    here = PIPELINE.replace("3}", f"3, runs_on: local}}\n  total: {{{total}}}")
    (tmp_path / "places.yaml").write_text(here)

    run = json.loads(redco_flow("run", "places.yaml", "-p", "slurm", "--json").splitlines()[-1])

    stages = tmp_path / "redco-workspace" / "runs" / run["run"] / "stages"
    numbers, total = (
        json.loads((stages / name / "attempts/1/job.json").read_text())
        for name in ("numbers", "total")
    )
    assert (numbers["executor"], total["executor"]) == ("local", "slurm")
    shown = slurm.run("scontrol", "show", "job", str(total["job_id"]))
    assert "Partition=high " in shown


def test_a_job_whose_records_are_visible_late_on_the_login_node_completes(
    redco_flow, shim, tmp_path
):
    """Fault 55: Slurm reports it as completed 25 s before exit.json and its result are visible."""
    late = {"LATE_FILES": "/exit.json:/result.json:/results/", "LATE_SECONDS": "25"}
    preloaded = {"LD_PRELOAD": shim("late_files"), **late}
    visible = "profile.slurm.setup=[unset LD_PRELOAD]"  # in the job

    run = redco_flow("run", "sums.yaml", "-p", "slurm", visible, "--json", environment=preloaded)

    assert json.loads(run.splitlines()[-1])["state"] == "completed"
    (journal,) = tmp_path.glob("redco-workspace/runs/*/journal.jsonl")
    assert "has completed; waits for exit.json to appear in" in journal.read_text()
