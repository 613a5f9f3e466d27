"""Start or resume a run in a detached process that outlives the caller, or in a cluster's job.

`write_run` writes the run's directory completely before that process starts; `resume_run` and
`retry_run` start it on an existing directory. Imports neither Prefect nor JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from redco_flow import __version__, search_path
from redco_flow.errors import DoesNotFit, RedcoFlowError, RunCancelled, UsageError
from redco_flow.launch.call import Call, UpstreamMissing, read_call, with_inputs
from redco_flow.launch.disk_reserve import refuse_full_disk
from redco_flow.orchestrate.run.calls import job_resources
from redco_flow.orchestrate.run.ingredients import CodeState, digested_directories
from redco_flow.orchestrate.run.launcher import (
    give_up_launcher_job,
    launcher_status,
    process_words,
    submit_launcher_job,
    with_launcher,
)
from redco_flow.orchestrate.run.plan import Plan
from redco_flow.orchestrate.run.sharing import offer, shared_name
from redco_flow.orchestrate.run.state import LaunchRecord, note_takeover
from redco_flow.records import open_no_link, write_json, write_text
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import LOCAL_LAUNCHER, Profile
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import ENDED_RUN_STATES, AttemptDirectory, State
from redco_flow.tracking.code_digest import changed_modules
from redco_flow.tracking.deletions import forget_deletion, refuse_deleted, repeatable
from redco_flow.tracking.locks import Lease, acquire, exclusive, find_holder
from redco_flow.tracking.planned_fits import write_fits
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_START = 30.0
_SECONDS_TO_CLOSE = 5.0
_POLL_SECONDS = 0.02
_SECONDS_TO_LOSE_LOCK = 150.0  # a file server, or link locks, need 90 s to give one back
_SECONDS_BETWEEN_LOOKS_AT_LOCK = 0.5


def write_run(
    resolved: ResolvedPipeline,
    profile: Profile,
    workspace: Workspace,
    plan: Plan,
    *,
    profile_name: str = "local",
    overrides: Sequence[str] = (),
    argv: Sequence[str] = (),
    ahead: bool = False,
    sweep: str = "",
    run_id: str = "",
    fits: Mapping[str, Mapping[str, Any]] | None = None,
    code: CodeState | None = None,
    like: RunDirectory | None = None,
) -> RunDirectory:
    """Write all that a run needs into a new directory; `spawn` starts it.

    Args:
        plan: of `make_plan`, for this pipeline and workspace.
        profile_name, overrides, argv: as the user gave them, for the records.
        ahead: submit all stages at once, each dependent on its upstream.
        sweep: the id of the sweep that the run is a point of.
        run_id: which id it gets; empty: one is drawn.
        fits: what `plan --fit` predicted, by stage.
        code: the code as it is now; None means that it is read here.
        like: a run whose equal records become hard links, which need no inode.

    Raises:
        UsageError: a stage asks for more hosts than its kind can use, a library that the executor
            needs is missing, the run cannot be one ahead, or there is one of this id; nothing is
            written.
        WorkspaceError: the workspace's disk is full; nothing is written.
        ArtifactError: an artifact that the pipeline names was deleted since it was planned.
    """
    check_run(resolved, profile, plan)
    refuse_full_disk(workspace.root)
    if ahead or profile.launcher != LOCAL_LAUNCHER:
        # Imported here: what only looks at runs never pays for the executors.
        from redco_flow.orchestrate.run.rendering import rendered_submissions

        dict(rendered_submissions(resolved, profile, workspace, plan, os.environ, ahead=ahead))
    code = code or CodeState.read(Path.cwd())
    run = RunDirectory.create(
        workspace,
        resolved.name,
        argv=argv,
        pipeline_path=str(resolved.path),
        overrides=overrides,
        profile=profile_name,
        code=code.record,
        sweep=sweep,
        tags=resolved.document["tags"],
        version=__version__,
        run_id=run_id,
    )
    write_text(run.resolved_path, write_yaml(resolved.document))
    write_json(run.origins_path, {key: asdict(one) for key, one in resolved.origins.items()})
    write_json(run.plan_path, plan.to_json())
    write_fits(run, fits or {})
    code.write_patch(run.patch_path)
    LaunchRecord.of_this_process(
        workspace.root, profile, ahead=ahead, stage_profiles=resolved.profiles
    ).write(run)
    if like is not None:
        _link_equal_records(like, run)
    try:
        _check_pinned(workspace, run)
    except RedcoFlowError:
        remove_half_written(run)  # half a run would be a damaged one
        raise
    return run


def remove_half_written(run: RunDirectory) -> None:
    """Remove a new run that is not written whole; a removal that was killed is completed."""
    doomed = run.path.with_name(f".{run.id}.removed")
    if doomed.exists():
        shutil.rmtree(doomed)
    shutil.rmtree(run.path.rename(doomed))


_EQUAL_RECORDS = ("origins.json", "plan.json", "launch.json", "code.patch")


def _link_equal_records(first: RunDirectory, run: RunDirectory) -> None:
    """Make records of a run hard links to another run's where both have the same content."""
    for name in _EQUAL_RECORDS:
        path, link = run.path / name, run.path / f".{name}.link"
        with suppress(OSError):  # not there, or a file system without hard links
            if (first.path / name).read_bytes() == path.read_bytes():
                os.link(first.path / name, link)
                link.replace(path)


