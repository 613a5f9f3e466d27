"""Which commit of a dataset a worker reads, with the hub and without it."""

import json
import os
import subprocess
import sys

import pytest

from tests.hub.conftest import DATASET, OFFLINE

pytestmark = pytest.mark.slow

ONLINE_SCRIPT = """
import sys, huggingface_hub
from redco_flow.stages.data.hub_rows import open_hub_dataset
name, first, second, third = sys.argv[1:]
open_hub_dataset(name, None, first), open_hub_dataset(name, None, second)
huggingface_hub.snapshot_download(name, repo_type="dataset", revision=third)
"""
OFFLINE_SCRIPT = """
import json, shutil, sys
from redco_flow import hub
from redco_flow.stages.data.hub_rows import open_hub_dataset
name, *commits = sys.argv[1:]
rows = [open_hub_dataset(name, None, commit)["train"].num_rows for commit in commits]
for folder in hub.prepared_datasets(commits[0]):
    shutil.rmtree(folder)
try:
    open_hub_dataset(name, None, commits[0])
except hub.HubUnreachable as error:
    print(json.dumps([rows, str(error)]))
"""


def test_without_the_hub_the_asked_commit_is_read_or_none(hub, command):
    """Fault 49. What `datasets` itself takes there is whatever commit it prepared last."""
    repository = hub.repository("datasets", DATASET)
    commits = [
        repository.commit({"train.jsonl": b'{"source": "a", "target": "b"}\n' * count})
        for count in (3, 5, 7)
    ]

    def run(script, **variables):
        words = [sys.executable, "-c", script, DATASET, *commits]
        environment = {**os.environ, **command.variables, **variables}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(ONLINE_SCRIPT)
    rows, error = json.loads(run(OFFLINE_SCRIPT, **OFFLINE).splitlines()[-1])

    assert rows == [3, 5, 7]  # prepared, prepared, and downloaded whole by `hf download`
    assert f"dataset '{DATASET}' at {commits[0]} is not in the cache" in error
    assert f"`hf download --repo-type dataset {DATASET} --revision {commits[0]}` fills it" in error
