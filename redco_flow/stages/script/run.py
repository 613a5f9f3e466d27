"""script: run a user's own script in this process, with the stage's paths as its options."""

from __future__ import annotations

import errno
import runpy
import shutil
import sys
from pathlib import Path

from redco_flow.engine.errors import TrainingStopped
from redco_flow.errors import RedcoFlowError
from redco_flow.records import digest_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs, Stopped
from redco_flow.spec.names import failure
from redco_flow.stages.data.guard import DataGuard
from redco_flow.stages.provenance import provenance_of
from redco_flow.stages.script.config import Config, data_files, words
from redco_flow.stages.script.context import ScriptContext


class ScriptFailed(RedcoFlowError):
    """The script raised, exited with an error, or left an output out."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Run the script to its end and return what it made.

    Raises:
        ScriptFailed: with the script's file and line.
        DataChanged: a file among the inputs is not what was planned.
        Stopped: as asked; a later attempt runs the script again, from its checkpoints.
    """
    guard = DataGuard(context, data_files(config))
    folders = _empty_folders(context, config)
    inputs = {slot: context.input(slot).path for slot in context.inputs}
    data = digest_json({slot: context.input(slot).id for slot in context.inputs})
    script = ScriptContext(context, provenance_of(context, config, data=data))
    context.report(phase="running the script")
    with script.active():
        _run_script(Path(config.path), words(config, inputs, folders))
    guard.check_again()
    _check_outputs(config, folders)
    _meet_others(context)
    outputs = {name: Output(name, folder) for name, folder in folders.items()}
    return StageOutputs(outputs, script.found or None)


def _empty_folders(context: StageContext, config: Config) -> dict[str, Path]:
    """Make the outputs' folders; ranks above 0, whose files are not kept, have their own."""
    rank = context.attempt_dir.rank
    root = context.work_dir / ("outputs" if rank == 0 else f"outputs-of-rank{rank}")
    shutil.rmtree(root, ignore_errors=True)  # what an earlier attempt left
    folders = {name: root / name for name in config.outputs}
    for folder in folders.values():
        folder.mkdir(parents=True)
    return folders


def _run_script(path: Path, arguments: list[str]) -> None:
    """Run a file as `python FILE ARGUMENTS` does."""
    argv, search_path = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ScriptFailed(_described_exit(path, error)) from error
    except Exception as error:
        if isinstance(error, TrainingStopped):
            raise Stopped(f"{path.name} {error}; a later attempt goes on there.") from error
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise  # what ends the process knows more about these
        raise ScriptFailed(f"{path.name} failed{failure(error)}") from error
    finally:
        sys.argv, sys.path[:] = argv, search_path


def _described_exit(path: Path, error: SystemExit) -> str:
    what = "with code" if isinstance(error.code, int) else "saying:"
    return f"{path.name} exited{failure(error).partition(': ')[0]} {what} {error.code}"


def _check_outputs(config: Config, folders: dict[str, Path]) -> None:
    missing = [
        name for name, one in folders.items() if not any(p.is_file() for p in one.rglob("*"))
    ]
    if missing:
        raise ScriptFailed(
            f"{Path(config.path).name} ended and wrote no file for {', '.join(missing)}: each of "
            f"'outputs' is given to it as --NAME FOLDER, and must hold a file in the end."
        )


def _meet_others(context: StageContext) -> None:
    """Wait for the other processes: parting leaves them little time for each other."""
    if "jax" not in sys.modules:
        return

    from redco_flow.engine.agreement import wait_for_all
    from redco_flow.runtime.process_group import describe_devices

    wait_for_all("the script ended")
    context.report(devices=describe_devices())
