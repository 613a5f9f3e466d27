"""The real library with a database of its own; no job outlives its test."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KINDS = HERE.parent / "launch" / "kinds"
CLUSTER = HERE.parent / "cluster"
sys.path += [str(HERE), str(KINDS), str(CLUSTER)]  # jobs search where the submitter does

from tiny_stages.calls import make_attempt  # noqa: E402

from redco_flow.launch.call import JobResources  # noqa: E402
from redco_flow.launch.processes import kill_processes_of  # noqa: E402
from redco_flow.launch.xmanager.config import INSTALL, Config  # noqa: E402
from redco_flow.launch.xmanager.executor import XManagerExecutor  # noqa: E402


@pytest.fixture(scope="session")
def xmanager(tmp_path_factory):
    """XManager, with its database in the session's own home."""
    if importlib.util.find_spec("xmanager") is None:
        pytest.skip(f"the extra is not here: {INSTALL}")
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        yield home


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
def submit_secret(submit):
    return lambda value: submit("print_secret", environment={"TINY_API_TOKEN": value})


@pytest.fixture
def time_limit():
    """Part of a minute, so that the test needs no whole one."""
    return {"resources": JobResources(walltime_minutes=0.1)}


@pytest.fixture
def new_executor(xmanager, workspace):
    def new_executor(*, environment=None, stall_seconds=600, grace_seconds=5):
        return XManagerExecutor(
            workspace,
            Config(),
            variables={},
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