def _check_pinned(workspace: Workspace, run: RunDirectory) -> None:
    """Raise where an artifact that the pipeline names was deleted since it was planned.

    From here on the run's records keep it (`tracking.garbage_collection`).
    """
    if pinned := run.read_pinned_artifacts():
        store = ArtifactStore(workspace)
        with exclusive(workspace.artifacts_lock):
            for artifact in filter(None, map(store.find, pinned)):
                refuse_deleted(workspace, artifact)


def check_run(resolved: ResolvedPipeline, profile: Profile, plan: Plan) -> None:
    """Raise where what the plan would run cannot be run by the profile.

    Raises:
        UsageError: a stage asks for more hosts than its kind can use, or a library that the
            executor needs is missing.
        DoesNotFit: the profile's machines are too few or too small.
    """
    for name, stage in plan.stages.items():
        if stage.action in ("run", "wait"):
            of_stage = resolved.profile_of(name, profile)
            job_resources(resolved.stages[name], of_stage)
            of_stage.section.check_installed()


def resume_run(run: RunDirectory, launcher: str = "") -> None:
    """Continue a run without an orchestrator: find its jobs again, and run what has not completed.

    Args:
        launcher: that it has from now on, as in a profile; "": the one that it had.

    Raises:
        UsageError: it has an orchestrator, or a job that waits to be one and is to stay it; or all
            of it is done.
    """
    is_undriven = _awaits_lock(run) and run.read_state()["state"] not in ENDED_RUN_STATES
    if is_undriven and launcher != LOCAL_LAUNCHER:
        job = launcher_status(run)
        if job is not None and job.has_ended:
            sys.stderr.write(f"its launcher, {job}: waiting for a second answer that confirms it\n")
            job = launcher_status(run, confirms_end=True)
        if job is not None and not job.has_ended:
            raise UsageError(
                f"run {run.id} has a launcher: {job}. `redco-flow resume {run.id} --launcher "
                f"{LOCAL_LAUNCHER}` cancels that job, and a process on this machine drives the run."
            )
    reopen_run(run, launcher)
    spawn(run)


def _awaits_lock(run: RunDirectory) -> bool:
    """Whether no process drives the run; of a job that was lost with its node, await the lock."""
    deadline = time.monotonic() + _SECONDS_TO_LOSE_LOCK
    while (lease := find_holder(run)) is not None:
        job = launcher_status(run) if lease.job else None
        if job is None or not job.has_ended or time.monotonic() > deadline:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS_AT_LOCK)
    return True


def reopen_run(run: RunDirectory, launcher: str = "") -> None:
    """Make a run without an orchestrator one that can be continued; `resume_run` without the start.

    Args:
        launcher: as of `resume_run`.

    Raises:
        UsageError: it has an orchestrator, all of it is done, or another version trained it.
        WorkspaceError: the disk is full.
    """
    refuse_full_disk(run.path)
    with _take_over(run):
        if run.read_state()["state"] == State.COMPLETED:
            raise UsageError(
                f"run {run.id} is completed: there is nothing to resume. `redco-flow run` again "
                f"reuses its results; `--force STAGE` computes one again."
            )
        refuse_to_start_over(run)
        _reopen(run, launcher)


def retry_run(run: RunDirectory, *, only_failed: bool = False, launcher: str = "") -> None:
    """Give an ended run's failed, cancelled and early stopped stages new attempts.

    Args:
        only_failed: leave all others as they are.
        launcher: as of `resume_run`.

    Raises:
        UsageError: the run has not ended, or has no such stage.
        WorkspaceError: the disk is full.
    """
    refuse_full_disk(run.path)
    with _take_over(run):
        state = run.read_state()
        if state["state"] not in ENDED_RUN_STATES:
            raise UsageError(
                f"run {run.id} has not ended: its launcher is gone while its jobs may live. "
                f"`redco-flow resume {run.id}` takes it up."
            )
        stopped = () if only_failed else (State.CANCELLED, State.STOPPED_EARLY)
        wanted = (State.FAILED, *stopped)
        # The run's own, too: it may have ended before it had a stage.
        ended = {state["state"], *(stage["state"] for stage in state["stages"].values())}
        if not ended.intersection(wanted):
            raise UsageError(
                f"run {run.id} is {state['state']}: no stage of it failed"
                f"{'.' if only_failed else ', was cancelled or stopped early.'}"
            )
        refuse_to_start_over(run)
        _reopen(run, launcher)
    spawn(run, leave_cancelled=only_failed)


