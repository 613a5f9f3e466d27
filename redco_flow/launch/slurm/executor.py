"""Submit stage calls to a Slurm cluster.

Slurm itself queues a job again that it preempts or whose node dies; that stays the same attempt,
for the job's place in the queue and its log are the same, and nothing needs a launcher. Every
other ending is final, and trying again is the orchestrator's. A job whose submission was refused
for a while is submitted again by its `status`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from redco_flow.errors import RedcoFlowError, StageFailed
from redco_flow.launch.call import Call, JobResources, read_call, write_call
from redco_flow.launch.executor import (
    CallJob,
    ChainingExecutor,
    check_submittable,
    common_settings,
    job_environment,
)
from redco_flow.launch.host_facts import Finding
from redco_flow.launch.rendezvous import ADDRESS_VARIABLE
from redco_flow.launch.slurm import queue
from redco_flow.launch.slurm.array import SlurmArray
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.doctor import examine_slurm
from redco_flow.launch.slurm.job import SlurmJob
from redco_flow.launch.slurm.limits import ask_site
from redco_flow.launch.slurm.resubmission import Resubmission
from redco_flow.launch.slurm.script import JOB_LOG, Submission, render
from redco_flow.launch.slurm.split_array import SplitArray, link_tasks
from redco_flow.records import write_json, write_text
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.process_identity import utc_now

SCRIPT = "job.sh"
_OF_AN_OUTER_JOB = ("SLURM_", "SBATCH_", "SRUN_")


class SlurmExecutor(ChainingExecutor):
    """Submits each call as a job of its own, or as an array of jobs where it has shards.

    Args:
        folder: the workspace, on a file system that every node has.
        config: the profile's `slurm:` section.
        common: as `CallExecutor`; sbatch hands the environment on, and the script has `variables`.
    """

    job_class = SlurmJob
    _config: Config

    @classmethod
    def name(cls) -> str:
        """Return the name for submitit's AutoExecutor, whose own `slurm` pickles."""
        return "redco-slurm"

    def examine(self, gpus_per_host: int) -> Iterator[Finding]:
        """Yield one finding a check: the partition, and what a short job on two nodes sees."""
        yield from examine_slurm(self._config, self.folder, gpus_per_host, self._job)

    def render(self, attempt: AttemptDirectory, title: str, resources: JobResources) -> str:
        """Return the sbatch file that `submit_call` would submit.

        Raises:
            UsageError: a path holds what such a file cannot carry.
        """
        return render(self._submission(attempt, title, resources))

    def render_after(
        self,
        attempt: AttemptDirectory,
        title: str,
        resources: JobResources,
        upstream: Sequence[str],
    ) -> str:
        """Return the sbatch file that `submit_call_after` would submit.

        Raises:
            UsageError: a path holds what such a file cannot carry.
        """
        return render(self._submission(attempt, title, resources, upstream))

    def submit_call_after(
        self,
        attempt: AttemptDirectory,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob] = (),
    ) -> CallJob:
        """Submit a call with `--dependency=afterok` on the upstream jobs, `afterany` on others.

        Raises:
            UsageError: there is no call.json, or the attempt was submitted before.
            StageFailed: Slurm refuses it, or never got an upstream job.
            ClusterUnreachable: Slurm's commands are not here.
        """
        check_submittable(attempt)
        return self._submit(attempt, _with_ids(upstream), _known(after_end))

    def _submit(
        self,
        attempt: AttemptDirectory,
        upstream: Sequence[CallJob] = (),
        after_end: Sequence[CallJob] = (),
    ) -> CallJob:
        attempt = AttemptDirectory(attempt.path.absolute())
        call = read_call(attempt.call_path)
        _write_tasks(attempt, call)
        size = self._array_size(call.resources)
        if size is None:
            return self._submit_job(attempt, call, upstream, after_end)
        return self._submit_arrays(attempt, call, size, upstream, after_end)

    def _array_size(self, resources: JobResources) -> int | None:
        """Return how many tasks each array of a stage has; None where one array has them all."""
        if not resources.shards:
            return None
        return ask_site(self._environment).array_size(self._config.request(resources))

    def _submit_arrays(
        self,
        attempt: AttemptDirectory,
        call: Call,
        size: int,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob],
    ) -> CallJob:
        shards = call.resources.shards
        arrays = [shards[start : start + size] for start in range(0, len(shards), size)]

        def submit(number: int) -> SlurmArray:
            tasks = tuple(range(len(arrays[number])))
            part = replace(call, resources=replace(call.resources, shards=tasks))
            array = link_tasks(attempt, number, arrays[number])
            write_call(array, part)
            # `max_array_tasks` is for all arrays of the stage: one begins after the other.
            before = job.arrays[-1:] if self._config.max_array_tasks else []
            given = (array, part, upstream, [*after_end, *before])
            return cast("SlurmArray", self._submit_job(*given))

        record = self._record(attempt, "") | {"arrays": arrays}
        write_json(attempt.job_path, record)
        submissions = [functools.partial(submit, number) for number in range(len(arrays))]
        job = SplitArray(attempt.path, arrays, record, submissions)
        try:
            job.submit()
        except (RedcoFlowError, OSError):
            attempt.job_path.unlink()
            raise
        return job

    def _submit_job(
        self,
        attempt: AttemptDirectory,
        call: Call,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob],
    ) -> CallJob:
        """Submit one job, or one array, in the directory of the attempt or of the array."""
        title = f"{call.run} {call.stage} {call.attempt}"

        def sbatch() -> str:
            waits_for = (_without_ended(upstream, completed=True), _without_ended(after_end))
            submission = self._submission(attempt, title, call.resources, *waits_for)
            write_text(attempt.path / SCRIPT, render(submission))
            return queue.submit(attempt.path / SCRIPT, self._job_environment(attempt.whole))

        (attempt.path / JOB_LOG).parent.mkdir(exist_ok=True)
        name = self._submission(attempt, title, call.resources).job_name
        record = self._record(attempt, name) | {"shards": list(call.resources.shards)}
        # Before sbatch: a record without an id is looked up by its name.
        write_json(attempt.job_path, record)
        try:
            job_id = sbatch()
        except queue.TryLater as refusal:
            # It may have been accepted all the same; the record stays, and with it the name.
            job = reattach(record)
            assert not isinstance(job, SplitArray)
            job.retry_submission(Resubmission(sbatch, refusal))
            return job
        except (RedcoFlowError, OSError):
            attempt.job_path.unlink()
            raise
        write_json(attempt.job_path, record | {"job_id": job_id})
        return reattach(record | {"job_id": job_id})

    def _record(self, attempt: AttemptDirectory, job_name: str) -> dict[str, Any]:
        return {
            "executor": "slurm",
            "job_id": "",
            "job_name": job_name,
            "attempt": str(attempt.path),
            "cluster": self._cluster,
            "submitted_at": utc_now(),
        }

    def _submission(
        self,
        attempt: AttemptDirectory,
        title: str,
        resources: JobResources,
        upstream: Sequence[str] = (),
        after_end: Sequence[str] = (),
    ) -> Submission:
        return Submission(
            attempt=attempt.path.absolute(),
            title=title,
            directory=Path.cwd(),
            resources=resources,
            settings=self._config,
            stall_seconds=self.parameters["stall_seconds"],
            grace_seconds=self.parameters["grace_seconds"],
            upstream=tuple(upstream),
            after_end=tuple(after_end),
            variables=self._exports(attempt),
        )

    def _job(
        self, attempt: AttemptDirectory, title: str, resources: JobResources
    ) -> tuple[Submission, Mapping[str, str]]:
        return self._submission(attempt, title, resources), self._job_environment(attempt)

    def _exports(self, attempt: AttemptDirectory) -> dict[str, str]:
        """Return the variables of every job, whatever `--export` in slurm.options leaves out."""
        inherited = job_environment({**self._environment, **self._variables}, attempt)
        names = [*self._variables, *job_environment({}, attempt)]
        address = self._config.rendezvous_address
        named = {ADDRESS_VARIABLE: address} if address else {}
        return {name: inherited[name] for name in names} | named

    @property
    def _cluster(self) -> str:
        return self._environment.get("SLURM_CONF", "")

    def _job_environment(self, attempt: AttemptDirectory) -> dict[str, str]:
        return dict(_without_outer_job(job_environment(self._environment, attempt)))


