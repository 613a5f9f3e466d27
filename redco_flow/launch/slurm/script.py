"""Render the sbatch file of a job: pure, from the profile, the job's resources and its attempt.

Everything that is not the operator's own shell text is quoted. No variable's value is in it: the
environment goes with sbatch, not with the file.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.rank import WARNING_SIGNAL
from redco_flow.records import digest_json
from redco_flow.spec.slurm_section import SlurmSection

JOB_ID_FILE = "slurm.jobid"
JOB_LOG = "logs/slurm.log"
REQUEUE_EXIT_CODE = 75
REQUEUE_FILE = "requeue.json"
_MAX_NAME_CHARACTERS = 120


@dataclass(frozen=True)
class Submission:
    """What one job consists of.

    Args:
        attempt: its directory, absolute.
        title: run, stage and attempt, for people.
        directory: where the stage's process starts.
    """

    attempt: Path
    title: str
    directory: Path
    resources: JobResources
    settings: SlurmSection
    stall_seconds: float
    grace_seconds: float

    @property
    def job_name(self) -> str:
        """A name that no other attempt has: it finds the job if its id was lost."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.title).strip("-")
        return f"{readable[:_MAX_NAME_CHARACTERS]}-{digest_json(str(self.attempt))[:12]}"


def render(submission: Submission) -> str:
    """Return the sbatch file.

    Raises:
        UsageError: a path holds a control character, which a sbatch file cannot carry.
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
    yield f"printf '%s\\n' \"$SLURM_JOB_ID\" > {JOB_ID_FILE}"
    yield from (f"module load {shlex.quote(module)}" for module in settings.modules)
    yield from settings.setup
    yield ""
    yield " \\\n    ".join(_srun(submission))
    yield ""
    finish = f"{shlex.join(_finish(submission))} --srun-exit-code $?"
    yield finish
    yield "# Slurm takes the job back for a later start; where it may not, the launcher does."
    yield f"if [ $? -eq {REQUEUE_EXIT_CODE} ]; then"
    yield '    scontrol requeue "$SLURM_JOB_ID" && sleep 120'
    yield f"    {shlex.join(_finish(submission))} --for-good"
    yield "fi"


def _options(submission: Submission) -> Iterator[str]:
    """The options of sbatch, one per line."""
    settings, resources = submission.settings, submission.resources
    yield _option("job-name", submission.job_name)
    yield _option("chdir", submission.attempt)
    yield _option("output", JOB_LOG)  # relative: Slurm would expand patterns in a path
    yield "--open-mode=append"
    yield "--requeue"
    yield "--export=ALL"
    yield from (_option(*pair) for pair in _selection(settings))
    yield _option("nodes", resources.num_hosts)
    yield _option("ntasks-per-node", resources.processes_per_host)
    if resources.cpus_per_host is not None:
        yield _option("cpus-per-task", _share(resources))
    if resources.memory_gib is not None:
        yield _option("mem", f"{math.ceil(resources.memory_gib * 1024)}M")
    if resources.gpus_per_host:
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        gpu = "gpu:" if settings.gpu_option == "gres" else ""
        yield _option(settings.gpu_option, f"{gpu}{kind}{resources.gpus_per_host}")
    if resources.walltime_minutes is not None:
        yield _option("time", resources.walltime_minutes)
    yield _option("signal", f"{WARNING_SIGNAL}@{settings.warning_seconds}")
    yield from settings.options


def selection_options(settings: SlurmSection) -> list[str]:
    """Return the options that choose partition and account, as arguments of a command."""
    return [f"--{name}={value}" for name, value in _selection(settings)]


def _selection(settings: SlurmSection) -> Iterator[tuple[str, str]]:
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
    yield shlex.quote(str(submission.attempt))
    yield f"--stall-seconds {submission.stall_seconds:g}"
    yield f"--grace-seconds {submission.grace_seconds:g}"
    yield f"--gpus-per-host {resources.gpus_per_host}"
    yield f"--rendezvous-seconds {settings.rendezvous_seconds}"
    if resources.walltime_minutes is not None:
        yield f"--seconds-to-warning {resources.walltime_minutes * 60 - settings.warning_seconds}"


def _finish(submission: Submission) -> list[str]:
    return [
        *_python(submission),
        *("-m", "redco_flow.launch.slurm.job_end", str(submission.attempt)),
        *("--num-processes", str(submission.resources.num_processes)),
    ]


def _python(submission: Submission) -> list[str]:
    # -P: the directory that the job starts in must not hide a module.
    return [*submission.settings.container, submission.settings.python or sys.executable, "-P"]


def _option(name: str, value: Any) -> str:
    return f"--{name}={shlex.quote(str(value))}"
