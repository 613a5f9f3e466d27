"""Render the sbatch file of a job: pure, from the profile, the job's resources and its attempt.

Everything that is not the operator's own shell text is quoted. The profile's variables are written
into the file, for they contain no secrets; those of the user's shell are handed on by sbatch.
Ranks, the job's last command and doctor's probe run after one prologue, under one srun. Ranks that
Slurm did not start, as its controller was away, are started again, unless a rank has begun.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.processes import START_AGAIN_EXIT_CODE, WARNING_SIGNAL
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.job_end import KILLED_EXIT_CODE, REQUEUE_EXIT_CODE
from redco_flow.records import digest_json
from redco_flow.tracking.attempt import Cause

JOB_ID_FILE = "slurm.jobid"
JOB_LOG = "logs/slurm.log"
_MAX_NAME_CHARACTERS = 120
_MAX_STARTS_OF_KILLED = 10  # of a job whose process is killed each time
_NO_STEP = 99  # srun's exit code where Slurm starts no step; no module of ours ends with it
_SECONDS_BETWEEN_STARTS = "5 10 20 40 60 60 60"  # of ranks, while the controller is away


@dataclass(frozen=True)
class Submission:
    """The sbatch settings of one job, or of an array with a task for each shard.

    A job may run several stages: its options are those of the first, with resources for all.

    Args:
        attempt: its directory, absolute.
        title: run, stage and attempt, for people.
        directory: where the stage's process starts.
        upstream: ids of jobs that must have completed before it may start.
        after_end: ids of jobs that must have ended before, however they end.
        variables: exported by the script; no secrets.
        then: stages that the job runs afterwards, each once the one before it has completed.
        packed: stages of several runs that the job runs one after the other, in place of a stage
            of its own; `attempt` is then the directory of the job's own files, and `resources` are
            those of the job.
        later: of a packed stage, attempts that need its result and do not begin without it.
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
    variables: Mapping[str, str] = field(default_factory=dict)
    then: tuple[Submission, ...] = ()
    packed: tuple[Submission, ...] = ()
    later: tuple[Path, ...] = ()

    @property
    def job_resources(self) -> JobResources:
        """Resources of the whole job."""
        if not self.then:
            return self.resources
        stages = [self.resources, *(one.resources for one in self.then)]
        return JobResources.of_group(stages, self.settings.walltime_minutes)

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
    return _checked(submission, [*_start(submission), *_commands(submission), *_exit()])


def render_probe(submission: Submission, module: str, arguments: Sequence[str]) -> str:
    """Return the sbatch file of a job that runs a module in place of its ranks.

    Raises:
        UsageError: as `render`.
    """
    step = _step(submission, _rank_options(submission), module, [shlex.join(arguments)])
    return _checked(submission, [*_start(submission), step])


def render_launcher(submission: Submission, words: Sequence[str], log: Path) -> str:
    """Return the sbatch file of a job that drives a run, and is queued again while there is none.

    Args:
        words: the module and its arguments; `--job-name NAME --job ID` is added.
        log: gets the process's output.

    Raises:
        UsageError: as `render`.
    """
    given = shlex.join([*words[1:], "--job-name", submission.job_name])
    arguments = [given, '--job "$SLURM_JOB_ID"']
    step = _step(submission, _rank_options(submission), words[0], arguments)
    lines = [
        f"exec >> {shlex.quote(str(log))} 2>&1",
        f"SLURM_EXIT_ERROR={_NO_STEP} {step}",
        "code=$?",
        "# The run has not ended: its time or its node was wanted; or the process was killed, or",
        "# Slurm did not start it, which count until it ends in another way.",
        'case "$code" in',
        f"    {KILLED_EXIT_CODE}|{_NO_STEP}) echo >> killed ;;",
        "    *) : > killed ;;",
        "esac",
        f'if [ "$code" -eq {START_AGAIN_EXIT_CODE} ] || {{ [ -s killed ] &&',
        f'    [ "$(wc -l < killed)" -lt {_MAX_STARTS_OF_KILLED} ]; }}; then',
        *_requeue(),
        "fi",
    ]
    return _checked(submission, [*_start(submission), *lines, *_exit()])


