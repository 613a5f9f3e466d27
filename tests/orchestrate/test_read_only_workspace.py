"""A workspace whose file system becomes read-only while a run goes on, as after a disk's error."""

import subprocess

import pytest
from orchestrate_runs import TWO_STAGES, events, until, wait_for_end, wait_for_stage

from redco_flow.launch.processes import processes_of
from redco_flow.orchestrate.run.start import spawn
from redco_flow.tracking.locks import find_holder

pytestmark = pytest.mark.slow


@pytest.fixture
def freeze(runs):
    """Lay a read-only view over the workspace; what is returned takes it away.

    A file that is open stays writable, as a log's on a disk with some room left.
    """
    folder = str(runs.workspace.root)
    mounted = []

    def freeze():
        for options in (["--bind", folder], ["-o", "remount,bind,ro"]):
            done = subprocess.run(["mount", *options, folder], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"only root can mount: {done.stderr.strip()}")
            if not mounted:
                mounted.append(folder)
        return thaw

    def thaw():
        while mounted:
            subprocess.run(["umount", "--lazy", mounted.pop()], check=True)

    yield freeze
    thaw()


def test_a_run_whose_workspace_becomes_read_only_says_where_and_is_resumed_to_its_end(
    runs, freeze, tmp_path
):
    """Fault 16, of our own records: the log names the path, and nothing is lost."""
    executions = tmp_path / "executions"
    run = runs.start(
        TWO_STAGES, [f"train.gate={tmp_path / 'gate'}", f"preprocess.executions={executions}"]
    )
    wait_for_stage(run, "train")
    attempt = run.latest_attempt("train")
    recorded = events(run)

    thaw = freeze()
    (tmp_path / "gate").touch()
    until(lambda: find_holder(run) is None)
    until(lambda: not any(processes_of(attempt.path)))
    told = run.log_path.read_text()
    thaw()

    assert f"{run.path}" in told
    assert "cannot be written (Read-only file system)" in told
    assert f"`redco-flow resume {run.id}`" in told
    assert f"Read-only file system: '{runs.workspace.root}" in attempt.log_path().read_text()
    assert events(run) == recorded
    spawn(run)
    assert wait_for_end(run)["state"] == "completed"
    assert len(executions.read_text().splitlines()) == 1
