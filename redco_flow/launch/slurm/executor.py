"""Submit stage calls to a Slurm cluster.

Slurm itself queues a job again that it preempts or whose node dies; that stays the same attempt,
for the job's place in the queue and its log are the same, and nothing needs a launcher. Every
other ending is final, and trying again is the orchestrator's. A job whose submission was refused
for a while is submitted again by its `status`.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from redco_flow.errors import ClusterUnreachable, RedcoFlowError, StageFailed
from redco_flow.launch.call import Call, JobResources, read_call, write_call
from redco_flow.launch.executor import (
    CallJob,
    ChainingExecutor,
    ExpectedStart,
    Launch,
    StageToRender,
    check_submittable,
    common_settings,
    job_environment,
)
from redco_flow.launch.host_facts import Finding
from redco_flow.launch.rendezvous import ADDRESS_VARIABLE
from redco_flow.launch.slurm import launcher, queue, timeline
from redco_flow.launch.slurm.array import SlurmArray
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.doctor import examine_slurm
from redco_flow.launch.slurm.job import SlurmJob
from redco_flow.launch.slurm.launcher import SlurmLauncherJob
from redco_flow.launch.slurm.limits import ask_site
from redco_flow.launch.slurm.resubmission import Resubmission
from redco_flow.launch.slurm.script import JOB_LOG, Submission, render, render_launcher
from redco_flow.launch.slurm.split_array import SplitArray, link_tasks
from redco_flow.launch.slurm.timeline import Job, Partition
from redco_flow.records import write_json, write_text
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.process_identity import utc_now

SCRIPT = "job.sh"
_OF_AN_OUTER_JOB = ("SLURM_", "SBATCH_", "SRUN_", queue.SUBMITTERS_CLUSTER)


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
        yield from examine_slurm(
            self._config, self.folder, gpus_per_host, self._job, self._node_directory
        )

    def render(self, attempt: AttemptDirectory, title: str, resources: JobResources) -> str:
        """Return the sbatch file that `submit_call` would submit.

        Raises:
            UsageError: a path holds what such a file cannot carry.
        """
        return render(self._submission(attempt, title, resources))

    def expected_start(
        self, attempt: AttemptDirectory, title: str, resources: JobResources
    ) -> ExpectedStart:
        """As `CallExecutor.expected_start`, by `sbatch --test-only` of the same file and squeue."""
        submission, environment = self._job(attempt, title, resources)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / SCRIPT
            write_text(script, render(submission))
            tested = queue.tested_start(script, environment)
        request = self._config.request(submission.job_resources)
        minutes = request.resources.walltime_minutes
        if minutes is None or "time" in request.unchecked:
            return ExpectedStart(tested.start, "sbatch --test-only: no walltime_minutes")
        if isinstance(self._planned, str):
            return ExpectedStart(tested.start, f"sbatch --test-only: {self._planned}")
        gpus = None if "gres/gpu" in request.unchecked else request.resources.gpus_per_host
        return timeline.expected_start(tested, gpus, 60 * minutes, *self._planned, time.time())

    @functools.cached_property
    def _planned(self) -> tuple[list[Job], dict[str, Partition]] | str:
        """All jobs and partitions; or why they are not known."""
        try:
            return timeline.read_planned(dict(_without_outer_job(self._environment)))
        except (ClusterUnreachable, StageFailed) as error:
            return str(error)

    def render_after(
        self,
        attempt: AttemptDirectory,
        title: str,
        resources: JobResources,
        upstream: Sequence[str],
        then: Sequence[StageToRender] = (),
    ) -> str:
        """Return the sbatch file that `submit_call_after` would submit.

        Raises:
            UsageError: a path holds what such a file cannot carry.
        """
        return render(self._submission(attempt, title, resources, upstream, then=then))

    def submit_launcher(
        self, folder: Path, title: str, words: Sequence[str], launch: Launch
    ) -> SlurmLauncherJob:
        """As `CallExecutor.submit_launcher`.

        Raises:
            StageFailed, ClusterUnreachable: it was not submitted or, if its record stays, sbatch
                gave no answer and it may start.
        """
        submission = self._launcher_submission(folder, title, launch)
        environment = dict(_without_outer_job(self._environment))
        return launcher.submit(submission, words, launch.record_path, launch.log, environment)

    def render_launcher(
        self, folder: Path, title: str, words: Sequence[str], launch: Launch
    ) -> str:
        """Return the sbatch file that `submit_launcher` would submit.

        Raises:
            UsageError: a path holds what such a file cannot carry.
        """
        submission = self._launcher_submission(folder, title, launch)
        return render_launcher(submission, words, launch.log)

    def _launcher_submission(self, folder: Path, title: str, launch: Launch) -> Submission:
        section, resources = self._config.for_launcher()
        return Submission(
            attempt=folder.absolute(),
            title=title,
            directory=launch.directory,
            resources=resources,
            settings=section,
            stall_seconds=self.parameters["stall_seconds"],
            grace_seconds=self.parameters["grace_seconds"],
            variables={
                **self._variables,
                **launch.variables,
                queue.SUBMITTERS_CLUSTER: self._cluster,
            },
        )

    def submit_call_after(
        self,
        attempt: AttemptDirectory,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob] = (),
        then: Sequence[AttemptDirectory] = (),
    ) -> CallJob:
        """Submit a call with `--dependency=afterok` on the upstream jobs, `afterany` on others.

        Raises:
            UsageError: there is no call.json, or the attempt was submitted before.
            StageFailed: Slurm refuses it, or never got an upstream job.
            ClusterUnreachable: Slurm's commands are not here.
        """
        for one in (attempt, *then):
            check_submittable(one)
        return self._submit(attempt, _with_ids(upstream), _known(after_end), then)

    def submit_pack(
        self,
        folder: Path,
        title: str,
        attempts: Sequence[AttemptDirectory],
        upstream: Sequence[CallJob] = (),
        after_end: Sequence[CallJob] = (),
    ) -> CallJob:
        """As `ChainingExecutor.submit_pack`, with dependencies as of `submit_call_after`.

        Raises:
            OSError: `folder` exists, or cannot be written.
            StageFailed: Slurm refuses it, or never got an upstream job.
            ClusterUnreachable: Slurm's commands are not here.
        """
        for one in attempts:
            check_submittable(one)
        attempts = [AttemptDirectory(one.path.absolute()) for one in attempts]
        calls = [read_call(one.call_path) for one in attempts]
        earlier, later = _relations(attempts, calls)
        stages = [
            replace(
                self._submission(one, _title_of(call), call.resources),
                later=tuple(relative.path for relative in later[one]),
            )
            for one, call in zip(attempts, calls, strict=True)
        ]
        job = AttemptDirectory(folder.absolute())
        submission = self._packed(job, title, stages)
        upstream, after_end = _with_ids(upstream), _known(after_end)
        # The job's own comes first: of attempts with a record, that of their job can be seen.
        records = {
            job: self._record(job, submission.job_name)
            | {"members": [str(one.path) for one in attempts]}
            | _before(upstream, after_end)
        }
        for turn, one in enumerate(attempts):
            records[one] = (
                self._record(one, submission.job_name)
                | {"pack": str(job.path), "turn": turn}
                | _group([*earlier[one], one, *later[one]])
            )

        def sbatch() -> str:
            must_complete, must_end = _dependencies(upstream, after_end)
            waiting = replace(submission, upstream=must_complete, after_end=must_end)
            write_text(job.path / SCRIPT, render(waiting))
            return queue.submit(job.path / SCRIPT, self._job_environment(job))

        def write_records(job_id: str) -> None:
            for one, its in records.items():
                (one.path / JOB_LOG).parent.mkdir(parents=True, exist_ok=True)
                write_json(one.job_path, its | {"job_id": job_id})

        job.path.mkdir(parents=True)  # so that no other job gets this name, whatever happens now
        write_records("")
        try:
            job_id = sbatch()
        except queue.TryLater as refusal:
            unsubmitted = SlurmJob(job.path, "", record=records[job])
            unsubmitted.retry_submission(Resubmission(sbatch, refusal))
            return unsubmitted
        except (RedcoFlowError, OSError):
            for one in records:
                one.job_path.unlink()
            raise
        write_records(job_id)
        return SlurmJob(job.path, job_id, record=records[job] | {"job_id": job_id})

    def _packed(
        self, job: AttemptDirectory, title: str, stages: Sequence[Submission]
    ) -> Submission:
        given = [one.resources for one in stages]
        section = self._config
        resources = JobResources.of_pack(
            given, section.walltime_minutes, section.seconds_of_warning
        )
        return replace(self._submission(job, title, resources), packed=tuple(stages))

    def _submit(
        self,
        attempt: AttemptDirectory,
        upstream: Sequence[CallJob] = (),
        after_end: Sequence[CallJob] = (),
        then: Sequence[AttemptDirectory] = (),
    ) -> CallJob:
        attempt = AttemptDirectory(attempt.path.absolute())
        call = read_call(attempt.call_path)
        _write_tasks(attempt, call)
        size = self._array_size(call.resources)
        if size is None:
            return self._submit_job(attempt, call, upstream, after_end, then)
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
        record = self._record(attempt, "") | {
            "arrays": [shards[start : start + size] for start in range(0, len(shards), size)],
            "upstream": [(str(one.attempt.path), one.job_id) for one in upstream],
            "after_end": [(str(one.attempt.path), one.job_id) for one in after_end],
        }
        write_json(attempt.job_path, record)
        job = SplitArray(attempt.path, record["arrays"], record)
        self.take_over(job)
        try:
            job.submit()
        except (RedcoFlowError, OSError):
            attempt.job_path.unlink()
            raise
        return job

    def take_over(self, job: CallJob) -> None:
        """As `CallExecutor.take_over`: the arrays of a stage that are not submitted."""
        if not isinstance(job, SplitArray) or job.is_driven:
            return
        record, call = job.record(), read_call(job.attempt.call_path)
        upstream = [SlurmJob(path, job_id) for path, job_id in record["upstream"]]
        after_end = [SlurmJob(path, job_id) for path, job_id in record["after_end"]]

        def given(
            number: int,
        ) -> tuple[AttemptDirectory, Call, Sequence[CallJob], Sequence[CallJob]]:
            tasks = tuple(range(len(record["arrays"][number])))
            part = replace(call, resources=replace(call.resources, shards=tasks))
            # `max_array_tasks` is for all arrays of the stage: one begins after the other.
            before = job.array_before(number) if self._config.max_array_tasks else []
            return job.attempt.array(number), part, upstream, [*after_end, *before]

        def submit(number: int) -> SlurmArray:
            array, part, after_completion, after_ends = given(number)
            link_tasks(job.attempt, number, record["arrays"][number])
            write_call(array, part)
            return cast("SlurmArray", self._submit_job(array, part, after_completion, after_ends))

        def search(number: int, array: SlurmArray) -> None:
            refusal = queue.TryLater("its launcher ended while it was submitted.")
            sbatch = functools.partial(self._sbatch, *given(number))
            array.retry_submission(Resubmission(sbatch, refusal))

        job.drive(submit, search)

    def _submit_job(
        self,
        attempt: AttemptDirectory,
        call: Call,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob],
        then: Sequence[AttemptDirectory] = (),
    ) -> CallJob:
        then = [AttemptDirectory(one.path.absolute()) for one in then]
        sbatch = functools.partial(self._sbatch, attempt, call, upstream, after_end, then)
        name = self._submission(attempt, _title_of(call), call.resources).job_name
        record = self._record(attempt, name) | {"shards": list(call.resources.shards)}
        record |= _group([attempt, *then]) | _before(upstream, after_end)
        # Before sbatch: a record without an id is looked up by its name.
        _write_records(record, attempt, then)
        try:
            job_id = sbatch()
        except queue.TryLater as refusal:
            # It may have been accepted all the same; the record stays, and with it the name.
            job = reattach(record)
            assert not isinstance(job, SplitArray)
            job.retry_submission(Resubmission(sbatch, refusal))
            return job
        except (RedcoFlowError, OSError):
            for one in (attempt, *then):
                one.job_path.unlink()
            raise
        _write_records(record | {"job_id": job_id}, attempt, then)
        job = reattach(record | {"job_id": job_id})
        assert not isinstance(job, SplitArray)
        job.note_submitted()
        if isinstance(job, SlurmJob):
            job.expect_records()
        return job

    def _sbatch(
        self,
        attempt: AttemptDirectory,
        call: Call,
        upstream: Sequence[CallJob],
        after_end: Sequence[CallJob],
        then: Sequence[AttemptDirectory] = (),
    ) -> str:
        waits_for = _dependencies(upstream, after_end)
        calls = [(one, read_call(one.call_path)) for one in then]
        stages = [StageToRender(one, _title_of(its), its.resources) for one, its in calls]
        submission = self._submission(attempt, _title_of(call), call.resources, *waits_for, stages)
        write_text(attempt.path / SCRIPT, render(submission))
        return queue.submit(attempt.path / SCRIPT, self._job_environment(attempt.whole))

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
        then: Sequence[StageToRender] = (),
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
            then=tuple(self._submission(*one) for one in then),
        )

    def _job(
        self, attempt: AttemptDirectory, title: str, resources: JobResources
    ) -> tuple[Submission, Mapping[str, str]]:
        return self._submission(attempt, title, resources), self._job_environment(attempt)

    def _exports(self, attempt: AttemptDirectory) -> dict[str, str]:
        """Return the variables of every job, whatever `--export` in slurm.options leaves out."""
        inherited = job_environment({**self._environment, **self._variables}, attempt.whole)
        names = [*self._variables, *job_environment({}, attempt)]
        address = self._config.rendezvous_address
        named = {ADDRESS_VARIABLE: address} if address else {}
        return {name: inherited[name] for name in names} | named

    @property
    def _cluster(self) -> str:
        return queue.cluster_of(self._environment)

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


def reattach_launcher(record: Mapping[str, Any]) -> SlurmLauncherJob:
    """Return the job of a launcher's record, from any process."""
    return SlurmLauncherJob(record)