def make(profile: Profile, environment: Mapping[str, str]) -> SlurmExecutor:
    """Return the executor for a profile."""
    common = common_settings(profile, environment)
    variables = profile.environment
    return SlurmExecutor(profile.workspace, profile.section, variables=variables, **common)


def reattach(record: Mapping[str, Any]) -> SlurmJob | SlurmArray | SplitArray:
    """Return the job of a record, from any process.

    Raises:
        KeyError: it is not a Slurm job's record.
    """
    if arrays := record.get("arrays"):
        return SplitArray(record["attempt"], arrays, record)
    if shards := record.get("shards"):
        return SlurmArray(record["attempt"], record["job_id"], shards, record)
    return SlurmJob(record["attempt"], record["job_id"], record=record)


def _with_ids(jobs: Sequence[CallJob]) -> list[CallJob]:
    """Return the jobs with their ids; of one whose submission got no answer, once it is known.

    Raises:
        StageFailed: Slurm never got one of them.
    """
    parts = [one for job in jobs for one in (job.arrays if isinstance(job, SplitArray) else [job])]
    found = [SlurmJob(part.attempt.path, part.job_id) for part in parts]
    for job in found:
        job.wait_for_id()
    return list(found)


def _known(jobs: Sequence[CallJob]) -> list[CallJob]:
    """Return those jobs that Slurm got."""
    found = []
    for job in jobs:
        with suppress(StageFailed):
            found += _with_ids([job])
    return found


def _without_ended(jobs: Sequence[CallJob], *, completed: bool = False) -> tuple[str, ...]:
    """Return the ids of jobs that others can wait for: Slurm forgets those that have ended.

    Args:
        completed: leave out only those that completed.
    """
    causes = {job.job_id: job.attempt.cause for job in jobs}
    return tuple(
        job_id
        for job_id, cause in causes.items()
        if cause is None or (completed and cause is not Cause.COMPLETED)
    )


def _write_tasks(attempt: AttemptDirectory, call: Call) -> None:
    """Give each task of an array its call, in a directory of its own."""
    for shard in call.resources.shards:
        task = attempt.task(shard)
        (task.path / JOB_LOG).parent.mkdir(parents=True, exist_ok=True)
        write_call(task, replace(call, shard=shard))


def _without_outer_job(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The environment without what an interactive job, in which the launcher may run, has set."""
    for name, value in environment.items():
        if name == "SLURM_CONF" or not name.startswith(_OF_AN_OUTER_JOB):
            yield name, value
