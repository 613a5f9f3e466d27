"""A disk that is full before a run starts is named by `run`, `resume` and `status`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redco_flow.launch.disk_reserve import full_disk, full_disks
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cluster.small_disk import fill, small_disk

TAKE_LEASE = """
import os, pathlib, sys
from redco_flow.tracking.locks import acquire
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.workspace import Workspace

acquire(find_run(Workspace(pathlib.Path(sys.argv[1])), sys.argv[2]))
os._exit(0)
"""


def command(workspace, *words):
    line = [sys.executable, "-P", "-m", "redco_flow.cli.main", *words]
    own = os.environ | {"REDCO_FLOW_WORKSPACE": str(workspace)}
    done = subprocess.run(line, env=own, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_on_a_full_disk_is_refused_with_the_free_bytes(tmp_path):
    with small_disk(tmp_path / "small", 120 << 10) as workspace:
        code, said = command(workspace, "run", "quickstart")

        assert code == 2
        assert f"the disk of {workspace} is full: " in said
        assert "bytes are free, and the records of a run need 262,144" in said
        assert list(workspace.glob("runs/*")) == []


@pytest.mark.slow
def test_resume_and_status_name_the_full_disk(tmp_path):
    with small_disk(tmp_path / "small", 1 << 20) as folder:
        run = RunDirectory.create(Workspace.open(folder), "demo")
        run.write_state(run.read_state() | {"state": "running"})
        # A launcher that was killed: its lease is there, and its process is not.
        subprocess.run([sys.executable, "-c", TAKE_LEASE, folder, run.id], check=True)
        fill(folder / "another-users")

        code, resumed = command(folder, "resume", run.id)
        _, status = command(folder, "status", run.id)

    assert code == 2
    assert f"the disk of {run.path} is full: 0 bytes are free" in resumed
    assert f"the disk of {run.path} is full: 0 bytes are free" in status


def test_a_file_system_that_reports_no_size_is_not_full():
    """Some in user space do not; /proc does not either."""
    assert full_disk(Path("/proc")) == ""
    assert Path("/proc") not in full_disks(Path("/proc"))
