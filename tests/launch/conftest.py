"""Real jobs of a tiny stage, none of which outlives its test."""

import os
import sys
from pathlib import Path

import pytest

KINDS = Path(__file__).parent / "kinds"
sys.path.append(str(KINDS))  # jobs search where the submitting process does

from tiny_stages.calls import make_attempt  # noqa: E402

from redco_flow.launch.call import JobResources  # noqa: E402
from redco_flow.launch.local.executor import LocalExecutor  # noqa: E402
from redco_flow.launch.processes import kill_processes_of  # noqa: E402


@pytest.fixture
def workspace(tmp_path):
    return tmp_path / "workspace"


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def written(workspace):
    return [workspace]


@pytest.fixture
def attempt_of():
    return lambda job: job.attempt


@pytest.fixture
def time_limit():
    """Part of a minute, so that the test needs no whole one."""
    return {"resources": JobResources(walltime_minutes=0.1)}


@pytest.fixture
def submit_secret(submit):
    return lambda value: submit("print_secret", environment={"TINY_API_TOKEN": value})


@pytest.fixture
def new_executor(workspace):
    def new_executor(*, environment=None, stall_seconds=600, grace_seconds=5):
        return LocalExecutor(
            workspace,
            environment=os.environ | (environment or {}),
            stall_seconds=stall_seconds,
            grace_seconds=grace_seconds,
        )

    return new_executor


@pytest.fixture
def submit(workspace, new_executor):
    """Submit an action of the tiny stage; whatever still runs at the end is killed."""
    attempts = []

    def submit(action="write", *, environment=None, stall_seconds=600, grace_seconds=5, **call):
        attempt = make_attempt(workspace, action, **call)
        attempts.append(attempt)
        executor = new_executor(
            environment=environment, stall_seconds=stall_seconds, grace_seconds=grace_seconds
        )
        return executor.submit_call(attempt)

    yield submit
    for attempt in attempts:
        kill_processes_of(attempt.path)
