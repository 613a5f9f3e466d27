"""An executor of one's own: every job is a process of low priority on this machine."""

import os
import signal
import subprocess
from typing import Annotated

from pydantic import Field

from redco_flow.errors import DoesNotFit
from redco_flow.launch.config import ExecutorConfig
from redco_flow.launch.executor import CallExecutor, common_settings, job_environment
from redco_flow.launch.job import CallJob, JobStatus, status_from_files, status_without_supervisor
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now


class Config(ExecutorConfig):
    """The section `settings` of a profile with this executor.

    Args:
        niceness: 0 to 19, which is the lowest priority.
    """

    niceness: Annotated[int, Field(ge=0, le=19)] = 10

    def check_fits(self, resources):
        """Raise where the job is more than one process."""
        if resources.num_processes > 1:
            raise DoesNotFit("a job under nice is one process: set resources.num_hosts to 1.")


class NiceJob(CallJob):
    """A job, found again from any process by the files of its attempt."""

    def status(self):
        """Say what exit.json says, else what the process table says."""
        process = ProcessIdentity.from_json(self.record()["process"])
        if status := status_from_files(self.attempt):
            return status
        if process.is_alive():
            return JobStatus(State.RUNNING, f"runs as {process}.", source="process table")
        # It may have written exit.json between the two looks.
        return status_from_files(self.attempt) or status_without_supervisor(
            self.attempt, f"{process} was killed; `redco-flow resume` goes on."
        )

    def cancel(self, check=True):  # noqa: FBT002 (submitit's signature)
        """Ask the job to stop; a second call kills it."""
        process = ProcessIdentity.from_json(self.record()["process"])
        if process.is_alive():
            write_json(self.attempt.cancel_path, {"time": utc_now()})
            os.kill(process.pid, signal.SIGTERM)
        if check:
            self.wait()

    def record(self):
        """Return the content of job.json."""
        return dict(self.attempt.read_job() or {})


class NiceExecutor(CallExecutor):
    """Starts each call under `nice`."""

    job_class = NiceJob

    @classmethod
    def name(cls):
        """Return the name for submitit's AutoExecutor."""
        return "nice"

    def render(self, attempt, title, resources):
        """Return what would be started."""
        return f"# {title}\nnice -n {self._config.niceness} redco_flow.launch.supervisor\n"

    def _submit(self, attempt):
        attempt = AttemptDirectory(attempt.path.absolute())
        attempt.logs.mkdir(exist_ok=True)
        process = subprocess.Popen(
            ["nice", "-n", str(self._config.niceness), *self.supervisor_command(attempt)],
            env=job_environment(self._environment, attempt),
            start_new_session=True,  # it outlives this process
        )
        record = {
            "executor": __name__,
            "job_id": str(process.pid),
            "attempt": str(attempt.path),
            "process": ProcessIdentity.of(process.pid).to_json(),
            "submitted_at": utc_now(),
        }
        write_json(attempt.job_path, record)
        return NiceJob(attempt.path, record["job_id"])


def make(profile, environment):
    """Return the executor for a profile; `environment` is what its jobs inherit."""
    return NiceExecutor(profile.workspace, profile.section, **common_settings(profile, environment))


def reattach(record):
    """Return the job of a record, from any process."""
    return NiceJob(record["attempt"], record["job_id"])
