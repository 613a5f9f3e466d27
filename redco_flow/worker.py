"""Run one stage call: what every executor starts, on every host.

`python -m redco_flow.worker CALL_JSON`. Owns result.json, error.json, progress.json and
metrics.jsonl of the attempt and, in the end, results/<fingerprint>.json. Knows nothing of who
started it. Imports no JAX itself: the environment is set before the stage does. Where several
processes run the stage together, rank 0 alone locks and publishes.

Exit codes: 0 with result.json; 1 with error.json; 75 stopped as asked, with error.json too.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import Call, InputReference, read_call, with_inputs
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.work_lock import acquire
from redco_flow.launch.worker_exit import STOPPED_EXIT_CODE
from redco_flow.launch.worker_process import (
    ReservedFiles,
    end,
    jax_variables,
    log,
    log_to_stderr,
    prepare,
    report_error,
)
from redco_flow.records import SECONDS_TO_SEE_RECORDS, refuse_link, write_json
from redco_flow.runtime import process_group
from redco_flow.runtime.context import (
    InputArtifact,
    InputDamaged,
    Shard,
    StageContext,
    StageOutputs,
    StopFlag,
    Stopped,
)
from redco_flow.runtime.process_group import ProcessGroup, check_devices
from redco_flow.runtime.publication import check_outputs, publish, write_result
from redco_flow.runtime.staging import staged
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.code_digest import digests_of, is_source_file, source_digests
from redco_flow.tracking.file_lock import HOLDERS, HeldLock, LockLost
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.results import StageResult, claim_result, fingerprint
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.spec.stage_kind import StageKind


class CallRejected(RedcoFlowError):
    """The call cannot be run here; nothing of the stage has run."""


def main(arguments: list[str]) -> NoReturn:
    """Run the call and end the process at once, whatever threads are still there."""
    reserved = ReservedFiles()
    stop = StopFlag()

    def on_terminate() -> None:
        is_first, stop.requested = not stop.requested, True
        if is_first and not stop.is_watched:
            raise Stopped("it had nothing to save.")

    path = Path(arguments[0]).absolute()
    rank_info = RankInfo.from_environment(os.environ)
    attempt = AttemptDirectory(path.parent, rank_info.rank)
    try:
        prepare(on_terminate)
        log_to_stderr(rank_info.rank)
        run_call(path, attempt, stop, rank_info)
    except BaseException as error:  # noqa: BLE001 (the last frame: nothing above sees it)
        stop.is_watched = True
        reserved.release()
        try:
            report_error(attempt, error)
        finally:
            end(STOPPED_EXIT_CODE if isinstance(error, Stopped) else 1)
    end(0)


def run_call(
    path: Path,
    attempt: AttemptDirectory,
    stop: StopFlag,
    rank_info: RankInfo = RankInfo(),  # noqa: B008 (frozen)
) -> None:
    """Run the call at `path`, or take a result that is there already; write result.json.

    Args:
        rank_info: which of the job's processes this is.

    Raises:
        CallRejected: it cannot be run here.
        InputDamaged: an input is not what was published, before the stage ran or after.
        UpstreamMissing: it takes from a stage that has no result.
        CannotMeet: the job's other processes are not there, or would run something else.
        BadOutputs: what the stage returned cannot be published.
        Stopped: `stop` was requested.
    """
    started_at = time.monotonic()
    call = read_call(path)
    log(
        f"stage '{call.stage}' of run {call.run}, attempt {call.attempt}, "
        f"process {os.getpid()} on {os.uname().nodename}"
    )
    call = with_inputs(call, wait_seconds=SECONDS_TO_SEE_RECORDS)
    workspace = Workspace(Path(call.workspace))
    os.environ.update(
        jax_variables(
            os.environ,
            num_cpu_devices=call.num_cpu_devices,
            compile_cache=workspace.cache / "jax",
        )
    )
    _check_fingerprint(call)
    context = _make_context(call, attempt, workspace, stop, rank_info)
    group = ProcessGroup(call, context, rank_info)
    if rank_info.rank > 0:
        _take_part(call, context, group, rank_info.local_rank)
        return
    if call.shard is not None:
        _run_shard(call, context, workspace, started_at)
        return
    lock = _take_lock(context)
    result, progress = claim_result(workspace, call.fingerprint), None
    if result is None:
        _check_code(call)
        context.report(phase="checking inputs")
        context.check_inputs()
        with staged(context, call.staging):
            group.join()
            outputs = _run_stage(call, context)
            # From here on a stop only waits: what is left is short and must not be cut in two.
            stop.is_watched = True
            group.part()
        result = publish(workspace, call, context, outputs, time.monotonic() - started_at, lock)
        progress = context.progress
    else:
        log(f"run {result.run} published this result already; reusing it.")
        group.call_off()
    write_result(attempt, result, progress)
    if progress is not None:
        with suppress(OSError):  # the stage has its result, whatever the disk says now
            attempt.progress_path.unlink(missing_ok=True)


def _run_shard(call: Call, context: StageContext, workspace: Workspace, started_at: float) -> None:
    """Compute one part of the stage; the process that computes the last one publishes all."""
    _take_lock(context, shared=True)
    result = claim_result(workspace, call.fingerprint)
    if result is None:
        _check_code(call)
        context.check_inputs()
        check_devices(call)
        with staged(context, call.staging):
            result = _compute_shard(call, context, workspace, started_at)
    context.flush()
    if result is not None:
        write_result(context.attempt_dir.whole, result)
    done = {"fingerprint": call.fingerprint, "outputs": result.outputs if result else {}}
    write_json(context.attempt_dir.result_path, done)


def _compute_shard(
    call: Call, context: StageContext, workspace: Workspace, started_at: float
) -> StageResult | None:
    """Compute the call's part; return the published result if it was the last one."""
    assert call.shard is not None
    kind, config = _kind_and_config(call)
    run_shard = importlib.import_module(kind.run_module).run_shard
    join = run_shard(context, config, Shard(call.shard, call.num_shards))
    context.check_inputs()
    lock = _take_lock(context, process_group.LOCK)
    if not process_group.note_computed(context.work_dir, call.shard, call.num_shards):
        return None
    result = claim_result(workspace, call.fingerprint)
    if result is None:
        outputs = join()
        context.check_inputs()
        check_outputs(call, outputs, _output_names(kind, config))
        context.stop.is_watched = True
        seconds = time.monotonic() - started_at
        result = publish(workspace, call, context, outputs, seconds, lock)
    return result


