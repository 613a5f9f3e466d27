"""Export a checkpoint as a directory that transformers or PEFT reads: all of it, or nothing.

What needs JAX runs in a process of its own (`stages.artifacts.hugging_face`). The files grow in
a directory beside the target, which gets its name when every one of them is on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from redco_flow import search_path
from redco_flow.errors import ArtifactError, RedcoFlowError, UsageError
from redco_flow.launch.redaction import redact_text
from redco_flow.local_paths import expanded
from redco_flow.orchestrate.checkpoints.model_card import Base, CardFacts, model_card
from redco_flow.records import digest_file, read_json, readable_digest, sync, write_json, write_text
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.aliases import is_alias
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import refuse_deleted
from redco_flow.tracking.lineage import ResultTarget, find_target, run_results, trace
from redco_flow.tracking.lineage_nodes import LineageNode
from redco_flow.tracking.run_directory import LAST_RUN, find_run
from redco_flow.tracking.workspace import Workspace

RECORD_FILE = "redco_flow_export.json"
CARD_FILE = "README.md"
ADAPTER_FILE = "adapter.json"
_PROGRAM = "redco_flow.stages.artifacts.hugging_face"
# A larger base of an adapter would not be run to check it, so its files are not compared.
_MAX_BASE_BYTES = 2**33
# Exit codes of a process that was killed for its memory, or that a native library ended.
_CRASHES = [-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)]

Form = Literal["model", "adapter"]


def find_checkpoint(workspace: Workspace, text: str, *, default: str = "") -> Artifact:
    """Return the checkpoint that a command line means.

    Args:
        text: its id or the beginning of it, its path, @ALIAS or @MODEL/ALIAS, RUN/STAGE,
            RUN/STAGE/OUTPUT, the STAGE of the last run, RUN, or `last`, the last run.
        default: which of a stage's checkpoints is meant where `text` fits several, as `last`.

    Raises:
        UsageError: nothing, several, or something else has this name.
        ArtifactError: its files were deleted; says when, by which command, how to make it again.
    """
    store = ArtifactStore(workspace)
    path = Path(text)
    if (path / "manifest.json").is_file() or (path.parent / "manifest.json").is_file():
        text = path.name if (path / "manifest.json").is_file() else path.absolute().parent.name
    target = _of_run(workspace, text, default) or _target(workspace, text, default)
    if isinstance(target, ResultTarget):
        target = store.get(_checkpoint_of(target, default))
    found = target
    if found.kind != "checkpoint":
        raise UsageError(
            f"{text!r} is of kind {found.kind}, not a checkpoint: `redco-flow artifacts --kind "
            "checkpoint` lists those."
        )
    refuse_deleted(workspace, found)
    return found


def _target(workspace: Workspace, text: str, default: str) -> Artifact | ResultTarget:
    try:
        return find_target(workspace, text)
    except UsageError as error:
        if "/" in text or is_alias(text):
            raise
        try:
            run = find_run(workspace, text)
        except UsageError as of_runs:
            raise UsageError(
                f"no artifact, run or stage of the last run is called {text!r}; `redco-flow "
                f"artifacts --kind checkpoint` lists the checkpoints. {error} {of_runs}"
            ) from error
        found = _of_run(workspace, run.id, default)
        assert found is not None
        return found


def _of_run(workspace: Workspace, text: str, default: str) -> Artifact | None:
    """The checkpoint that a run predicted with, or the only one that it made; None of no run.

    Args:
        default: only what the run made counts, and this one of each stage's.

    Raises:
        UsageError: the run has none, or several.
    """
    if text not in LAST_RUN and ("/" in text or not (workspace.runs / text / "run.json").is_file()):
        return None
    run = find_run(workspace, text)
    results = run_results(workspace, run)
    used = {
        one: None
        for result in results.values()
        if result.kind == "predict"
        for one in result.ingredients["inputs"].get("checkpoint", [])
    }
    made = {
        f"{run.id}/{stage}{output.removeprefix('checkpoint')}": one
        for stage, result in results.items()
        for output, one in result.outputs.items()
        if output.partition("/")[0] == "checkpoint"
    }
    if default:
        # RUN/STAGE/OUTPUT, or RUN/STAGE of a stage that makes one checkpoint.
        fitting = [name for name in made if name.endswith(f"/{default}") or name.count("/") == 1]
        used = dict.fromkeys(made[name] for name in fitting)
    ids = list(used) or list(dict.fromkeys(made.values()))
    if len(ids) == 1:
        return ArtifactStore(workspace).get(ids[0])
    raise UsageError(
        f"run {run.id} has {'several checkpoints' if ids else 'no checkpoint'}; name one: "
        f"{', '.join(made) or 'RUN/STAGE of another run, or an artifact id'}."
    )


def _checkpoint_of(target: ResultTarget, default: str) -> str:
    """The id of the one checkpoint among a stage's outputs."""
    result = target.result
    names = [target.output] if target.output else list(result.outputs)
    fitting = {name: result.outputs[name] for name in names if name.startswith("checkpoint")}
    if target.metric or not fitting:
        raise UsageError(
            f"stage {result.run}/{result.stage} has no such checkpoint; its outputs: "
            f"{', '.join(result.outputs) or 'none'}."
        )
    if default and f"checkpoint/{default}" in fitting:
        return fitting[f"checkpoint/{default}"]
    if len(set(fitting.values())) > 1:
        listed = ", ".join(
            f"{result.run}/{result.stage}/{name.partition('/')[2]}" for name in fitting
        )
        raise UsageError(f"stage {result.stage} has several checkpoints; name one: {listed}.")
    return next(iter(fitting.values()))


