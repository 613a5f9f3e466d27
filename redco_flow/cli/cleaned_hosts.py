"""What hosts keep and what they deleted, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_flow.cli.text import columns, size
from redco_flow.launch.host_facts import CleanedHost

_KEPT = """\
  `redco-flow resume RUN` fetches what only the host has; what is not wanted must be deleted there
  by hand."""


def describe(host: CleanedHost, *, dry_run: bool) -> str:
    """Return what one host deleted, or would delete, and what stays there for which reason."""
    if host["problem"]:
        return f"{host['label']}: {host['problem']}"
    gone = [one for one in host["items"] if not one["reason"]]
    kept = [one for one in host["items"] if one["reason"]]
    verb = "would be deleted" if dry_run else "deleted"
    parts = [f"{host['label']}: {_total(gone)} {verb}, {_total(kept)} kept"]
    if gone:
        parts.append(_table(gone, ("KIND", "SIZE", "PATH")))
    if kept:
        parts.append(_table(kept, ("KEPT", "SIZE", "PATH", "BECAUSE")))
    if any(one["kind"] == "run" for one in kept):
        parts.append(_KEPT)
    parts += [f"  could not be deleted whole: {path}" for path in host["stuck"]]
    return "\n".join(parts)


def _total(items: Sequence[dict[str, Any]]) -> str:
    return f"{size(sum(one['bytes'] for one in items))} ({len(items)} items)"


def _table(items: Sequence[dict[str, Any]], header: tuple[str, ...]) -> str:
    rows = [
        (one["kind"], size(one["bytes"]), one["path"], one["reason"])[: len(header)]
        for one in sorted(items, key=lambda one: -one["bytes"])
    ]
    return "\n".join(f"  {line}" for line in columns(rows, header).splitlines())
