"""The verb export: a checkpoint as transformers or PEFT reads it, in a directory or on the hub."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from redco_flow.cli.arguments import Verbs, add_checkpoint, add_json, add_workspace, workspace_path
from redco_flow.cli.text import columns, short_id, size
from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.tracking.workspace import Workspace

_DTYPES = ("float32", "bfloat16", "float16")


def register(verbs: Verbs) -> None:
    """Declare the verb."""
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


def _export(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.checkpoints.export import export_checkpoint, find_checkpoint

    if options.private and not options.push:
        raise UsageError("--private is for --push ORG/NAME.")
    workspace = Workspace(workspace_path(options).absolute())
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
    from redco_flow.hub import HubError, upload_model

    folder = options.folder
    try:
        return upload_model(
            options.push, folder, f"redco-flow export {options.push}", is_private=options.private
        )
    except HubError as error:
        raise RedcoFlowError(
            f"the export is whole in {folder}, but not on the hub: {error}. The same command goes "
            f"on with the upload alone; so does `hf upload {options.push} {folder}`."
        ) from error
