"""The verb history: the runs of one pipeline over time, each beside the run before."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redco_flow.cli.arguments import Verbs, add_html, add_json, add_workspace, workspace_path
from redco_flow.cli.text import Footnotes, columns, duration, moment, number
from redco_flow.cli.view import read_run_view
from redco_flow.errors import UsageError
from redco_flow.records import digest_json
from redco_flow.report.history_page import DIGITS_OF_DATA, HistoryEntry, history_page
from redco_flow.report.runs_page import write_page
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory, list_damaged, list_runs
from redco_flow.tracking.run_metrics import is_of_training, require_metric
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_MAX_METRICS = 3
_MAX_MESSAGE_LENGTH = 60

Ingredients = Mapping[str, Mapping[str, Any]]


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    history = verbs.add("history", _history)
    history.add_argument("pipeline", metavar="PIPELINE", help="the pipeline's name, or its file")
    history.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="which (the first three)"
    )
    history.add_argument(
        "-n", "--last", type=int, default=20, metavar="N", help="how many runs (20)"
    )
    add_html(history)
    add_json(history)
    add_workspace(history)


def _history(options: argparse.Namespace) -> int:
    workspace = Workspace(workspace_path(options).absolute())
    name = _pipeline_name(options.pipeline)
    runs = _runs_of(workspace, name)
    entries = read_history(workspace, runs, num_last=options.last)
    shown = _shown_metrics(entries, options.metric)
    if options.json:
        listed = [entry.to_json() for entry in entries]
        print(json.dumps({"pipeline": name, "num_runs": len(runs), "runs": listed}))
    else:
        print(history_text(entries, shown, num_runs=len(runs)))
    if options.html:
        page = history_page(name, entries, shown, _promotions(workspace, entries), utc_now())
        sys.stderr.write(f"page: {write_page(page, options.html)}\n")
    return 0


def _promotions(workspace: Workspace, entries: Sequence[HistoryEntry]) -> dict[str, list[str]]:
    """The names that checkpoints of the runs were given, with the time, by run.

    A checkpoint that several runs have, as one of them reused it, is the first one's.
    """
    made: dict[str, str] = {}
    for entry in entries:
        for id in entry.artifacts:
            made.setdefault(id, entry.run)
    found: dict[str, list[str]] = {}
    for alias in AliasStore(workspace).list():
        for event in alias.history:
            if event.event == "promoted" and event.checkpoint in made:
                told = f"{alias.name}, {moment(event.time)}"
                found.setdefault(made[event.checkpoint], []).append(told)
    return found


def _pipeline_name(text: str) -> str:
    """The name by which runs are called: of a pipeline's file, what stands in it."""
    if os.sep not in text and not text.endswith((".yaml", ".yml")):
        return text
    # Imported here: it brings pydantic, and most name the pipeline.
    from redco_flow.spec.find import find_file
    from redco_flow.spec.yaml import read_yaml

    path = find_file("pipelines", text)
    document = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return str(document.get(("name",), path.stem))


def _runs_of(workspace: Workspace, name: str) -> list[RunDirectory]:
    """A pipeline's runs, oldest first; those of which nothing is known are left out.

    Raises:
        UsageError: there is none; names the pipelines that have runs.
    """
    listed = list_runs(workspace)
    runs = listed[: len(listed) - len(list_damaged(listed))][::-1]
    found = [run for run in runs if _pipeline_of(run) == name]
    if found:
        return found
    known = list(dict.fromkeys(map(_pipeline_of, reversed(runs))))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:10]
    hint = f"; there are runs of {', '.join(near)}" if near else ""
    raise UsageError(f"no run of a pipeline {name!r} in {workspace.root}{hint}.")


def _pipeline_of(run: RunDirectory) -> str:
    """A run is called `<pipeline>-<shortid>`."""
    return run.id.rpartition("-")[0]


def read_history(
    workspace: Workspace, runs: Sequence[RunDirectory], *, num_last: int
) -> list[HistoryEntry]:
    """Return the last of a pipeline's runs, each beside the one before it.

    Args:
        runs: oldest first.
        num_last: how many; one run more is read, for the first one's differences.
    """
    first = max(0, len(runs) - num_last)
    reader = _Reader(workspace)
    entries = [reader.read(run) for run in runs[max(0, first - 1) :]]
    return entries[min(first, 1) :]