def spawn(run: RunDirectory, *, leave_cancelled: bool = False, forks: bool = False) -> None:
    """Have a process drive the run; return when it holds the lease, or its job is submitted.

    That is the process of another run, where one of the same environment is at work, or a new one.
    It is a job where the run's profile has another launcher than this machine.

    Args:
        leave_cancelled: as of `RunSession`.
        forks: as of `start_process`.

    Raises:
        RedcoFlowError: it ended at once; the message has its last words.
    """
    record = LaunchRecord.read(run)
    words = process_words(run, ["--leave-cancelled"] * leave_cancelled)
    if record.launcher != LOCAL_LAUNCHER:
        submit_launcher_job(run, words, record)
        return
    name = shared_name(record)
    try:
        if offer(run, name, {"leave_cancelled": leave_cancelled}):
            return
    except RedcoFlowError:
        if not _is_begun_by_another(run):
            raise
        return
    start_process(
        run,
        f"run {run.id}",
        [*words, "--share", name],
        record,
        # A run of reused stages may be over before we look.
        is_over=lambda: run.read_state()["state"] in ENDED_RUN_STATES,
        forks=forks,
    )


def _is_begun_by_another(run: RunDirectory) -> bool:
    """Whether a process that continues all of a killed one's runs has been faster.

    It takes a run's lease twice: to reopen the run, and then to drive it.
    """
    deadline = time.monotonic() + _SECONDS_TO_CLOSE
    while find_holder(run) is None and run.read_state()["state"] not in ENDED_RUN_STATES:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def start_process(
    leased: RunDirectory | SweepDirectory,
    name: str,
    words: Sequence[str],
    record: LaunchRecord,
    *,
    is_over: Callable[[], bool],
    forks: bool = False,
) -> None:
    """Start a detached process that drives a run or a sweep; wait until it holds the lease.

    Args:
        leased: the run or sweep, whose log gets the process's output.
        name: of the run or sweep, for an error.
        words: the module and its arguments.
        record: how the run, or a sweep's first one, was launched.
        is_over: whether the process has done its work, and has let go of the lease.
        forks: whether it may be a fork of this process, which has imported most of what it needs.

    Raises:
        RedcoFlowError: it ended at once; the message has its last words.
    """
    with open(leased.log_path, "ab", opener=open_no_link) as log:
        offset = log.tell()
        start = _fork_process if forks and _can_fork(record, log) else _execute_process
        pid = start(words, record, log)
    deadline = time.monotonic() + _SECONDS_TO_START
    while (lease := find_holder(leased)) is None or lease.holder.pid != pid:
        ended, exit_code = _end_of(pid)
        has_done = ended and exit_code in (0, RunCancelled.exit_code)
        # Where another process has the lease, it was faster.
        if has_done or is_over() or (ended and lease is not None):
            break
        if ended or time.monotonic() > deadline:
            if not ended:
                os.kill(pid, signal.SIGKILL)
            raise RedcoFlowError(
                f"{name} could not be started; {leased.log_path} says:\n"
                f"{_last_words(leased.log_path, offset)}"
            )
        time.sleep(_POLL_SECONDS)


def _end_of(pid: int) -> tuple[bool, int]:
    """Return whether a child has ended, and its exit code."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # SIGCHLD is ignored, and the child has ended
        return True, 1
    return bool(ended), os.waitstatus_to_exitcode(status)


def _execute_process(words: Sequence[str], record: LaunchRecord, log: BinaryIO) -> int:
    """Start Python with a module and its arguments, detached; return the process's id."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *words],
        cwd=record.directory if Path(record.directory).is_dir() else None,
        env=os.environ | record.variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    # Its end does not matter here; without this Python would complain of a lost child.
    process.returncode = 0
    return process.pid


def _can_fork(record: LaunchRecord, log: BinaryIO) -> bool:
    """Whether a fork does what a new process would: it has one thread and standard streams."""
    is_alone = len(os.listdir("/proc/self/task")) == 1
    is_here = record.directory == str(Path.cwd())
    has_streams = log.fileno() > 2
    return is_alone and is_here and has_streams and record.variables == search_path.variables()


