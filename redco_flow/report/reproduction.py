"""How to get the same result again: commands, the resolved pipeline, versions, hosts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from redco_flow.report.headline import typed_command
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.run_directory import RunDirectory

_MAX_DOCUMENT = 200_000


@dataclass(frozen=True)
class Reproduction:
    """How to get the same result again.

    Args:
        commands: to be typed in this order.
        typed: the command line of this run.
        document: resolved.yaml, whole.
        versions: (package, version) that the results were computed with.
        hosts: where.
    """

    commands: tuple[str, ...]
    typed: str
    document: str
    versions: tuple[tuple[str, str], ...]
    hosts: tuple[str, ...]


def read_reproduction(run: RunDirectory, stages: Iterable[StageFacts]) -> Reproduction:
    """Return how to reproduce a run.

    Raises:
        WorkspaceError, ValueError, OSError: the run's records cannot be read.
    """
    results = [stage.result for stage in stages if stage.result]
    versions = dict(item for one in results for item in one.versions.items())
    return Reproduction(
        commands=tuple(_commands(run)),
        typed=typed_command(run.record),
        document=_document(run),
        versions=tuple(sorted(versions.items())),
        hosts=tuple(dict.fromkeys(one.host for one in results if one.host)),
    )


def _commands(run: RunDirectory) -> Iterator[str]:
    record = run.record
    code = record.get("code") or {}
    if code.get("commit"):
        yield f"git checkout {code['commit']}"
    if code.get("dirty") and run.patch_path.is_file():
        yield shlex.join(["git", "apply", str(run.patch_path)])
    words = ["redco-flow", "run", str(run.resolved_path)]
    if record.get("profile"):
        words += ["--profile", str(record["profile"])]
    # All other overrides stand in resolved.yaml already.
    given = [str(one) for one in record.get("overrides") or ()]
    yield shlex.join([*words, *(one for one in given if one.lstrip("~").startswith("profile."))])


def _document(run: RunDirectory) -> str:
    if not run.resolved_path.is_file():
        return ""
    text = run.resolved_path.read_text(encoding="utf-8", errors="replace")
    if len(text) > _MAX_DOCUMENT:
        return f"{text[:_MAX_DOCUMENT]}\n… the rest is in {run.resolved_path}"
    return text