class _Reader:
    """Reads runs in turn and keeps what the next one is compared with."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._metrics: dict[str, float] = {}
        self._identities: dict[str, ScoreIdentity] = {}
        self._ingredients: dict[str, Ingredients] = {}

    def read(self, run: RunDirectory) -> HistoryEntry:
        """One run beside those that were read before."""
        view = read_run_view(run)
        found = unless_damaged(lambda: run_results(self._workspace, run)) or {}
        ingredients = {stage: result.ingredients for stage, result in found.items()}
        cause, message = _failure(run, view)
        metrics = view["metrics"]
        stages = (unless_damaged(run.read_state) or {}).get("stages") or {}
        identities = identify_scores(stages, found, ArtifactStore(self._workspace))
        not_compared = dict(self._not_compared(metrics, identities))
        differences = {
            key: value - self._metrics[key]
            for key, value in metrics.items()
            if key in self._metrics and key not in not_compared
        }
        entry = HistoryEntry(
            run=run.id,
            created_at=str(view["created_at"] or ""),
            state=view["state"],
            seconds=view["seconds"],
            sweep=view["sweep"],
            cause=cause,
            message=message,
            metrics=metrics,
            differences=differences,
            not_compared=not_compared,
            data=_data_version(ingredients),
            data_changed=self._has_changed("data", ingredients),
            code_changed=self._has_changed("code", ingredients),
            artifacts=tuple(
                id for stage in view["stages"].values() for id in stage["artifacts"].values()
            ),
        )
        self._metrics |= metrics
        self._identities |= {key: identities.get(key, ScoreIdentity()) for key in metrics}
        self._ingredients |= ingredients
        return entry

    def _not_compared(
        self, metrics: Mapping[str, float], identities: Mapping[str, ScoreIdentity]
    ) -> Iterator[tuple[str, str]]:
        """The metrics whose scores here and in the last run before have no difference, and why."""
        for key in metrics:
            before = self._identities.get(key)
            if before and (why := before.comparable_with(identities.get(key, ScoreIdentity()))):
                yield key, why

    def _has_changed(self, section: str, ingredients: Mapping[str, Ingredients]) -> bool | None:
        """Whether a part of the ingredients of any stage is another than when it last had some."""
        common = [stage for stage in ingredients if stage in self._ingredients]
        if not common:
            return None
        old, new = (
            [one[stage].get(section, {}) for stage in common]
            for one in (self._ingredients, ingredients)
        )
        return digest_json(old) != digest_json(new)


def _data_version(ingredients: Mapping[str, Ingredients]) -> str:
    """One digest of the raw data of all stages; empty where none of them has any."""
    data = {stage: one["data"] for stage, one in ingredients.items() if one.get("data")}
    return digest_json(data) if data else ""


def _failure(run: RunDirectory, view: Mapping[str, Any]) -> tuple[str, str]:
    """Why a run's first failed stage failed, and what it said; empty of a run that went well."""
    for name, stage in view["stages"].items():
        if stage["state"] == State.FAILED:
            attempt = run.latest_attempt(name)
            cause = unless_damaged(lambda: attempt.cause) if attempt else None  # noqa: B023
            said = str(stage["message"]).partition("\n")[0]
            return str(cause or State.FAILED), f"{name}: {said}" if said else name
    if view["state"] in (State.COMPLETED, State.PENDING, State.RUNNING):
        return "", ""
    return "", str(view["message"]).partition("\n")[0]


def _shown_metrics(entries: Sequence[HistoryEntry], asked: Sequence[str]) -> list[str]:
    """The metrics that are asked for; else the first ones, those of evaluations first.

    Raises:
        UsageError: no run has one of these.
    """
    known = dict.fromkeys(key for entry in reversed(entries) for key in entry.metrics)
    for name in asked:
        require_metric(name, known, "the runs shown")
    return list(asked) or sorted(known, key=is_of_training)[:_MAX_METRICS]


def history_text(entries: Sequence[HistoryEntry], metrics: Sequence[str], *, num_runs: int) -> str:
    """Return a table, a run a line, and how many earlier runs there are.

    Args:
        metrics: names of those that get a column.
        num_runs: of the pipeline in all.
    """
    header = ["RUN", "CREATED (UTC)", "STATE", "TIME", *metrics, "DATA", "CODE", ""]
    notes = Footnotes()
    lines = [columns([list(_cells(entry, metrics, notes)) for entry in entries], header)]
    lines += notes.lines("not compared with the run before: ")
    if num_left := num_runs - len(entries):
        lines.append(f"{num_left} earlier runs (-n {num_runs} shows all)")
    return "\n".join(lines)


def _cells(entry: HistoryEntry, metrics: Sequence[str], notes: Footnotes) -> Iterator[str]:
    yield entry.run
    yield entry.created_at[:16].replace("T", " ")
    yield entry.state
    yield duration(entry.seconds)
    for key in metrics:
        if why := entry.not_compared.get(key):
            yield f"{number(entry.metrics[key])} {notes.mark(why)}"
        else:
            yield _metric(entry.metrics.get(key), entry.differences.get(key))
    yield f"{entry.data[:DIGITS_OF_DATA]} {_changed(entry.data_changed)}".strip()
    yield _changed(entry.code_changed)
    cause = entry.cause if entry.cause != State.FAILED else ""
    note = " ".join(
        filter(None, [f"{cause}," if cause and entry.message else cause, entry.message])
    )
    is_long = len(note) > _MAX_MESSAGE_LENGTH
    yield f"{note[: _MAX_MESSAGE_LENGTH - 1]}…" if is_long else note


def _metric(value: float | None, difference: float | None) -> str:
    if value is None or difference is None:
        return number(value)
    return f"{number(value)} ({difference:+.3g})" if difference else f"{number(value)} (=)"


def _changed(is_changed: bool | None) -> str:
    return {True: "changed", False: "same", None: ""}[is_changed]