def export_checkpoint(
    workspace: Workspace,
    checkpoint: Artifact,
    folder: Path,
    *,
    merge_lora: bool,
    dtype: str | None,
) -> Form:
    """Write a checkpoint into a directory, or find that the same export is there already.

    Args:
        folder: made if absent; must be empty, or hold this export.
        merge_lora: the whole model of a training of low-rank factors, and not the factors.
        dtype: of the parameters; None: as they are stored.

    Returns:
        What the directory has.

    Raises:
        ArtifactError: the checkpoint is damaged, or its model has no Hugging Face layout.
        UsageError: the directory has something else in it, or the options do not fit.
    """
    form = _form(checkpoint, merge_lora=merge_lora)
    if form == "adapter" and dtype is not None:
        raise UsageError("--dtype is for a whole model; an adapter is float32.")
    asked = {"checkpoint": checkpoint.id, "form": form, "dtype": dtype}
    if _is_there(folder, asked):
        return form
    _refuse_damage(workspace, checkpoint)
    lineage = trace(workspace, checkpoint.id)
    base = _base(lineage)
    if form == "adapter":
        _check_base(lineage, checkpoint)
    folder = folder.resolve()
    with _growing(folder) as growing:
        written = _run_writer(
            {
                "checkpoint": str(checkpoint.path),
                "folder": str(growing),
                "form": form,
                "dtype": dtype,
                "base": base.name if base else None,
                "revision": base.revision if base else None,
                "base_folder": _base_folder(lineage) if base is None else None,
            }
        )
        evaluations = _evaluations(workspace, checkpoint)
        card = model_card(CardFacts(checkpoint, lineage, evaluations, form, base, written))
        write_text(growing / CARD_FILE, redact_text(card, secret_values(os.environ)))
        _finish(growing, asked)
        growing.rename(folder)
    return form


def _form(checkpoint: Artifact, *, merge_lora: bool) -> Form:
    is_factored = (checkpoint.path / ADAPTER_FILE).is_file()
    return "adapter" if is_factored and not merge_lora else "model"


def _is_there(folder: Path, asked: Mapping[str, Any]) -> bool:
    """Whether the directory is this export already."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        if folder.resolve() == Path.cwd():
            raise UsageError(f"{folder} is the current directory; name a new one.")
        return False
    remedy = "Name another directory, or remove it."
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file. {remedy}")
    try:
        record = read_json(folder / RECORD_FILE)
        files = dict(record["files"])
        is_same = {key: record.get(key) for key in asked} == dict(asked)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        is_same = False
    if not is_same:
        raise UsageError(f"{folder} is not empty, and not this export. {remedy}")
    changed = [name for name, digest in files.items() if readable_digest(folder / name) != digest]
    if changed:
        raise UsageError(
            f"{folder} holds this export, but {', '.join(changed)} changed since. {remedy}"
        )
    return True


def _refuse_damage(workspace: Workspace, checkpoint: Artifact) -> None:
    problems = ArtifactStore(workspace).verify(checkpoint.id)
    if problems:
        raise ArtifactError(
            f"checkpoint {checkpoint.short_id} is damaged, and nothing was exported: "
            f"{'; '.join(problems)}. A new run of its pipeline makes it again."
        )


def _settings(lineage: LineageNode) -> dict[str, Any]:
    """The training's settings by dotted key; empty where its result is gone."""
    return (
        {leaf.key: leaf.value for leaf in lineage.production.config} if lineage.production else {}
    )


