"""A completed job's records that this host sees late, by a preloaded library (`tests/shims`)."""

import os
import subprocess
import sys
import time

import pytest

from redco_flow.errors import StageFailed
from redco_flow.orchestrate.run.attempt_files import await_result
from redco_flow.runtime.publication import write_result
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.results import StageResult, publish_result
from redco_flow.tracking.workspace import Workspace

AWAIT = """
import os, sys, time
from pathlib import Path
from redco_flow.orchestrate.run.attempt_files import await_result
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

seen = []
def while_waiting(text, seconds):
    if text not in seen:
        seen.append(text)
    time.sleep(seconds)

workspace, attempt = Workspace(Path(sys.argv[1])), AttemptDirectory(Path(sys.argv[2]))
os.utime(attempt.result_path)  # late from now on
result = await_result(workspace, attempt, seconds=400, while_waiting=while_waiting)
print(result.fingerprint)
print(*seen, sep="\\n")
"""


def test_each_record_of_a_completed_job_is_waited_for_and_read_again_where_it_is_stale(
    shim, tmp_path
):
    """Fault 55: the first opening of each file fails with ESTALE, too."""
    workspace = Workspace.open(tmp_path / "workspace")
    attempt = AttemptDirectory(tmp_path / "run/stages/s/attempts/1")
    attempt.path.mkdir(parents=True)
    (tmp_path / "numbers").write_text("1 2 3")
    artifact = ArtifactStore(workspace).publish("numbers", tmp_path / "numbers")
    outputs = {"numbers": artifact.id}
    result = StageResult("f" * 64, "p", "s", "script", ingredients={}, outputs=outputs)
    write_result(attempt, publish_result(workspace, result))

    late = {"LATE_FILES": "1/result.json:/results/f:/files/numbers", "LATE_SECONDS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", AWAIT, workspace.root, attempt.path],
        env={**os.environ, "LD_PRELOAD": shim("late_files"), **late},
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.stdout.splitlines()[0] == "f" * 64, done.stderr
    assert f"result.json to appear in {attempt.path}" in done.stdout


def test_records_that_never_appear_are_named_with_their_directory_and_the_time(tmp_path):
    attempt = AttemptDirectory(tmp_path / "run/stages/s/attempts/1")
    waits = []

    def while_waiting(text, seconds):
        waits.append(text)
        time.sleep(seconds)

    with pytest.raises(StageFailed, match=rf"result.json is not visible in {attempt.path} after 1"):
        await_result(Workspace(tmp_path), attempt, seconds=1.0, while_waiting=while_waiting)
    with pytest.raises(StageFailed, match=rf"is not visible in {attempt.path}\. "):
        await_result(Workspace(tmp_path), attempt, seconds=0.0, while_waiting=pytest.fail)

    assert waits
