"""What hosts keep and what went, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.cli.text import columns, size
from redco_flow.launch.hosts.host_clean_up import CleanedHost, HostLeftover

_HEADER = ("KIND", "SIZE", "UNUSED", "PATH")
_ONLY_COPIES = """\
  These are nowhere else: their launcher never had them whole. `redco-flow resume RUN` fetches what
  its job has left, and once that stage has its result they are cleaned like others; what is
  not wanted must be deleted there by hand."""


def describe(host: CleanedHost, *, dry_run: bool) -> str:
    """Return what one host has and what of it was, or would be, removed."""
    if host.problem:
        return f"{host.label}: {host.problem}"
    gone = [one for one in host.leftovers if (one.fate == "old" if dry_run else one.is_removed)]
    kept = [one for one in host.leftovers if one not in gone]
    verb = "would be removed" if dry_run else "removed"
    parts = [f"{host.label}: {_total(gone)} {verb}, {_total(kept)} kept{_reasons(kept)}"]
    if gone:
        parts.append(_table(gone))
    if only := [one for one in kept if one.fate == "only copy"]:
        parts += [_ONLY_COPIES, _table(only)]
    parts += [f"  could not be removed whole: {path}" for path in host.stuck]
    return "\n".join(parts)


def _total(leftovers: Sequence[HostLeftover]) -> str:
    return f"{size(sum(one.bytes for one in leftovers))} ({len(leftovers)} things)"


def _reasons(kept: Sequence[HostLeftover]) -> str:
    named = {"in use": "in use", "recent": "used lately", "only copy": "nowhere else"}
    told = [
        f"{words}: {_total(chosen)}"
        for fate, words in named.items()
        if (chosen := [one for one in kept if one.fate == fate])
    ]
    return f" ({', '.join(told)})" if told else ""


def _table(leftovers: Sequence[HostLeftover]) -> str:
    rows = [
        (one.kind, size(one.bytes), f"{one.age_days:.1f} days", one.path)
        for one in sorted(leftovers, key=lambda one: -one.bytes)
    ]
    return "\n".join(f"  {line}" for line in columns(rows, _HEADER).splitlines())
