"""Two nodes run one pipeline on a file system whose flock is absent or ends at the node."""

import os
import subprocess
import sys
from pathlib import Path

from orchestrate_runs import until

KINDS = Path(__file__).parent / "kinds"
PIPELINE = """\
name: once
stages:
  preprocess: {{kind: orchestrate_kinds.numbers, executions: {0}/executions, gate: {0}/gate}}
"""
RUN = """
import sys
from pathlib import Path
from orchestrate_runs import InProcess, Runs

folder, text = Path(sys.argv[1]), sys.argv[2]
driven = InProcess(Runs(folder).write(text))
print(driven.end(seconds=300).state)
"""


def test_two_nodes_without_a_common_flock_compute_a_stage_once(shim, tmp_path):
    """Fault 56: flock is absent on the first node, and ends at the second."""
    preloaded = {"LD_PRELOAD": shim("node_locks"), "FLOCK_FOLDER": str(tmp_path)}
    workspace, started = tmp_path / "workspace", []

    def start(**node):
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, tmp_path, PIPELINE.format(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(KINDS), **preloaded, **node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)

    start(FLOCK="absent")
    until((workspace / ".locks.json").exists)
    start(FLOCK="local", NODE="b")
    states = workspace.glob
    until(lambda: any("waits for" in path.read_text() for path in states("runs/*/state.json")))
    (tmp_path / "gate").touch()
    outputs = [process.communicate(timeout=500) for process in started]

    assert [out for out, _ in outputs] == ["completed\n", "completed\n"], outputs
    assert len((tmp_path / "executions").read_text().splitlines()) == 1
