"""The command as a person runs it: a process of its own, in a directory of its own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

KINDS = Path(__file__).parent.parent / "orchestrate" / "kinds"
sys.path.append(str(KINDS))  # for what a test plans or runs in its own process
PIPELINE = """\
name: sums
stages:
  numbers: {kind: orchestrate_kinds.numbers, count: 3}
  total:
    kind: orchestrate_kinds.total
    learning_rate: 2.0
"""


@dataclass
class Command:
    """redco-flow in `folder`, with a workspace there."""

    folder: Path

    def start(self, *words, **options):
        environment = {**os.environ, "PYTHONPATH": str(KINDS), **options.pop("environment", {})}
        return subprocess.Popen(
            [sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def __call__(self, *words, code=0, timeout=500, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == code, f"{words}: exit {process.returncode}\n{out}\n{err}"
        return out if code == 0 else err

    def json(self, *words, **options):
        return json.loads(self(*words, "--json", **options).splitlines()[-1])


def wait_for(look, seconds=400):
    """Wait for what another process does; return what `look` then sees."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return found


@pytest.fixture
def command(tmp_path):
    (tmp_path / "sums.yaml").write_text(PIPELINE)
    return Command(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of the pipeline, and the command beside it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "sums.yaml").write_text(PIPELINE)
    command = Command(folder)
    return command, command.json("run", "sums.yaml")
