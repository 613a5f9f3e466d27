"""One real Slurm cluster for all tests of this folder; none of its jobs outlives its test."""

import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KINDS = [HERE.parent / layer / "kinds" for layer in ("launch", "orchestrate")]
sys.path += map(str, [HERE, *KINDS])  # jobs and launchers search where this process does

from orchestrate_runs import Runs, executions, gate, held, kill_launcher  # noqa: E402, F401
from slurm_cluster import INSTALL, missing_programs, running_cluster  # noqa: E402
from tiny_stages.calls import make_attempt  # noqa: E402

from redco_flow.launch.call import JobResources  # noqa: E402
from redco_flow.launch.slurm.config import Config  # noqa: E402
from redco_flow.launch.slurm.executor import SlurmExecutor  # noqa: E402


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The cluster that the session's tests share, found through SLURM_CONF."""
    if missing := missing_programs():
        pytest.skip(f"not here: {', '.join(missing)}; {INSTALL}")
    with pytest.MonkeyPatch.context() as patch, running_cluster() as cluster:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


@pytest.fixture
def slurm(cluster):
    """The cluster with every node up and no job at the start, and no job at the end."""
    try:
        cluster.wait_until_idle(seconds=60)
    except RuntimeError as error:  # a test before this one, or the machine, has hurt it
        warnings.warn(f"the cluster is started anew: {error}", stacklevel=1)
        cluster.start_anew()
    yield cluster
    print(cluster.log_ends())  # pytest shows it with a test that failed
    for job_id in cluster.jobs():
        with suppress(RuntimeError):  # it has just ended
            cluster.run("scancel", "--quiet", "--full", "--signal=KILL", job_id)
            cluster.run("scancel", "--quiet", job_id)


@pytest.fixture
def strict_site(tmp_path):
    """A profile's settings where Python is in job steps only, needs `setup`, and --export=NONE."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    needs = '"$SLURM_STEP_ID" && "$SITE_MODULES" = loaded && "$GREETING" = "it\'s here"'
    python.write_text(f'#!/bin/bash\n[[ {needs} ]] || exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    slurm = {
        "python": str(python),
        "setup": ["export SITE_MODULES=loaded"],
        "options": ["--export=NONE"],
    }
    return {"environment": {"GREETING": "it's here"}, "slurm": slurm}


@pytest.fixture
def runs(slurm, tmp_path):
    """Runs on the cluster; none of their launchers outlives the test."""
    runs = Runs(tmp_path, {"executor": "slurm"})
    yield runs
    for run in runs.started:
        kill_launcher(run)


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
    """A minute, the shortest time that Slurm gives; the warning comes once the worker is there."""
    resources = JobResources(walltime_minutes=1)
    return {"resources": resources, "settings": {"warning_seconds": 30}, "grace_seconds": 20}


@pytest.fixture
def new_executor(slurm, workspace):
    def new_executor(*, environment=None, stall_seconds=600, grace_seconds=5, settings=None):
        return SlurmExecutor(
            workspace,
            Config(**(settings or {})),
            environment=os.environ | (environment or {}),
            stall_seconds=stall_seconds,
            grace_seconds=grace_seconds,
        )

    return new_executor


@pytest.fixture
def submit(workspace, new_executor):
    """Submit an action of the tiny stage as a Slurm job."""

    def submit(
        action="write",
        *,
        environment=None,
        stall_seconds=600,
        grace_seconds=5,
        settings=None,
        **call,
    ):
        attempt = make_attempt(workspace, action, **call)
        executor = new_executor(
            environment=environment,
            stall_seconds=stall_seconds,
            grace_seconds=grace_seconds,
            settings=settings,
        )
        return executor.submit_call(attempt)

    return submit
