"""Verbs about artifacts for another workspace: bundle, unbundle."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from redco_flow.cli.arguments import Verbs, add_json, add_workspace, workspace_path
from redco_flow.cli.text import columns, size
from redco_flow.errors import UsageError
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.bundles import Contents, contents_of, read_bundle, write_bundle
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.workspace import Workspace


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    bundle = verbs.add("bundle", _bundle)
    bundle.add_argument(
        "what",
        metavar="RUN|CHECKPOINT",
        help="a run: all that it made; or a checkpoint: its id, RUN/STAGE, @ALIAS",
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
        raise UsageError(f"-o {output}: is there already; delete it, or give another name.")
    workspace = Workspace(workspace_path(options).absolute())
    artifacts = _artifacts(workspace, options.what)
    contents = contents_of(workspace, artifacts, with_inputs=not options.without_inputs)
    command = f"redco-flow bundle {options.what}{' --without-inputs' * options.without_inputs}"
    write_bundle(output, workspace, contents, command=command)
    _print(contents, options, output)
    return 0


def _artifacts(workspace: Workspace, text: str) -> list[Artifact]:
    from redco_flow.orchestrate.checkpoints.export import find_checkpoint
    from redco_flow.tracking.aliases import is_alias

    store = ArtifactStore(workspace)
    if "/" in text or is_alias(text) or store.is_prefix(text):
        return [find_checkpoint(workspace, text)]
    run = find_run(workspace, text)
    ids = [
        one for result in run_results(workspace, run).values() for one in result.outputs.values()
    ]
    found = [store.find(one) for one in ids if store.is_whole(one)]
    if not found:
        raise UsageError(
            f"run {run.id} has no artifacts: no stage has a result, or they were deleted."
        )
    return [artifact for artifact in found if artifact is not None]


def _unbundle(options: argparse.Namespace) -> int:
    if not options.file.is_file():
        raise UsageError(f"{options.file}: there is no such file.")
    contents = read_bundle(options.file, Workspace.open(workspace_path(options)))
    _print(contents, options, options.file)
    if not options.json:
        print(f"next: redco-flow why {contents.artifacts[-1].short_id}")
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
