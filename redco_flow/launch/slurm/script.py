"""Render the sbatch file of a job: pure, from the profile, the job's resources and its attempt.

Everything that is not the operator's own shell text is quoted. No variable's value is in it: the
environment goes with sbatch, not with the file.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.rank import WARNING_SIGNAL
from redco_flow.launch.slurm.config import Config
from redco_flow.records import digest_json

JOB_ID_FILE = "slurm.jobid"
JOB_LOG = "logs/slurm.log"
REQUEUE_EXIT_CODE = 75
REQUEUE_FILE = "requeue.json"
_MAX_NAME_CHARACTERS = 120


@dataclass(frozen=True)
class Submission:
    """The sbatch settings of one job, or of an array with a task for each shard.

    Args:
        attempt: its directory, absolute.
        title: run, stage and attempt, for people.
        directory: where the stage's process starts.
        upstream: ids of jobs that must have completed before it may start.
        after_end: ids of jobs that must have ended before, however they end.
    """

    attempt: Path
    title: str
    directory: Path
    resources: JobResources
    settings: Config
    stall_seconds: float
    grace_seconds: float
    upstream: tuple[str, ...] = ()
    after_end: tuple[str, ...] = ()

    @property
    def job_name(self) -> str:
        """A name that no other attempt has: it finds the job if its id was lost."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.title).strip("-")
        return f"{readable[:_MAX_NAME_CHARACTERS]}-{digest_json(str(self.attempt))[:12]}"


def render(submission: Submission) -> str:
    """Return the sbatch file.

    Raises:
        UsageError: a path holds a control character, which a sbatch file cannot carry; or an
            option of the profile contradicts the job's own.
    """
    text = "\n".join(_lines(submission)) + "\n"
    for character in text:
        if character != "\n" and not character.isprintable():
            raise UsageError(
                f"{submission.title!r} cannot be submitted to Slurm: its paths or its profile "
                f"hold the control character {character!r}; rename what has it."
            )
    return text


def _lines(submission: Submission) -> Iterator[str]:
    for value in (submission.attempt, submission.directory):
        # Slurm's own parser takes backslashes even out of quotes, and expands % in paths.
        if any(character in str(value) for character in "\n\\%"):
            raise UsageError(
                f"{str(value)!r} cannot be submitted to Slurm: a path there must have no line "
                f"break, backslash or percent sign; use another workspace."
            )
    yield "#!/bin/bash"
    yield f"# redco-flow: {' '.join(submission.title.split())}"
    for option in _options(submission):
        yield f"#SBATCH {option}"
    yield ""
    settings = submission.settings
    yield from _own_id(submission)
    yield from (f"module load {shlex.quote(module)}" for module in settings.modules)
    yield from settings.setup
    yield ""
    yield " \\\n    ".join(_srun(submission))
    yield ""
    finish = f"{shlex.join(_python(submission))} {_finish(submission)}"
    yield f"{finish} --srun-exit-code $?"
    yield "code=$?"
    yield "# Slurm takes the job back for a later start; where it may not, the launcher does."
    yield f'if [ "$code" -eq {REQUEUE_EXIT_CODE} ]; then'
    yield "    for seconds in 0 2 8; do  # the controller may be away for a moment"
    yield '        sleep "$seconds"'
    yield '        scontrol requeue "$SLURM_JOB_ID" && sleep 120'
    yield "    done"
    yield f"    {finish} --for-good"
    yield "    code=$?"
    yield "fi"
    yield "# By this Slurm knows whether jobs that depend on this one may start."
    yield 'exit "$code"'


def _options(submission: Submission) -> Iterator[str]:
    """The options of sbatch, one per line."""
    settings, resources = submission.settings, submission.resources
    yield _option("job-name", submission.job_name)
    yield _option("chdir", submission.attempt)
    yield from _array(submission)
    log = f"tasks/%a/{JOB_LOG}" if resources.shards else JOB_LOG
    yield _option("output", log)  # relative: Slurm would expand patterns in a path
    yield "--open-mode=append"
    yield "--requeue"
    yield "--export=ALL"
    yield from _dependency(submission)
    yield from (_option(*pair) for pair in _selection(settings))
    yield _option("nodes", resources.num_hosts)
    yield _option("ntasks-per-node", resources.processes_per_host)
    if resources.cpus_per_host is not None:
        yield _option("cpus-per-task", _share(resources))
    if resources.memory_gib is not None:
        yield _option("mem", f"{math.ceil(resources.memory_gib * 1024)}M")
    if resources.gpus_per_host:
        yield gpu_option(settings, resources.gpus_per_host)
    if resources.walltime_minutes is not None:
        yield _option("time", resources.walltime_minutes)
    yield _option("signal", f"{WARNING_SIGNAL}@{settings.warning_seconds}")
    for option in settings.options:
        if option.startswith("--job-n"):
            raise UsageError(
                f"slurm.options has {option!r}, but a job is recognised by its own name: remove it "
                f"(--comment can hold a text for people)."
            )
    yield from settings.options


