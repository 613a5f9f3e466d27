"""Verbs that say where results came from and whether they are whole: artifacts, why, …"""

from __future__ import annotations

import argparse
import json
import sys

from redco_flow.cli.arguments import Verbs, add_json, add_workspace, workspace_path
from redco_flow.cli.lineage_text import impact_lines, lineage_lines
from redco_flow.cli.text import columns, short_id, size
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.workspace import Workspace


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    artifacts = verbs.add("artifacts", _artifacts, "list the published artifacts, newest first")
    artifacts.add_argument("--kind", help="dataset, checkpoint, predictions or metrics")
    why = verbs.add("why", _why, "where a metric or artifact came from, back to the data")
    why.add_argument(
        "target", metavar="WHAT", help="metric of the last run, artifact id, RUN/STAGE, RUN/METRIC"
    )
    why.add_argument("--all", action="store_true", help="also the settings left at their defaults")
    impact = verbs.add("impact", _impact, "what was made from an artifact or a data file")
    impact.add_argument("target", metavar="ID", help="artifact id or a data file's BLAKE3")
    verify = verbs.add("verify", _verify, "read artifacts whole and compare their digests")
    verify.add_argument("ids", nargs="*", metavar="ARTIFACT", help="which (all)")
    for parser in (artifacts, why, impact, verify):
        add_json(parser)
        add_workspace(parser)


def _workspace(options: argparse.Namespace) -> Workspace:
    return Workspace(workspace_path(options).absolute())


def _artifacts(options: argparse.Namespace) -> int:
    found = ArtifactStore(_workspace(options)).list(options.kind)
    if options.json:
        print(json.dumps([{**artifact.manifest, "path": str(artifact.path)} for artifact in found]))
        return 0
    rows = [_artifact_row(artifact) for artifact in found]
    print(columns(rows, ["ARTIFACT", "KIND", "SIZE", "STAGE", "RUN", "PATH"]))
    return 0


def _artifact_row(artifact: Artifact) -> list[str]:
    by = artifact.produced_by
    return [
        short_id(artifact.id),
        artifact.kind,
        size(artifact.num_bytes),
        str(by.get("stage", "")),
        str(by.get("run", "")),
        str(artifact.path),
    ]


def _why(options: argparse.Namespace) -> int:
    from redco_flow.tracking.lineage import trace

    root = trace(_workspace(options), options.target)
    if options.json:
        print(json.dumps(root.to_json()))
    else:
        print("\n".join(lineage_lines(root, with_defaults=options.all)))
    return 0


def _impact(options: argparse.Namespace) -> int:
    from redco_flow.tracking.impact import impact

    root = impact(_workspace(options), options.target)
    print(json.dumps(root.to_json()) if options.json else "\n".join(impact_lines(root)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    store = ArtifactStore(_workspace(options))
    artifacts = [store.get(text) for text in options.ids] if options.ids else store.list()
    problems = {artifact.id: store.verify(artifact.id) for artifact in artifacts}
    if not options.ids:
        problems |= {damage.path: [damage.problem] for damage in store.damaged()}
    bad = {artifact_id: found for artifact_id, found in problems.items() if found}
    if options.json:
        print(json.dumps({"checked": len(problems), "problems": bad}))
    else:
        print(f"{len(problems) - len(bad)} of {len(problems)} artifacts are whole")
        for artifact_id, found in bad.items():
            for problem in found:
                name = artifact_id if artifact_id.endswith(".json") else short_id(artifact_id)
                sys.stderr.write(f"{name}: {problem}\n")
    return 1 if bad else 0