def _relations(
    attempts: Sequence[AttemptDirectory], calls: Sequence[Call]
) -> tuple[
    Mapping[AttemptDirectory, list[AttemptDirectory]],
    Mapping[AttemptDirectory, list[AttemptDirectory]],
]:
    """Return what each attempt of a pack needs of the others, and those that need it, in order."""
    by_path = {str(one.path): one for one in attempts}
    earlier: dict[AttemptDirectory, list[AttemptDirectory]] = {}
    later: dict[AttemptDirectory, list[AttemptDirectory]] = defaultdict(list)
    for attempt, call in zip(attempts, calls, strict=True):
        direct = [by_path[path] for path in call.upstream.values() if path in by_path]
        needed = dict.fromkeys(two for one in direct for two in (*earlier[one], one))
        earlier[attempt] = list(needed)
        for one in needed:
            later[one].append(attempt)
    return earlier, later


def _group(attempts: Sequence[AttemptDirectory]) -> dict[str, list[str]]:
    """Return the part of job.json on stages of one job that need each other."""
    return {"group": [str(one.path) for one in attempts]} if len(attempts) > 1 else {}


def _before(upstream: Sequence[CallJob], after_end: Sequence[CallJob]) -> dict[str, dict[str, str]]:
    """Return the part of job.json on the jobs that one waits for."""
    jobs = {"waits_for": upstream, "begins_after": after_end}
    return {key: {str(one.attempt.path): one.job_id for one in its} for key, its in jobs.items()}


