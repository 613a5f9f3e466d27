"""The face that submitit's users know."""

import asyncio
import pickle

import pytest
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError
from tiny_stages.calls import wait_until

from redco_flow.errors import UsageError
from redco_flow.launch.executor import make_executor, reattach
from redco_flow.launch.local.executor import LocalExecutor
from redco_flow.spec.profile import profile_model


@pytest.fixture
def profile(workspace):
    return profile_model()(workspace=str(workspace), grace_seconds=5.0)


def test_a_profile_names_its_executor_and_submitit_knows_it_too(profile, workspace, tmp_path):
    executor = make_executor(profile, {"PATH": "/usr/bin:/bin"})

    auto = submitit.AutoExecutor(tmp_path, cluster="redco-local")

    assert isinstance(executor, LocalExecutor)
    assert executor.folder == workspace
    assert executor.parameters == {"stall_seconds": 1800, "grace_seconds": 5}
    assert isinstance(auto._executor, LocalExecutor)


def test_an_executor_whose_jobs_leave_nothing_elsewhere_has_nothing_to_clean(profile):
    with pytest.raises(UsageError, match="redco-local leave nothing outside the workspace"):
        make_executor(profile, {}).clean(dry_run=True)


@pytest.mark.parametrize("name", ["slrum", "../local", "errors"])
def test_an_unknown_executor_is_refused_with_the_known_ones(profile, name):
    with pytest.raises(UsageError, match="Known: hosts, local, slurm"):
        make_executor(profile.model_copy(update={"executor": name}), {})


@pytest.mark.parametrize("name", ["redco_flow.errors", "os.path"])
def test_a_module_that_is_no_executor_is_refused_with_what_it_lacks(profile, name):
    with pytest.raises(UsageError, match="lacks make and reattach"):
        make_executor(profile.model_copy(update={"executor": name}), {})


OF_LOCAL = {"executor": "local", "attempt": "runs/r/stages/s/attempts/1", "job_id": "1-1"}


@pytest.mark.parametrize("record", [{}, OF_LOCAL, OF_LOCAL | {"supervisor": {"pid": 1}}])
def test_what_is_no_job_record_is_refused(record):
    with pytest.raises(UsageError, match="not a job record"):
        reattach(record)


def test_a_job_has_submitits_paths_and_words(submit):
    job = submit("raise_beside_a_running_thread")

    error = job.exception()

    assert job.num_tasks == 1
    assert job.task(0) is job
    assert job.paths.folder == job.attempt.path
    assert job.paths.stdout == job.paths.stderr == job.attempt.log_path(0)
    assert job.submission().attempt == job.attempt
    assert job.get_info() == {"jobState": "FAILED"}
    assert isinstance(error, FailedJobError)
    assert "ValueError: the loss went away" in str(error)
    assert job.job_id in str(error)
    assert str(job.paths.stdout) in str(error)
    assert "_" not in job.job_id  # submitit reads that as a job array's index
    assert job.stderr() == job.stdout()


def test_a_cancelled_job_is_uncompleted_in_submitits_words(submit):
    job = submit("hang")

    job.cancel()

    assert type(job.exception()).__mro__.index(UncompletedJobError) > 0
    assert not isinstance(job.exception(), FailedJobError)


def test_a_job_travels_by_pickle_and_can_be_awaited(submit):
    job = pickle.loads(pickle.dumps(submit("write")))

    result = asyncio.run(job.awaitable().result(poll_interval=0.05))

    assert result["outputs"].keys() == {"dataset"}
    assert job.record() == reattach(job.record()).record()


def test_a_job_may_be_cancelled_when_its_last_handle_goes(submit):
    job = submit("hang").cancel_at_deletion()
    attempt = job.attempt

    del job

    wait_until(attempt.exit_path.exists)
    assert attempt.read_exit().cause == "cancelled"
