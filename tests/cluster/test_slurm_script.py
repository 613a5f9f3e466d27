"""A user's script over several processes on the test cluster: one group, resumed as a whole."""

import os
import signal

import numpy as np
import pytest
from job_processes import held, processes_of
from orchestrate_runs import InProcess, Runs, until
from script_of_a_line import is_in_second_epoch, steps, write_line

from redco_flow.tracking.artifacts import ArtifactStore

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache", "slurm"),
]

GROUP = {
    "executor": "slurm",
    "slurm": {"processes_per_host": 2, "walltime_minutes": 5},
    "num_cpu_devices": 1,
    "retries": {"failed": 1},
}
OVERRIDES = ["stages.fit.arguments.num_epochs=4", "stages.fit.arguments.seconds=0.1"]


def test_a_script_of_two_processes_loses_one_and_goes_on_as_one_process_computes(tmp_path):
    """Fault 2, to its end: one new attempt, which goes on from the last checkpoint.

    Engine case 21, in the middle of steps that all ranks compute together. Two data shards in both
    runs, whose sums may be added in another order.
    """
    text = write_line(tmp_path)
    group, home = Runs(tmp_path / "group", GROUP), Runs(tmp_path / "home", {"num_cpu_devices": 2})
    for one in (group, home):
        one.folder.mkdir()
    driven = InProcess(group.write(text, OVERRIDES))
    attempt = until(lambda: driven.run.latest_attempt("fit"), 400)
    until(lambda: is_in_second_epoch(attempt, group.workspace), 400)

    with held(attempt, num_ranks=2) as workers:
        os.kill(workers[1], signal.SIGKILL)
    assert driven.end(400).state == "completed", "\n".join(driven.said)

    alone = InProcess(home.write(text, OVERRIDES))
    assert alone.end().state == "completed", "\n".join(alone.said)
    first, second = driven.run.attempts("fit")
    assert (first.read_exit().cause, first.read_exit().rank) == ("failed", 1)
    until(lambda: processes_of(first) == [])
    assert 8 < steps(second)[0] <= steps(first)[-1] + 1
    found, expected = (parameters(runs, one.run) for runs, one in ((group, driven), (home, alone)))
    assert found == pytest.approx(expected, rel=1e-5)


def parameters(runs, run):
    """What the stage published."""
    artifact = run.read_state()["stages"]["fit"]["artifacts"]["params"]
    return np.load(ArtifactStore(runs.workspace).get(artifact).path / "params.npy")
