"""Verbs about artifacts for another workspace: bundle, unbundle."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from redco_flow.cli.arguments import Verbs, add_json, add_workspace, workspace_path
from redco_flow.cli.text import columns, size
from redco_flow.errors import UsageError
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.bundles import Contents, contents_of, read_bundle, write_bundle
from redco_flow.tracking.deletions import find_deletion
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.workspace import Workspace


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
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
    workspace = Workspace(workspace_path(options).absolute())
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
    run = find_run(workspace, "@last" if text == "last" else text)
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