def _fork_process(words: Sequence[str], record: LaunchRecord, log: BinaryIO) -> int:
    """Run a module as a program, in a detached fork of this process; return the fork's id."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader is gone
            stream.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = _be_program(words, record, log)
    except BaseException:  # noqa: BLE001 (as an interpreter does)
        traceback.print_exc()
    finally:  # what the callers of this function would do next is their own process's
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _be_program(words: Sequence[str], record: LaunchRecord, log: BinaryIO) -> int:
    """Run a module as a program, in a fork; return its exit code."""
    os.setsid()
    atexit._clear()
    with open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    # All files that Python opens are closed in programs that it starts; these came from outside.
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                os.close(number)
    sys.stdout = sys.stderr = open(  # noqa: SIM115 (to the end of the process)
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.environ.update(record.variables)
    sys.argv[1:] = words[1:]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _take_over(run: RunDirectory) -> Lease:
    """Take the run's lease; a launcher that has written the run's end is given time to leave.

    Raises:
        UsageError: the run has an orchestrator; names the process, its host, and since when.
    """
    deadline = time.monotonic() + _SECONDS_TO_CLOSE
    while find_holder(run) is not None and run.read_state()["state"] in ENDED_RUN_STATES:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    lease = acquire(run)
    note_takeover(run, lease)
    return lease


def refuse_to_start_over(run: RunDirectory) -> None:
    """Raise where a stopped stage has checkpoints that this version of redco-flow cannot continue.

    Other code has other fingerprints and other work directories: the stage would begin at step 0.

    Raises:
        UsageError: names the stage, its last checkpoint, and both ways on.
    """
    for stage in run.read_state()["stages"]:
        attempt = run.latest_attempt(stage)
        if attempt is None or attempt.read_job() is None or attempt.read_result() is not None:
            continue
        call = read_call(attempt.call_path)
        steps = _committed_steps(call)
        is_other = steps and (changed_modules(call.ingredients["code"]) or _has_path(run, call))
        # A job that lives is followed; its executor is asked last, for that can take its time.
        if is_other and _has_ended(attempt):
            raise UsageError(
                f"run {run.id} was started with {_version(run)}; this is {__version__}, whose code "
                f"would train stage '{stage}' from its beginning. Nothing was changed: its "
                f"checkpoint of step {steps[-1]} is kept. To continue, install the version "
                f"that wrote it and `redco-flow resume {run.id}`; to start over with this one: "
                f"`{shlex.join(['redco-flow', *repeatable(run.record['argv'][1:])])}`."
            )


def _has_path(run: RunDirectory, call: Call) -> bool:
    """Whether its fingerprint has the path of a model's directory that now has none."""
    kind = find_stage_kind(call.kind)
    directory = LaunchRecord.read(run).directory  # the path may be relative to it
    try:
        with contextlib.chdir(directory if Path(directory).is_dir() else "."):
            config = kind.config_type.from_json(call.config)
            now = digested_directories(kind.hub_references(config), kind.data_files(config))
    except (ValueError, OSError):
        return False  # a fault of the data, with which the stage does not begin
    return any(one not in call.ingredients.get("directories", ()) for one in now)


def _has_ended(attempt: AttemptDirectory) -> bool:
    # Imported here: what only starts runs never pays for it.
    from redco_flow.launch.executor import reattach

    return reattach(attempt.read_job() or {}).done()


def _committed_steps(call: Call) -> list[int]:
    try:
        fingerprint = with_inputs(call).fingerprint
    except UpstreamMissing:
        return []  # of a run ahead whose inputs were never made
    return Workspace(Path(call.workspace)).committed_steps(fingerprint)


def _version(run: RunDirectory) -> str:
    """Return the version that began a run, for a message; recorded since 0.2.0."""
    version = run.record.get("version")
    if not version:
        return "a version before 0.2.0"
    return f"other code of version {version}" if version == __version__ else f"version {version}"


def _reopen(run: RunDirectory, launcher: str) -> None:
    """Forget the run's end and the job that drove it, so that a follower sees it run from here on.

    Raises:
        UsageError, DoesNotFit: the run cannot have this launcher; nothing is changed.
        ClusterUnreachable: its job cannot be cancelled; nothing is changed.
    """
    record = with_launcher(run, launcher) if launcher else None
    if record is not None:
        _check_launcher(record)
    give_up_launcher_job(run)
    if record is not None:
        record.write(run)
    run.clear_cancel()
    forget_deletion(run)
    forgotten = {"state": State.PENDING, "exit_code": None, "message": "", "ended_at": None}
    run.write_state(run.read_state() | forgotten)


def _check_launcher(record: LaunchRecord) -> None:
    # Imported here: what only starts runs never pays for it.
    from redco_flow.orchestrate.run.device_checks import launcher_problems

    profile = Profile.from_record(record.profile)
    directory = Path(record.directory)
    if problems := list(map(str, launcher_problems(profile, os.environ, directory))):
        raise DoesNotFit("\n".join(problems))


def _last_words(path: Path, offset: int) -> str:
    said = path.read_bytes()[offset:].decode("utf-8", "replace").strip()
    return "\n".join(said.splitlines()[-20:])
