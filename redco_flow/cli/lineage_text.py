"""Draw a lineage as an indented tree of text lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

from redco_flow.cli.text import duration, number, short_id
from redco_flow.tracking.lineage_nodes import ConfigLeaf, ImpactNode, LineageNode, Production

_MAX_VALUE_LENGTH = 100
_MAX_DATA_LINES = 6


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
    missing = "" if node.is_intact else "  MISSING OR DAMAGED"
    return f"{node.type} {node.name} {short_id(node.id)}{missing}"


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
            yield f"{leaf.key} = {_value(leaf)}  ({leaf.place})"


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