def _base(lineage: LineageNode) -> Base | None:
    settings = _settings(lineage)
    name = settings.get("model.name_or_path")
    # The hub's models are among what a training was made of; a local directory's name is private.
    is_of_hub = any(parent.name == f"hub:models/{name}" for parent in lineage.parents)
    if not is_of_hub or settings.get("model.from_scratch"):
        return None
    return Base(str(name), settings.get("model.revision"))


def _check_base(lineage: LineageNode, checkpoint: Artifact) -> None:
    settings = _settings(lineage)
    is_drawn = settings.get("model.name_or_path") is None or settings.get("model.from_scratch")
    if settings and is_drawn:
        raise UsageError(
            f"checkpoint {checkpoint.short_id} has low-rank factors over a model that was drawn at "
            "random, which no one has elsewhere: an adapter alone is of no use. Give --merge-lora."
        )
    if any((one.type, one.name) == ("artifact", "checkpoint") for one in lineage.parents):
        raise UsageError(
            f"checkpoint {checkpoint.short_id} has low-rank factors over another checkpoint "
            "(`start_from`), not over the model that its settings name: with that model the "
            "adapter would give other results. Give --merge-lora."
        )


def _base_folder(lineage: LineageNode) -> str | None:
    """The directory of the model that was trained, where its files are there and unchanged."""
    name = _settings(lineage).get("model.name_or_path")
    if name is None or not (folder := expanded(str(name))).is_dir():
        return None
    files = [
        (folder / Path(one.name).name, one.id) for one in lineage.parents if one.type == "data"
    ]
    is_small = sum(path.stat().st_size for path, _ in files if path.is_file()) < _MAX_BASE_BYTES
    is_there = bool(files) and is_small and all(readable_digest(path) == id_ for path, id_ in files)
    return str(folder.absolute()) if is_there else None


def _evaluations(workspace: Workspace, checkpoint: Artifact) -> tuple[Mapping[str, Any], ...]:
    found = ArtifactStore(workspace).list("metrics")
    return tuple(one.metadata for one in found if one.metadata.get("checkpoint") == checkpoint.id)


@contextlib.contextmanager
def _growing(folder: Path) -> Iterator[Path]:
    """Hold an empty directory beside `folder`, to be renamed to it; it is gone where that fails.

    Args:
        folder: absolute, and no link.

    Raises:
        UsageError: another process writes this export.
    """
    growing = folder.with_name(f".{folder.name}.partial")
    growing.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(growing, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process exports into {folder}: wait for it.") from error
        _empty(growing)  # of what a killed one left
        try:
            yield growing
        finally:
            shutil.rmtree(growing, ignore_errors=True)
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _run_writer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the process that has JAX, and return its answer.

    Where it is killed or crashes, it is run once more without computing scores, which takes much
    less memory: the limit of a cgroup is not known before.

    Raises:
        ArtifactError: it cannot be done; the message says why.
        RedcoFlowError: it ended without an answer; its messages are on standard error.
    """
    done = _start_writer(request)
    if done.returncode in _CRASHES:
        done = _start_writer({**request, "check_scores": False})
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RedcoFlowError(
            f"the process that writes the model ended with exit code {done.returncode}; what it "
            "said stands above. Nothing was exported."
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise ArtifactError(f"{answer['error']} Nothing was exported.")
    return answer


def _start_writer(request: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", _PROGRAM],
        # Arrays go from file to file: no device is needed, nor taken from a training.
        env={**os.environ, **search_path.variables(), "JAX_PLATFORMS": "cpu"},
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


def _finish(folder: Path, asked: Mapping[str, Any]) -> None:
    """Put all files on the disk, readable as new files are, and beside them what they are."""
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod((folder / CARD_FILE).stat().st_mode)  # safetensors makes its own private
        if path.name != CARD_FILE:  # its text is the user's to change
            files[path.name] = digest_file(path)
        sync(path)
    write_json(folder / RECORD_FILE, {**asked, "files": files})
    sync(folder)