def _own_id(submission: Submission) -> Iterator[str]:
    """Note the job's id where a launcher that lost it looks first."""
    own_id = "$SLURM_ARRAY_JOB_ID" if submission.resources.shards else "$SLURM_JOB_ID"
    yield f"printf '%s\\n' \"{own_id}\" > {JOB_ID_FILE}"


def _array(submission: Submission) -> Iterator[str]:
    """One task for each shard, some of them at a time."""
    most = submission.settings.max_array_tasks
    if shards := submission.resources.shards:
        yield _option("array", _ranges(shards) + (f"%{most}" if most else ""))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as Slurm takes them: "0-3,5,7"; three or more in a row are a range."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    texts = [f"{row[0]}-{row[-1]}" if len(row) > 2 else ",".join(map(str, row)) for row in rows]
    return ",".join(texts)


def _dependency(submission: Submission) -> Iterator[str]:
    """Wait for other jobs; where one that must complete fails, end instead of waiting for ever."""
    waits = [
        ":".join([kind, *ids])
        for kind, ids in (("afterok", submission.upstream), ("afterany", submission.after_end))
        if ids
    ]
    if not waits:
        return
    for option in submission.settings.options:
        if option.startswith("--dep"):
            raise UsageError(
                f"slurm.options has {option!r}, which would take the place of what stage "
                f"{submission.title!r} waits for; remove it, or leave --ahead out."
            )
    yield _option("dependency", ",".join(waits))
    yield "--kill-on-invalid-dep=yes"


def gpu_option(settings: Config, gpus_per_host: int) -> str:
    """Return the option that asks for GPUs, as the site wants it."""
    kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
    gpu = "gpu:" if settings.gpu_option == "gres" else ""
    return _option(settings.gpu_option, f"{gpu}{kind}{gpus_per_host}")


def selection_options(settings: Config) -> list[str]:
    """Return the options that choose partition and account, as arguments of a command."""
    return [f"--{name}={value}" for name, value in _selection(settings)]


def _selection(settings: Config) -> Iterator[tuple[str, str]]:
    for name in ("partition", "account", "qos", "reservation", "constraint"):
        if (value := getattr(settings, name)) is not None:
            yield name, value


def _share(resources: JobResources) -> int:
    assert resources.cpus_per_host is not None
    return max(1, resources.cpus_per_host // resources.processes_per_host)


def _srun(submission: Submission) -> Iterator[str]:
    """The command that runs one supervisor per rank, in parts that belong on a line each."""
    settings, resources = submission.settings, submission.resources
    yield "srun --kill-on-bad-exit=1 --wait=0 --input=none"
    yield _option("ntasks", resources.num_processes)
    if resources.cpus_per_host is not None:
        yield _option("cpus-per-task", _share(resources))  # srun no longer takes it from sbatch
    yield _option("chdir", submission.directory)
    yield from settings.srun_options
    yield shlex.join([*_python(submission), "-m", "redco_flow.launch.rank"])
    yield _task(submission)
    yield f"--stall-seconds {submission.stall_seconds:g}"
    yield f"--grace-seconds {submission.grace_seconds:g}"
    yield f"--gpus-per-host {resources.gpus_per_host}"
    yield f"--rendezvous-seconds {settings.rendezvous_seconds}"
    if resources.walltime_minutes is not None:
        yield f"--seconds-to-warning {resources.walltime_minutes * 60 - settings.warning_seconds}"


def _finish(submission: Submission) -> str:
    """The interpreter's arguments that write how the job ended."""
    num_processes = submission.resources.num_processes
    module = "-m redco_flow.launch.slurm.job_end"
    return f"{module} {_task(submission)} --num-processes {num_processes}"


def _task(submission: Submission) -> str:
    """The directory of the job's records, as an argument; of an array each task has its own."""
    attempt = shlex.quote(str(submission.attempt))
    is_array = submission.resources.shards
    return f'{attempt}/tasks/"$SLURM_ARRAY_TASK_ID"' if is_array else attempt


def _python(submission: Submission) -> list[str]:
    # -P: the directory that the job starts in must not hide a module.
    return [*submission.settings.container, submission.settings.python or sys.executable, "-P"]


def _option(name: str, value: Any) -> str:
    return f"--{name}={shlex.quote(str(value))}"
