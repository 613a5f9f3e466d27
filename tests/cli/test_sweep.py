"""`redco-flow run --sweep` as a person uses it: one run per point, compared at the end."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import wait_for

pytestmark = pytest.mark.slow

GATED = """\
name: sums
stages:
  numbers: {{kind: orchestrate_kinds.numbers, count: 3, executions: {folder}/executions}}
  total:
    kind: orchestrate_kinds.total
    learning_rate: 2.0
    executions: {folder}/executions
    gate: {gate}
"""


@pytest.fixture
def gated(command):
    """A pipeline whose second stage waits for the file `gate`; what runs is noted."""
    folder = command.folder

    def write(gate="null"):
        (folder / "sums.yaml").write_text(GATED.format(folder=folder, gate=gate))
        return command

    return write


def executions(command, stage):
    path = command.folder / "executions"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(line.split()[0] == stage for line in lines)


def status(command, sweep):
    return command.json("status", sweep)


def states(view):
    return [point["state"] for point in view["points"]]


def test_a_sweep_runs_every_point_computes_what_they_share_once_and_tells_the_best(gated):
    command = gated()

    view = command.json(
        "run", "sums.yaml", "--sweep", "learning_rate=1.0,3.0,2.0", "--max-parallel", "2"
    )

    assert view["state"] == "completed"
    assert [point["point"] for point in view["points"]] == [
        ["learning_rate=1.0"], ["learning_rate=3.0"], ["learning_rate=2.0"],
    ]  # fmt: skip
    assert executions(command, "numbers") == 1
    assert executions(command, "total") == 3
    totals = [point["metrics"]["total"] for point in view["points"]]
    assert totals == [6.0, 18.0, 12.0]
    best = {"point": ["learning_rate=3.0"], "run": view["points"][1]["run"]}
    assert view["best"] == {"total": {"is": "highest", "value": 18.0, **best}}
    text = command("status", view["sweep"])
    assert "3 of 3 points completed" in text
    assert "highest total: 18  learning_rate=3.0" in text
    for point in view["points"]:
        assert point["run"] in text
    assert command("ls").count(view["sweep"]) == 3
    workspace = command.folder / "redco-workspace"
    page = workspace / "sweeps" / view["sweep"] / "report.html"
    assert "best total" in page.read_text(encoding="utf-8")
    first, *others = [workspace / "runs" / point["run"] for point in view["points"]]
    for run in others:  # a point has no page of its own, and no inodes for what all points share
        assert not (run / "report.html").exists()
        for name in ("launch.json", "origins.json", "plan.json"):
            assert (run / name).samefile(first / name)


def test_mistakes_of_all_points_are_told_at_once_and_nothing_starts(command):
    said = command(
        "run", "sums.yaml", "--sweep", "learning_rate=fast,1.0,slow", "--sweep", "count=0,1",
        code=2,
    )  # fmt: skip

    for mistake in ("fast", "slow", "count"):
        assert mistake in said
    assert not list((command.folder / "redco-workspace" / "runs").glob("*"))
    assert not (command.folder / "redco-workspace" / "sweeps").exists()


def test_no_more_than_max_parallel_points_run_at_once_and_a_sweep_can_be_cancelled(gated):
    command = gated(gate="gate")
    words = ["run", "sums.yaml", "--sweep", "learning_rate=1.0,2.0,3.0", "--max-parallel", "1"]
    sweep = command(*words, "--detach").strip()
    wait_for(lambda: executions(command, "total") == 1)

    during = status(command, sweep)
    command("cancel", sweep)
    after = status(command, sweep)

    assert states(during) == ["running", "waiting", "waiting"]
    assert states(after) == ["cancelled"] * 3
    assert executions(command, "total") == 1


def test_a_failed_point_does_not_stop_the_others_and_resuming_tries_it_again(gated):
    command = gated(gate="gate")
    words = ["run", "sums.yaml", "--sweep", "learning_rate=1.0,2.0", "--max-parallel", "2"]
    sweep = command(*words, "--detach").strip()
    wait_for(lambda: executions(command, "total") == 2)
    lines = (command.folder / "executions").read_text().splitlines()
    worker = int(next(line.split()[2] for line in lines if line.startswith("total")))

    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: "failed" in states(status(command, sweep)))
    (command.folder / "gate").touch()
    wait_for(lambda: sorted(states(status(command, sweep))) == ["completed", "failed"])
    wait_for(lambda: status(command, sweep)["state"] == "failed")
    view = json.loads(command("resume", sweep, "--json").splitlines()[-1])

    assert view["state"] == "completed"
    assert states(view) == ["completed", "completed"]
    assert executions(command, "numbers") == 1


def test_a_sweep_whose_launcher_was_killed_is_taken_up_where_it_stood(gated):
    command = gated(gate="gate")
    words = ["run", "sums.yaml", "--sweep", "learning_rate=1.0,2.0", "--max-parallel", "1"]
    sweep = command(*words, "--detach").strip()
    wait_for(lambda: executions(command, "total") == 1)
    folder = Path(command.folder) / "redco-workspace" / "sweeps" / sweep

    os.kill(json.loads((folder / "lease.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: status(command, sweep)["state"] == "interrupted")
    (command.folder / "gate").touch()
    view = json.loads(command("resume", sweep, "--json").splitlines()[-1])

    assert states(view) == ["completed", "completed"]
    assert executions(command, "total") == 2


def test_a_sweep_continues_in_a_workspace_that_was_moved(gated):
    command = gated(gate="gate")
    words = ["run", "sums.yaml", "--sweep", "learning_rate=1.0,2.0", "--max-parallel", "2"]
    sweep = command(*words, "--detach").strip()
    wait_for(lambda: executions(command, "total") == 2)
    command("cancel", sweep)
    workspace = command.folder / "redco-workspace"
    moved = workspace.rename(command.folder / "moved")
    (command.folder / "gate").touch()

    view = json.loads(command("resume", sweep, "--json", "-w", str(moved)).splitlines()[-1])

    assert states(view) == ["completed", "completed"]
    assert executions(command, "numbers") == 1
    assert not workspace.exists()


def test_a_sweep_ahead_without_a_queue_and_a_throttle_without_a_sweep_are_refused(command):
    sweep = ("run", "sums.yaml", "--sweep", "learning_rate=1.0,2.0")

    for dry in ((), ("-n",)):
        assert "cannot have jobs wait for each other" in command(*sweep, *dry, "--ahead", code=2)
    assert "--max-parallel is for" in command("run", "sums.yaml", "--max-parallel", "2", code=2)
    assert not list((command.folder / "redco-workspace" / "runs").glob("*"))


def test_a_dry_run_of_a_sweep_prints_the_plan_of_each_point(command):
    said = command("run", "sums.yaml", "-n", "--sweep", "learning_rate=1.0,2.0")

    assert "--- learning_rate=1.0" in said
    assert "--- learning_rate=2.0" in said
    assert said.count("total") == 2
    assert "--- at most 2 of 2 points at a time" in said


def test_a_dry_run_on_a_cluster_tells_which_jobs_would_be_submitted_and_writes_nothing(command):
    words = ["run", "sums.yaml", "-p", "slurm", "-n", "--max-parallel", "3"]
    words += ["--sweep", "learning_rate=1.0,2.0,3.0,4.0"]
    resources = ["--sweep", "total.resources.cpus_per_host=1,2"]

    plain = command(*words)
    grouped = command(*words, *resources, "total.resources.memory_gib=1")
    record = json.loads(command(*words, "--json").splitlines()[-1])

    assert plain.endswith(
        "--- at most 3 of 4 points at a time\n"
        "--- would be submitted at once\n"
        "numbers: 1 job, for 4 points\n"
        "total: 4 jobs, after numbers\n"
    )
    assert "total: 4 jobs, for 8 points, after numbers\n" in grouped
    waits = {"upstream": ["numbers"]}
    assert record["jobs"][1] == {"stage": "total", "points": 4, "jobs": 4} | waits
    assert record["at_once"] == 3
    for folder in ("runs", "sweeps"):
        assert not list((command.folder / "redco-workspace").glob(f"{folder}/*"))
