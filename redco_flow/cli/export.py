"""Verbs that write a checkpoint or a run for elsewhere: export, bundle, unbundle."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from redco_flow.cli.arguments import (
    Verbs,
    add_checkpoint,
    add_json,
    add_workspace,
    workspace_of,
    workspace_path,
)
from redco_flow.cli.text import columns, short_id, size
from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.bundles import Contents, contents_of, read_bundle, write_bundle
from redco_flow.tracking.deletions import find_deletion
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.sweep_directory import find_single_run
from redco_flow.tracking.workspace import Workspace

_DTYPES = ("float32", "bfloat16", "float16")


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    export = verbs.add("export", _export)
    add_checkpoint(export)
    export.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="target folder: new, empty, or an earlier export of this checkpoint",
    )
    export.add_argument(
        "--merge-lora", action="store_true", help="merge LoRA factors and export the full model"
    )
    export.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the parameters (default: as trained)"
    )
    export.add_argument("--push", metavar="ORG/NAME", help="also upload it to the hub")
    export.add_argument(
        "--private", action="store_true", help="make the hub's repository, if it is new, private"
    )
    add_json(export)
    add_workspace(export)
    _add_bundle(verbs)


def _export(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.checkpoints.export import export_checkpoint, find_checkpoint

    if options.private and not options.push:
        raise UsageError("--private is for --push ORG/NAME.")
    workspace = workspace_of(options)
    checkpoint = find_checkpoint(workspace, options.checkpoint)
    if options.push:
        _check_push(options.push)
    if not options.json:
        sys.stderr.write(f"exporting checkpoint {short_id(checkpoint.id)} to {options.folder}\n")
    form = export_checkpoint(
        workspace,
        checkpoint,
        options.folder,
        merge_lora=options.merge_lora,
        dtype=options.dtype,
    )
    files = {path.name: path.stat().st_size for path in sorted(options.folder.iterdir())}
    pushed = _push(options) if options.push else None
    if options.json:
        done = {"checkpoint": checkpoint.id, "path": str(options.folder), "form": form}
        print(json.dumps({**done, "files": files, "pushed": pushed}))
        return 0
    print(columns([[name, size(count)] for name, count in files.items()], ["FILE", "SIZE"]))
    print(f"{form}: {options.folder}" + (f", pushed: {pushed}" if pushed else ""))
    return 0


def _check_push(name: str) -> None:
    from redco_flow.hub import HubError, check_upload

    try:
        check_upload(name)
    except HubError as error:
        raise UsageError(f"--push {name}: {error}") from error


def _push(options: argparse.Namespace) -> str:
    from redco_flow.hub import HubError, other_weights, upload_model
    from redco_flow.orchestrate.checkpoints.export import RECORD_FILE

    name, folder = options.push, options.folder
    try:
        deleted = other_weights(name, folder, RECORD_FILE)
        if deleted:
            sys.stderr.write(f"deleting an earlier export's {', '.join(deleted)} from {name}\n")
        message = f"redco-flow export {name}"
        return upload_model(name, folder, message, is_private=options.private, deleted=deleted)
    except HubError as error:
        raise RedcoFlowError(
            f"the export is whole in {folder}, but not on the hub: {error}. The same command goes "
            "on with the upload alone."
        ) from error


def _add_bundle(verbs: Verbs) -> None:
    bundle = verbs.add("bundle", _bundle)
    bundle.add_argument(
        "what",
        metavar="RUN|CHECKPOINT",
        help="a run, `last`, or a checkpoint: its id, RUN/STAGE, @ALIAS",
    )
    bundle.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.tar", help="file to write"
    )
    bundle.add_argument(
        "--without-inputs",
        action="store_true",
        help="leave out the artifacts that these were made from, such as datasets",
    )
    unbundle = verbs.add("unbundle", _unbundle)
    unbundle.add_argument("file", type=Path, metavar="FILE.tar", help="what `bundle` wrote")
    for parser in (bundle, unbundle):
        add_json(parser)
        add_workspace(parser)


def _bundle(options: argparse.Namespace) -> int:
    output: Path = options.output
    if not output.absolute().parent.is_dir():
        raise UsageError(f"-o {output}: there is no directory {output.absolute().parent}.")
    if output.exists():
        raise UsageError(f"-o {output} exists already; delete it, or give another name.")
    workspace = workspace_of(options)
    artifacts, results = _named(workspace, options.what)
    contents = contents_of(workspace, artifacts, results, with_inputs=not options.without_inputs)
    for stage in contents.left_out:
        sys.stderr.write(
            f"note: the result of stage {stage} is left out: its inputs may have been damaged\n"
        )
    command = f"redco-flow bundle {options.what}{' --without-inputs' * options.without_inputs}"
    write_bundle(output, workspace, contents, command=command)
    _print(contents, options, output)
    return 0


def _named(workspace: Workspace, text: str) -> tuple[list[Artifact], list[StageResult]]:
    """Return a run's artifacts and results, or a checkpoint."""
    from redco_flow.orchestrate.checkpoints.export import find_checkpoint
    from redco_flow.tracking.aliases import is_alias

    store = ArtifactStore(workspace)
    if "/" in text or is_alias(text) or store.is_prefix(text):
        return [find_checkpoint(workspace, text)], []
    run = find_single_run(workspace, text)
    results = list(run_results(workspace, run).values())
    ids = dict.fromkeys(one for result in results for one in result.outputs.values())
    found = [artifact for one in ids if (artifact := store.find(one)) is not None]
    if not any(find_deletion(artifact) is None for artifact in found):
        raise UsageError(
            f"run {run.id} has no artifacts: no stage has a result, or their files were deleted."
        )
    return found, results


def _unbundle(options: argparse.Namespace) -> int:
    if not options.file.is_file():
        raise UsageError(f"{options.file}: there is no such file.")
    contents = read_bundle(options.file, Workspace.open(workspace_path(options)))
    for stage in contents.left_out:
        sys.stderr.write(
            f"note: the workspace has another result of stage {stage} for the same settings, data "
            "and code, and keeps it\n"
        )
    _print(contents, options, options.file)
    if not options.json and contents.artifacts:
        name = contents.artifacts[-1].short_id
        print(f"next: redco-flow why {name}; `promote` keeps a checkpoint from `gc --unreferenced`")
    return 0


def _print(contents: Contents, options: argparse.Namespace, file: Path) -> None:
    total = sum(artifact.num_bytes for artifact in contents.artifacts)
    if options.json:
        ids = [artifact.id for artifact in contents.artifacts]
        records = [artifact.id for artifact in contents.records]
        found = {"file": str(file), "artifacts": ids, "bytes": total, "records": records}
        print(json.dumps(found))
        return
    rows = [[one.short_id, one.kind, size(one.num_bytes)] for one in contents.artifacts]
    rows += [[one.short_id, one.kind, "(record only)"] for one in contents.records]
    print(columns(rows, ["ARTIFACT", "KIND", "SIZE"]))
    print(f"{file}: {len(contents.artifacts)} artifacts, {size(total)}")