def _checked(submission: Submission, lines: Sequence[str]) -> str:
    text = "\n".join(lines) + "\n"
    for character in text:
        if character != "\n" and not character.isprintable():
            raise UsageError(
                f"{submission.title!r} cannot be submitted to Slurm: its paths or its profile "
                f"hold the control character {character!r}; rename what has it."
            )
    return text


def _commands(submission: Submission) -> Iterator[str]:
    """Run the ranks of the job's stage or, one after the other, those of its stages."""
    if submission.packed:
        yield from _packed_commands(submission)
        return
    if not submission.then:
        yield from _finish(submission)
        yield from _unless_ended(submission)
        return
    job, stages = submission, (submission, *submission.then)
    for index, stage in enumerate(stages):
        attempt = shlex.quote(str(stage.attempt))
        yield f"# stage {index + 1} of {len(stages)}: {' '.join(stage.title.split())}"
        yield f"exec >> {attempt}/{JOB_LOG} 2>&1"
        yield f"printf '%s\\n' \"$SLURM_JOB_ID\" > {attempt}/{JOB_ID_FILE}"
        for name, value in stage.variables.items():
            if index and job.variables.get(name) != value:
                yield f"export {name}={_quoted(value)}"
        yield from _finish(stage, [one.attempt for one in stages[index + 1 :]])
        yield from _unless_ended(stage, job)
        if index + 1 < len(stages):
            yield '[ "$code" -eq 0 ] || exit "$code"'
        yield ""


def _packed_commands(job: Submission) -> Iterator[str]:
    """Run the packed stages; one that fails ends no other, but for those that need its result."""
    yield "failed=0"
    yield ""
    for number, stage in enumerate(job.packed, 1):
        yield f"# {number} of {len(job.packed)}: {' '.join(stage.title.split())}"
        if number > 1 and (left := _seconds_left(job)) is not None:
            yield f'[ "$(({left}))" -gt 0 ] || exit 1  # another job runs the rest'
        for name, value in stage.variables.items():
            if job.variables.get(name) != value:
                yield f"export {name}={_quoted(value)}"
        yield from _finish(stage, stage.later, job.attempt / JOB_LOG)
        yield from _unless_ended(stage, job)
        yield '[ "$code" -eq 0 ] || failed=1'
        yield ""
    yield "code=$failed"


def _seconds_left(job: Submission) -> str | None:
    """Shell arithmetic for the seconds until the warning of a job's end; None: it has no time."""
    walltime = job.job_resources.walltime_minutes
    if walltime is None:
        return None
    return f"{math.ceil(walltime * 60 - job.settings.warning_seconds)} - SECONDS"


def _unless_ended(submission: Submission, job: Submission | None = None) -> Iterator[str]:
    """Run the ranks of a stage, unless its attempt has an end or was cancelled before.

    Args:
        job: as of `_ranks`.
    """
    task = _task(submission)
    folders = dict.fromkeys([shlex.quote(str(submission.attempt)), task])
    has_ended, is_cancelled = (
        " || ".join(f"[ -e {folder}/{name} ]" for folder in folders)
        for name in ("exit.json", "cancel.json")
    )
    records = f'"$(ls -lR --full-time {task}/ranks 2>&1)"'
    yield f"before={records}"
    yield "is_up="
    yield f'for seconds in {_SECONDS_BETWEEN_STARTS} ""; do'
    yield "# Slurm may start a job late, or once more: what has completed is not repeated, and what"
    yield "# its launcher has given up does not begin."
    yield f"if {has_ended}; then"
    yield f'    grep -qs \'"cause": "{Cause.COMPLETED}"\' {task}/exit.json && code=0 || code=1'
    yield f"elif {is_cancelled}; then"
    yield '    echo "It was cancelled before it started: nothing is run."'
    yield "    finish"
    yield "    code=$?"
    yield "else"
    yield from _ranks(submission, job)
    yield "code=$?"
    yield "# While the controller is away, and once more when it answers; never after a rank began."
    yield f'if [ "$code" -eq {_NO_STEP} ] && [ -n "$seconds" ] && [ -z "$is_up" ]; then'
    yield '    sleep "$seconds"'
    yield '    is_up=$(scontrol ping | grep "is UP")'
    yield f'    [ {records} != "$before" ] || continue'
    yield "fi"
    yield from _end()
    yield "fi"
    yield "break"
    yield "done"


