"""A user's script on hosts that share no disk with the launcher: it comes with what it needs."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from orchestrate_runs import InProcess, Runs
from script_of_a_line import write_line

from redco_flow.tracking.artifacts import ArtifactStore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_script_its_modules_and_its_files_reach_two_hosts_and_its_output_comes_back(
    ssh_hosts, on_hosts_environment
):
    folder = Path(tempfile.mkdtemp(prefix="script-", dir=ssh_hosts.private))
    text = write_line(folder)
    profile = {
        "executor": "hosts",
        "hosts": ssh_hosts.profile(),
        "environment": on_hosts_environment,
        "num_cpu_devices": 1,
    }
    runs = Runs(folder, profile)

    driven = InProcess(runs.write(text, ["stages.fit.resources.num_hosts=2"]))

    assert driven.end(400).state == "completed", "\n".join(driven.said)
    stage = driven.run.read_state()["stages"]["fit"]
    made = ArtifactStore(runs.workspace).get(stage["artifacts"]["params"]).path
    assert np.load(made / "params.npy").shape == (2,)
    assert driven.run.attempt("fit", 1).read_progress()["devices"] == "2 × cpu"
    assert stage["metrics"].keys() == {"loss", "eval_loss"}