def _take_part(call: Call, context: StageContext, group: ProcessGroup, local_rank: int) -> None:
    """Run the stage as one of the ranks that publish nothing."""
    _check_code(call)
    is_first_on_disk = not (context.shares_disk or local_rank)
    if is_first_on_disk:
        context.check_inputs()
    with staged(context, None if group.is_called_off() else call.staging):
        if group.join():
            if not is_first_on_disk:  # what the first one read is remembered
                context.check_inputs()
            _run_stage(call, context)
            context.stop.is_watched = True
            group.part()
    write_json(context.attempt_dir.result_path, {"fingerprint": call.fingerprint, "outputs": {}})


def _check_fingerprint(call: Call) -> None:
    if fingerprint(call.ingredients) != call.fingerprint:
        raise CallRejected(
            f"stage '{call.stage}': the call's ingredients do not have its fingerprint "
            f"{call.fingerprint[:16]}: call.json was changed, or written by another redco-flow. "
            f"Nothing ran."
        )


def _check_code(call: Call) -> None:
    expected: Mapping[str, str] = call.ingredients.get("code", {})
    kind, config = _kind_and_config(call)
    found = {
        # What is imported is in `expected`: other imports are in a file that differs itself.
        **digests_of([name for name in expected if not is_source_file(name)]),
        **source_digests(kind.code_files(config)),
    }
    changed = [name for name, digest in expected.items() if found.get(name) != digest]
    if changed:
        raise CallRejected(
            f"stage '{call.stage}': the code on {os.uname().nodename} is not what was planned: "
            f"{', '.join(changed)} differ. Nothing ran. Bring the same code here, or run again "
            f"to plan with this one."
        )