def _start(submission: Submission) -> Iterator[str]:
    """The options of sbatch, and the prologue of every command of the job."""
    for path in (submission.attempt, submission.directory):
        # Slurm's own parser takes backslashes even out of quotes, and expands % in paths.
        if any(character in str(path) for character in "\n\\%"):
            raise UsageError(
                f"{str(path)!r} cannot be submitted to Slurm: a path there must have no line "
                f"break, backslash or percent sign; use another workspace."
            )
    yield "#!/bin/bash"
    yield f"# redco-flow: {' '.join(submission.title.split())}"
    for option in _options(submission):
        yield f"#SBATCH {option}"
    yield ""
    yield from _own_id(submission)
    for name, value in submission.variables.items():
        yield f"export {name}={_quoted(value)}"
    yield "export SLURM_EXPORT_ENV=ALL  # srun hands these on, also after sbatch --export=NONE"
    yield from (f"module load {shlex.quote(name)}" for name in submission.settings.modules)
    yield from submission.settings.setup
    yield ""


def _quoted(value: str) -> str:
    if value.isprintable():
        return shlex.quote(value)
    return "$'{}'".format(
        "".join(
            one if one.isprintable() and one not in "'\\" else f"\\U{ord(one):08x}" for one in value
        )
    )


def _end() -> Iterator[str]:
    """The last command of a stage, and what its exit code asks for."""
    yield 'finish --srun-exit-code "$code"'
    yield "code=$?"
    yield "# Slurm takes the job back for a later start; where it may not, the launcher does."
    yield f'if [ "$code" -eq {REQUEUE_EXIT_CODE} ]; then'
    yield from _requeue()
    yield "    finish --for-good"
    yield "    code=$?"
    yield "fi"


def _requeue() -> Iterator[str]:
    yield "    for seconds in 0 2 8; do  # the controller may be away for a moment"
    yield '        sleep "$seconds"'
    yield '        scontrol requeue "$SLURM_JOB_ID" && sleep 120'
    yield "    done"


def _exit() -> Iterator[str]:
    yield "# By this Slurm knows whether jobs that depend on this one may start."
    yield 'exit "$code"'


def _options(submission: Submission) -> Iterator[str]:
    """The options of sbatch, one per line."""
    settings, resources = submission.settings, submission.job_resources
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
    if not (settings.omit_nodes and resources.num_processes == 1):
        yield _option("nodes", resources.num_hosts)
        yield _option("ntasks-per-node", resources.processes_per_host)
    if resources.cpus_per_host is not None:
        yield _option("cpus-per-task", _share(resources))
    if resources.memory_gib is not None:
        yield _memory_option(settings, resources, resources.memory_gib * 1024)
    if resources.gpus_per_host:
        yield _gpu_option(settings, resources)
    if resources.walltime_minutes is not None:
        yield _option("time", resources.walltime_minutes)
    yield _option("signal", f"{WARNING_SIGNAL}@{settings.warning_seconds}")
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


def _memory_option(settings: Config, resources: JobResources, mebibytes: float) -> str:
    if settings.memory_option == "mem":
        return _option("mem", f"{math.ceil(mebibytes)}M")
    if settings.divides_memory_by_gpus(resources.gpus_per_host):
        return _option("mem-per-gpu", f"{math.ceil(mebibytes / resources.gpus_per_host)}M")
    num_cpus = _share(resources) * resources.processes_per_host
    return _option("mem-per-cpu", f"{math.ceil(mebibytes / num_cpus)}M")


def _gpu_option(settings: Config, resources: JobResources) -> str:
    """The option that requests GPUs, as the site wants it."""
    count = resources.gpus_per_host
    if settings.gpu_option == "gpus-per-task":
        count //= resources.processes_per_host
    kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
    gpu = "gpu:" if settings.gpu_option == "gres" else ""
    return _option(settings.gpu_option, f"{gpu}{kind}{count}")


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


