"""Verbs that say where results came from: artifacts, why, impact, verify."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from redco_flow.cli.arguments import Verbs, add_json, add_workspace, positive, workspace_of
from redco_flow.cli.text import columns, duration, number, short_id, size
from redco_flow.records import moment
from redco_flow.tracking.aliases import AliasStore, artifact_id_of
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import find_deletion, refuse_deleted
from redco_flow.tracking.lineage_nodes import (
    AliasNode,
    ConfigLeaf,
    ImpactNode,
    LineageNode,
    Production,
)

_MAX_VALUE_LENGTH = 100
_MAX_DATA_LINES = 6
_NUM_LISTED = 50


def lineage_lines(root: LineageNode, *, with_defaults: bool = False) -> list[str]:
    """Return the tree as lines: each thing, how it was made, then what it was made from.

    Args:
        root: what was asked about.
        with_defaults: also show settings that were not written.
    """
    return list(_node_lines(root, "", set(), with_defaults=with_defaults))


def _node_lines(
    node: LineageNode, indent: str, shown: set[str], *, with_defaults: bool
) -> Iterator[str]:
    yield indent + _title(node)
    for alias in node.aliases:
        yield f"{indent}  {_alias_line(alias)}"
    if node.type == "artifact":
        if node.id in shown:
            yield f"{indent}  (as above)"
            return
        shown.add(node.id)
    is_made_with_parent = node.type == "metric"
    if node.production is not None and not is_made_with_parent:
        for line in _production_lines(node.production, with_defaults=with_defaults):
            yield f"{indent}  {line}"
    data = [parent for parent in node.parents if parent.type == "data"]
    for parent in node.parents:
        if parent.type != "data" or parent in data[:_MAX_DATA_LINES]:
            yield from _node_lines(parent, indent + "    ", shown, with_defaults=with_defaults)
    if len(data) > _MAX_DATA_LINES:
        yield f"{indent}    and {len(data) - _MAX_DATA_LINES} more data files (--json has them all)"


def _title(node: LineageNode) -> str:
    if node.type == "metric":
        return f"{node.name} = {number(node.value)}"
    if node.type == "data":
        is_of_hub = isinstance(node.value, dict) and node.value.get("commit") == node.id
        return f"data {node.name}  {'commit' if is_of_hub else 'blake3'} {node.id}"
    state = node.deleted or ("" if node.is_intact else "MISSING OR DAMAGED")
    return f"{node.type} {node.name} {short_id(node.id)}" + (f"  {state}" if state else "")


def _alias_line(alias: AliasNode) -> str:
    how = "rolled back to it" if alias.event == "rolled_back" else "promoted"
    held = f", where {' and '.join(alias.conditions)}" if alias.conditions else ""
    why = f": {alias.reason}" if alias.reason else ""
    return f"is {alias.name}: {how} by {alias.by} at {moment(alias.time)}{held}{why}"


def _production_lines(made: Production, *, with_defaults: bool) -> Iterator[str]:
    took = f", {duration(made.seconds)}" if made.seconds else ""
    job = made.job.get("job_id")
    yield (
        f"by stage {made.stage} of run {made.run}, attempt {made.attempt}"
        f"{f', job {job}' if job else ''} on {made.host or 'an unknown host'}{took}"
    )
    yield _code_line(made)
    for leaf in made.config:
        if with_defaults or leaf.source != "default":
            yield f"{leaf.key} = {_value(leaf)}  ({leaf.location})"


def _code_line(made: Production) -> str:
    commit = str(made.code.get("commit") or "")[:12]
    changed = ""
    if made.code.get("dirty"):
        changed = f" + uncommitted changes {short_id(str(made.code.get('patch_digest') or ''))}"
    base = f"commit {commit}{changed}" if commit else "no git commit"
    return f"code: {base}, {len(made.modules)} modules digested"


def _value(leaf: ConfigLeaf) -> str:
    text = json.dumps(leaf.value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 1] + "…"


def impact_lines(node: ImpactNode, indent: str = "") -> list[str]:
    """Return what was made from a thing as lines."""
    made = f"  by stage {node.stage} of run {node.run}" if node.stage else ""
    lines = [f"{indent}{node.type} {node.name} {short_id(node.id)}{made}"]
    for child in node.children:
        lines += impact_lines(child, indent + "    ")
    return lines


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    artifacts = verbs.add("artifacts", _artifacts)
    artifacts.add_argument("--kind", help="dataset, checkpoint, predictions or metrics")
    artifacts.add_argument(
        "-n",
        "--last",
        type=positive,
        metavar="N",
        help=f"how many ({_NUM_LISTED}; all with --json)",
    )
    why = verbs.add("why", _why)
    why.add_argument(
        "target",
        metavar="WHAT",
        help="metric of the last run, artifact id, @ALIAS, RUN/STAGE, RUN/METRIC",
    )
    why.add_argument("--all", action="store_true", help="also the settings left at their defaults")
    impact = verbs.add("impact", _impact)
    impact.add_argument("target", metavar="ID", help="artifact id, @ALIAS, data file or its BLAKE3")
    verify = verbs.add("verify", _verify)
    verify.add_argument(
        "ids", nargs="*", metavar="ARTIFACT", help="artifacts to verify (default: all)"
    )
    for parser in (artifacts, why, impact, verify):
        add_json(parser)
        add_workspace(parser)


def _artifacts(options: argparse.Namespace) -> int:
    found, num_artifacts = _newest(options)
    aliases = AliasStore(workspace_of(options)).by_artifact()
    named = {key: [str(alias.name) for alias in ones] for key, ones in aliases.items()}
    if options.json:
        more = [
            {
                "path": str(one.path),
                "aliases": named.get(one.id, []),
                "deleted": find_deletion(one),
            }
            for one in found
        ]
        print(json.dumps([{**one.manifest, **it} for one, it in zip(found, more, strict=True)]))
        return 0
    if options.kind and not found:
        kinds = sorted({one.kind for one in ArtifactStore(workspace_of(options)).list()})
        print(f"there are no artifacts of this kind; kinds here: {', '.join(kinds) or 'none'}")
        return 0
    rows = [_artifact_row(artifact, named.get(artifact.id, [])) for artifact in found]
    header = ["ARTIFACT", "KIND", "SIZE", "STAGE", "RUN", "PATH", "ALIASES" if named else ""]
    print(columns(rows, header))
    if num_artifacts > len(found):
        print(f"{num_artifacts - len(found)} older artifacts (-n {num_artifacts} lists all)")
    return 0


def _newest(options: argparse.Namespace) -> tuple[Sequence[Artifact], int]:
    """The artifacts to list, and how many there are; programs get all, oldest first."""
    store = ArtifactStore(workspace_of(options))
    if options.json and options.last is None:
        found = store.list(options.kind)
        return found, len(found)
    return store.newest(_NUM_LISTED if options.last is None else options.last, options.kind)


def _artifact_row(artifact: Artifact, aliases: list[str]) -> list[str]:
    by = artifact.produced_by
    return [
        short_id(artifact.id),
        artifact.kind,
        "deleted" if find_deletion(artifact) else size(artifact.num_bytes),
        str(by.get("stage", "")),
        str(by.get("run", "")),
        str(artifact.path),
        " ".join(aliases),
    ]


def _why(options: argparse.Namespace) -> int:
    from redco_flow.tracking.lineage import trace

    root = trace(workspace_of(options), options.target)
    if options.json:
        print(json.dumps(root.to_json()))
    else:
        print("\n".join(lineage_lines(root, with_defaults=options.all)))
    return 0


def _impact(options: argparse.Namespace) -> int:
    from redco_flow.tracking.lineage import impact

    root = impact(workspace_of(options), options.target)
    print(json.dumps(root.to_json()) if options.json else "\n".join(impact_lines(root)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    store = ArtifactStore(workspace_of(options))
    named = [store.get(artifact_id_of(workspace_of(options), text)) for text in options.ids]
    for artifact in named:
        refuse_deleted(workspace_of(options), artifact)
    artifacts = named or [one for one in store.list() if find_deletion(one) is None]
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