def _make_context(
    call: Call,
    attempt: AttemptDirectory,
    workspace: Workspace,
    stop: StopFlag,
    rank_info: RankInfo,
) -> StageContext:
    from redco_flow.launch.host_facts import package_versions  # 30 ms after the first line

    store = ArtifactStore(workspace)
    inputs = {}
    for slot, references in call.inputs.items():
        found = [_whole(store, reference) for reference in references]
        inputs[slot] = tuple(InputArtifact(a.id, a.kind, a.path, a.manifest) for a in found)
    work_dir = workspace.work_directory(call.fingerprint)
    refuse_link(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    return StageContext(
        run=call.run,
        stage=call.stage,
        fingerprint=call.fingerprint,
        inputs=inputs,
        work_dir=work_dir,
        attempt_dir=attempt,
        shares_disk=bool(rank_info.shares_disk),
        provenance={
            "stage": call.stage,
            "run": call.run,
            "attempt": call.attempt,
            "fingerprint": call.fingerprint,
            "code": call.code,
            "config_digest": call.config_digest,
            "host": os.uname().nodename,
            "time": utc_now(),
            "versions": package_versions(),
            "ingredients": call.ingredients,
        },
        stop=stop,
        verify_inputs=partial(_verify_inputs, call, store),
    )


def _whole(store: ArtifactStore, reference: InputReference) -> Artifact:
    if not store.is_whole(reference.id):
        raise CallRejected(
            f"input {_described(reference)} is not whole in {reference.path}: it was deleted or "
            f"changed. Nothing ran; run the pipeline again to produce a new one."
        )
    return store.get(reference.id)


def _verify_inputs(call: Call, store: ArtifactStore) -> None:
    """Raise InputDamaged where a byte of an input is not what was published."""
    references = [one for given in call.inputs.values() for one in given]
    found = {one: store.damage(one.id) for one in references}
    damaged = [f"{_described(one)}: {'; '.join(found[one])}" for one in references if found[one]]
    if damaged:
        remedy = f"`redco-flow resume {call.run}` produces it again"
        if any(one.is_promoted and found[one] for one in references):
            remedy = "a new run of the pipeline that produced it makes it again"
        raise InputDamaged(
            f"stage '{call.stage}' cannot use what it takes in: {'. '.join(damaged)}. Nothing was "
            f"published; {remedy}."
        )


def _described(reference: InputReference) -> str:
    came_from = f"output '{reference.output}' of stage '{reference.stage}'"
    named = reference.stage if reference.is_promoted else came_from
    return f"{reference.kind} {reference.id} ({named})"


def _take_lock(context: StageContext, name: str = "lock", *, shared: bool = False) -> HeldLock:
    """Hold the work directory to the end of the process; wait while another process does."""

    def end_without_lock(error: LockLost) -> None:
        report_error(context.attempt_dir, error)
        end(1)

    said: set[str] = set()

    def while_waiting(holder: str) -> None:
        if holder not in said:
            log(f"{holder} is at work on the same stage; waiting for it.")
            said.add(holder)
        context.report(phase=f"waiting for {holder}")
        context.raise_if_stopped()

    lock = acquire(
        context.work_dir / name,
        context.holder(),
        while_waiting,
        shared=shared,
        on_lost=end_without_lock,
    )
    context.stop.is_watched = False
    return lock


def _run_stage(call: Call, context: StageContext) -> StageOutputs:
    kind, config = _kind_and_config(call)
    context.report(phase="starting")
    check_devices(call)
    run: Callable[[StageContext, Any], StageOutputs] = importlib.import_module(kind.run_module).run
    try:
        outputs = run(context, config)
    except Exception as error:
        _check_inputs_again(context, error)
        raise
    _check_inputs_again(context)
    context.flush()
    if context.attempt_dir.rank == 0:  # what rank 0 publishes may not be there yet on another
        check_outputs(call, outputs, _output_names(kind, config))
    return outputs


def _check_inputs_again(context: StageContext, cause: Exception | None = None) -> None:
    """Let nothing stay that was made from inputs that are not what was published.

    Args:
        cause: what went wrong, perhaps by them.
    """
    try:
        context.check_inputs()
    except InputDamaged as damaged:
        if context.attempt_dir.rank == 0 and not isinstance(cause, InputDamaged):
            _empty(context.work_dir)
        raise damaged from cause


def _empty(work_dir: Path) -> None:
    """Remove all but the locks, which are held."""
    for path in work_dir.iterdir():
        if path.suffix == HOLDERS:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.name.endswith("lock"):
            path.unlink()


def _kind_and_config(call: Call) -> tuple[StageKind, Any]:
    from redco_flow.spec.stage_kind import find_stage_kind

    kind = find_stage_kind(call.kind)
    return kind, kind.config_type.from_json(call.config)


def _output_names(kind: StageKind, config: Any) -> list[str]:
    return kind.output_names(config) if kind.output_names else list(kind.outputs)


if __name__ == "__main__":
    main(sys.argv[1:])