def _ranks(submission: Submission, job: Submission | None = None) -> Iterator[str]:
    """One supervisor for each rank.

    Args:
        job: of a stage that shares it with others, which may have more ranks. Its time runs since
            the script began, and the stage ends at the end of its own.
    """
    settings, resources = submission.settings, submission.resources
    arguments = [
        _task(submission),
        f"--stall-seconds {submission.stall_seconds:g}",
        f"--grace-seconds {submission.grace_seconds:g}",
        f"--gpus-per-host {resources.gpus_per_host}",
        f"--rendezvous-seconds {settings.rendezvous_seconds}",
        *(f"--fabric {shlex.quote(nodes)}" for nodes in settings.fabrics.values()),
    ]
    if (left := _seconds_left(job or submission)) is not None:
        arguments.append(f"--seconds-to-warning $(({left}))")
        if job is not None and resources.walltime_minutes is not None:
            own = math.ceil(resources.walltime_minutes * 60)
            arguments.append(f"--seconds-to-end $(({left} < {own} ? {left} : {own}))")
    if job is not None and job.packed:
        arguments.append("--heeds-cancel")
    options = _rank_options(submission)
    if job is not None:
        if resources.memory_gib is not None and settings.memory_option != "mem":
            # All of the job's: a step with fewer CPUs or GPUs would get less than it asks for.
            options.insert(0, "--mem=0")
        options.append(_option("nodes", resources.num_hosts))
        options.append(_option("ntasks-per-node", resources.processes_per_host))
    step = _step(submission, options, "redco_flow.launch.rank", arguments)
    yield f"SLURM_EXIT_ERROR={_NO_STEP} {step}"


def _rank_options(submission: Submission) -> list[str]:
    resources = submission.resources
    options = ["--kill-on-bad-exit=1 --wait=0", _option("ntasks", resources.num_processes)]
    if resources.cpus_per_host is not None:  # srun no longer takes it from sbatch
        options.append(_option("cpus-per-task", _share(resources)))
    if resources.gpus_per_host and submission.settings.gpu_option == "gpus-per-task":
        options.append(_gpu_option(submission.settings, resources))  # binds each task to its own
    own_options = submission.settings.srun_options
    if not any(map(_is_exclusive, own_options)):
        # A controller that was killed may take the step before, which has ended, for one that runs.
        options.append("--overlap")
    return [*options, *own_options]


def _is_exclusive(option: str) -> bool:
    """Whether srun refuses it with --overlap."""
    return option.startswith("--exclusive")


def _step(
    submission: Submission, options: Sequence[str], module: str, arguments: Sequence[str]
) -> str:
    """The command that runs a module as a step of the job, in parts on a line each."""
    parts = [
        "srun --input=none",
        _option("chdir", submission.directory),
        *options,
        shlex.join([*_python(submission), "-m", module]),
        *arguments,
    ]
    return " \\\n    ".join(parts)


def _finish(
    submission: Submission, later: Sequence[Path] = (), log: Path | None = None
) -> Iterator[str]:
    """A function that writes how the job, or a stage of it, ended.

    It is a step like the ranks wherever the interpreter may be only where those run.

    Args:
        later: attempts of stages that do not begin where this one does not complete.
        log: the job's own output, where it is not in the attempt's directory.
    """
    settings, module = submission.settings, "redco_flow.launch.slurm.job_end"
    arguments = [
        f"{_task(submission)} --num-processes {submission.resources.num_processes}",
        *(f"--later {shlex.quote(str(one))}" for one in later),
        *([f"--log {shlex.quote(str(log))}"] if log is not None else []),
        '"$@"',
    ]
    yield "finish() {"
    if settings.container or settings.srun_options or settings.python:
        options = [one for one in settings.srun_options if not _is_exclusive(one)]
        options.append("--overlap --nodes=1 --ntasks=1 --ntasks-per-node=1")
        yield "    for seconds in 0 10 30; do  # the controller may be away for a moment"
        yield '        sleep "$seconds"'
        step = f"SLURM_EXIT_ERROR={_NO_STEP} {_step(submission, options, module, arguments)}"
        yield textwrap.indent(step, " " * 8)
        yield "        code=$?"
        yield f'        [ "$code" -eq {_NO_STEP} ] || return "$code"'
        yield "    done"
    yield f"    {shlex.join([*_python(submission), '-m', module])} {' '.join(arguments)}"
    yield "}"
    yield ""


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