def _title_of(call: Call) -> str:
    return f"{call.run} {call.stage} {call.attempt}"


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


def _dependencies(
    upstream: Sequence[CallJob], after_end: Sequence[CallJob]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids of jobs that must have completed, and of those that must only have ended.

    Slurm forgets those that have: they are left out. A packed job fails with any of its stages,
    so that of an upstream stage must only end, and the worker looks whether the stage completed.
    """
    open_upstream = [one for one in upstream if one.attempt.cause is not Cause.COMPLETED]
    packed = [one for one in open_upstream if "pack" in one.record()]
    must_complete = [one.job_id for one in open_upstream if "pack" not in one.record()]
    at_work = [one.job_id for one in (*packed, *after_end) if not _has_ended(one)]
    return tuple(dict.fromkeys(must_complete)), tuple(dict.fromkeys(at_work))


def _has_ended(job: CallJob) -> bool:
    """Whether a job has ended, with all of its stages if it runs those of several runs."""
    return job.whole_has_ended if isinstance(job, SlurmJob) else job.attempt.cause is not None


def _write_records(
    record: Mapping[str, Any], attempt: AttemptDirectory, then: Sequence[AttemptDirectory]
) -> None:
    """Write job.json of each stage of a job; the last one that is written is the first stage's."""
    for one in (*then, attempt):
        (one.path / JOB_LOG).parent.mkdir(exist_ok=True)
        write_json(one.job_path, {**record, "attempt": str(one.path)})


def _write_tasks(attempt: AttemptDirectory, call: Call) -> None:
    """Give each task of an array its call, in a directory of its own."""
    for shard in call.resources.shards:
        task = attempt.task(shard)
        (task.path / JOB_LOG).parent.mkdir(parents=True, exist_ok=True)
        write_call(task, replace(call, shard=shard))


def _without_outer_job(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The environment without what the job that the launcher may run in has set."""
    for name, value in environment.items():
        if name == "SLURM_CONF" or not name.startswith(_OF_AN_OUTER_JOB):
            yield name, value
