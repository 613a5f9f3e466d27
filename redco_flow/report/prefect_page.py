"""What the Prefect UI shows of a run: artifacts with text, tables and pictures, made of its files.

Imports no Prefect: `orchestrate.prefect.artifacts` sends what is made here. A key names pipeline
and metric or stage, not the run, so that an artifact's page lists the runs over weeks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from redco_flow.report import markdown
from redco_flow.report.charts import Line, LineChart
from redco_flow.report.line_picture import picture_address
from redco_flow.report.metrics import direction_of, metrics_artifact
from redco_flow.report.numbers import duration, moment, number, score, signed
from redco_flow.report.page import read_trainings
from redco_flow.report.past_scores import (
    Scores,
    earlier_scores,
    production_scores,
    scores_of_run,
)
from redco_flow.report.samples import Sample, sample_sets
from redco_flow.report.stage_facts import StageFacts, read_stages
from redco_flow.report.training import TrainingSection
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import role_of, training_metric
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_NUM_RUNS_SHOWN = 20
_NUM_RUNS_DESCRIBED = 4
_MOST_METRICS = 8  # with an artifact of their own; all of them are in the table
_MOST_PICTURES = 3
_MOST_CHARACTERS = 400
_EVALUATING = "evaluating"


@dataclass(frozen=True)
class PageArtifact:
    """One artifact of a run's page.

    Args:
        key: what it is called in every run of the pipeline: lowercase letters, digits, dashes.
        kind: as Prefect calls it.
        description: one line of Markdown, which lists show.
        data: Markdown; the rows of a table, whose cells are Markdown; a percentage.
    """

    key: str
    kind: Literal["markdown", "table", "progress"]
    description: str
    data: str | list[dict[str, str]] | float


def artifact_key(pipeline: str, kind: str, name: str = "") -> str:
    """Return the key of one kind of artifact of a pipeline, such as `weekly-metric-rougel`."""
    words = "-".join(filter(None, (pipeline, kind, name)))
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def page_artifacts(run: RunDirectory, workspace: Workspace) -> list[PageArtifact]:
    """Return everything that a run's page shows, as far as the run has come.

    What cannot be read is left out and said in the summary.

    Raises:
        DamagedRecord: the run's own records cannot be read.
    """
    remarks: list[str] = []
    stages = list(read_stages(run, workspace, remarks.append).values())
    store, pipeline = ArtifactStore(workspace), run.record["name"]
    parts: list[tuple[str, Callable[[], Iterator[PageArtifact]]]] = [
        ("The metrics", lambda: _metrics(run, workspace, stages, store)),
        ("The trainings", lambda: _trainings(run, stages)),
        ("Sample predictions", lambda: _samples(pipeline, stages, store)),
        ("The progress", lambda: _progress(pipeline, stages)),
    ]
    found: list[PageArtifact] = []
    for what, make in parts:
        try:
            found += make()
        except Exception as error:  # noqa: BLE001 (a page that says so is better than none)
            remarks.append(f"{what} cannot be shown: {type(error).__name__}: {error}")
    summary = run_summary(run, workspace, remarks)
    key = artifact_key(pipeline, "summary")
    return [PageArtifact(key, "markdown", headline(run), summary), *found]


def live_artifacts(run: RunDirectory, stage: str, *, with_curve: bool) -> list[PageArtifact]:
    """Return what a run's page shows of a stage that is at work: its progress and its curve."""
    facts = StageFacts(stage, {"state": State.RUNNING}, tuple(run.attempts(stage)))
    found = list(_progress(run.record["name"], [facts]))
    return [*found, *(_trainings(run, [facts]) if with_curve else ())]


# The summary.


def run_summary(run: RunDirectory, workspace: Workspace, remarks: Sequence[str] = ()) -> str:
    """Return the run's summary as Markdown, by its state.json.

    Args:
        remarks: what is missing from the page and why.
    """
    states = run.read_state()["stages"]
    store = ArtifactStore(workspace)
    parts = [f"# {run.id}"]
    for name, stage in states.items():
        if stage.get("metrics"):
            parts += _metrics_beside_baselines(name, stage, store)
    parts += _stage_table(states)
    parts += _files(run, states, store)
    parts += [markdown.text(remark) for remark in remarks]
    return "\n\n".join(parts) + "\n"


def headline(run: RunDirectory) -> str:
    """Return the run's metrics in one line, those of evaluations first."""
    found = scores_of_run(run).metrics.items()
    return ", ".join(f"{markdown.text(name)} {_short(value)}" for name, value in found) or (
        "no metrics"
    )


def _metrics_beside_baselines(
    name: str, stage: Mapping[str, Any], store: ArtifactStore
) -> Iterator[str]:
    """A stage's metrics beside what trivial baselines get, and the checkpoint they belong to."""
    evaluation = _evaluation(stage, store)
    baselines: Mapping[str, Any] = evaluation.get("baselines") or {}
    names = [markdown.text(title.replace("_", " ")) for title in baselines]
    is_training = role_of(stage) == "training"
    rows = [
        [markdown.text(training_metric(key) if is_training else key), _short(value)]
        + [_short((one.get("metrics") or {}).get(key)) for one in baselines.values()]
        for key, value in stage["metrics"].items()
    ]
    yield f"## {markdown.text(name)}\n\n{markdown.table(['metric', 'value', *names], rows)}"
    checkpoint = _checkpoint(stage, evaluation, store)
    if checkpoint is not None:
        step = evaluation.get("step", checkpoint.metadata.get("step"))
        at = f" (step {markdown.text(step)})" if step is not None else ""
        yield f"Checkpoint `{checkpoint.short_id}`{at}: {markdown.code(checkpoint.path)}"


def _evaluation(stage: Mapping[str, Any], store: ArtifactStore) -> Mapping[str, Any]:
    """What the stage's metrics artifact says of itself; empty where it made none."""
    for output, artifact_id in stage["artifacts"].items():
        if output.partition("/")[0] == "metrics":
            artifact = store.find(artifact_id)
            return artifact.metadata if artifact else {}
    return {}


def _checkpoint(
    stage: Mapping[str, Any], evaluation: Mapping[str, Any], store: ArtifactStore
) -> Artifact | None:
    if evaluation.get("checkpoint"):
        return store.find(str(evaluation["checkpoint"]))
    found = (_find_checkpoint(store, one, depth=4) for one in stage["artifacts"].values())
    return next((one for one in found if one is not None), None)


def _find_checkpoint(store: ArtifactStore, artifact_id: str, depth: int) -> Artifact | None:
    """The artifact itself or the nearest of its parents that is a checkpoint."""
    artifact = store.find(artifact_id)
    if artifact is None or artifact.kind == "checkpoint":
        return artifact
    found = (_find_checkpoint(store, one, depth - 1) for one in artifact.parents.values())
    return next((one for one in found if one is not None), None) if depth else None


def _stage_table(states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for name, stage in states.items():
        made = ", ".join(
            f"{markdown.text(key)} {markdown.code(one[:12])}"
            for key, one in stage["artifacts"].items()
        )
        seconds = "" if stage["seconds"] is None else f"{stage['seconds']:.1f}"
        told = made or markdown.text(str(stage["message"]).partition("\n")[0])
        rows.append([markdown.text(name), _state_text(stage), seconds, told])
    yield f"## Stages\n\n{markdown.table(['stage', 'state', 'seconds', 'made'], rows)}"


def _state_text(stage: Mapping[str, Any]) -> str:
    maker = (stage.get("made_by") or {}).get("run")
    if stage["reused"]:
        return f"reused from {markdown.text(maker)}" if maker else "reused"
    return markdown.text(stage["state"])


def _files(
    run: RunDirectory, states: Mapping[str, Mapping[str, Any]], store: ArtifactStore
) -> Iterator[str]:
    """Where everything is. A browser opens no file from a web page: paths are text, to be copied.

    The report stands there although it may be written a moment after this.
    """
    rows = [["report", markdown.code(run.report_path)], ["run", markdown.code(run.path)]]
    for name, stage in states.items():
        for output, one in stage["artifacts"].items():
            artifact = unless_damaged(lambda one=one: store.find(one))  # type: ignore[misc]
            if artifact is not None:
                path = markdown.code(artifact.directory / "manifest.json")
                rows.append([markdown.text(f"{name}/{output}"), path])
    yield f"## Files\n\n{markdown.table(['what', 'path'], rows)}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# Metrics beside runs before and production.


def _metrics(
    run: RunDirectory, workspace: Workspace, stages: Sequence[StageFacts], store: ArtifactStore
) -> Iterator[PageArtifact]:
    """A table of all metrics, and for each of the first ones how it went over the runs."""
    mine = scores_of_run(run)
    if not mine.metrics:
        return
    pipeline, earlier = run.record["name"], earlier_scores(run, workspace, _NUM_RUNS_SHOWN - 1)
    beside = [one for one in (*earlier[:1], production_scores(run, workspace)) if one is not None]
    directions: dict[str, str] = {}
    for stage in stages:
        artifact = metrics_artifact(stage, store)
        directions |= artifact.metadata.get("directions") or {} if artifact else {}
    rows = [_metric_row(name, mine, beside, directions) for name in mine.metrics]
    first = next(iter(mine.metrics))
    said = _beside(first, mine, beside)
    yield PageArtifact(artifact_key(pipeline, "metrics"), "table", said, rows)
    for name in list(mine.metrics)[:_MOST_METRICS]:
        yield _metric_over_runs(pipeline, name, [mine, *earlier], beside)


def _metric_row(
    name: str, mine: Scores, beside: Sequence[Scores], directions: Mapping[str, str]
) -> dict[str, str]:
    value = mine.metrics[name]
    row = {"metric": markdown.text(name), "value": score(value)}
    for other in beside:
        theirs = other.find(name)
        row[markdown.text(other.name)] = "" if theirs is None else score(theirs)
        row[f"minus {markdown.text(other.name)}"] = _judged(
            mine.minus(other, name), direction_of(name, directions)
        )
    return row


def _judged(difference: float | str | None, better: str) -> str:
    """A difference, and whether it is one for the better; or why there is none."""
    if difference is None or isinstance(difference, str):
        return f"not compared: {markdown.text(difference)}" if difference else ""
    if not difference or not better:
        return signed(difference)
    return f"{signed(difference)} {'better' if (difference > 0) == (better == 'max') else 'worse'}"


def _beside(name: str, mine: Scores, beside: Sequence[Scores]) -> str:
    """A metric in one line: its value, and how far it is from others'."""
    value = mine.metrics[name]
    differences = [
        f"{signed(difference)} to {markdown.text(other.name)}"
        for other in beside
        if not isinstance(difference := mine.minus(other, name), str | None)
    ]
    said = f"{markdown.text(name)} **{score(value)}**"
    return f"{said} ({', '.join(differences)})" if differences else said


def _metric_over_runs(
    pipeline: str, name: str, runs: Sequence[Scores], beside: Sequence[Scores]
) -> PageArtifact:
    """One metric over the runs of the pipeline.

    Args:
        runs: newest first; the first one is the page's.
    """
    scored = [(one, value) for one in runs if (value := one.find(name)) is not None]
    said = _beside(name, runs[0], beside)
    before = [score(value) for _, value in scored[1 : 1 + _NUM_RUNS_DESCRIBED]]
    if before:
        said = f"{said}; before: {', '.join(before)}"
    rows = [
        [markdown.link(one.name, one.address), moment(one.created_at), score(value), change]
        for (one, value), change in zip(
            scored, _changes([one for one, _ in scored], name), strict=True
        )
    ]
    columns = ["run", "created", markdown.text(name), "difference"]
    parts = [f"# {markdown.text(name)}", said, markdown.table(columns, rows)]
    if len(scored) > 1:
        points = [(float(at), value) for at, (_, value) in enumerate(reversed(scored), 1)]
        lines = [Line(name, points, 1, is_sparse=True)]
        lines += _level_of(beside[-1], name, len(points)) if len(beside) > 1 else []
        chart = LineChart(f"{name} over the runs", "run, the oldest first", name, lines)
        parts.insert(2, f"![{markdown.text(chart.title)}]({picture_address(chart)})")
    key = artifact_key(pipeline, "metric", name)
    return PageArtifact(key, "markdown", said, "\n\n".join(parts) + "\n")


def _level_of(production: Scores, name: str, num_runs: int) -> list[Line]:
    """What is in production, as a line across the picture."""
    value = production.find(name)
    if value is None:
        return []
    return [Line(production.name, [(1.0, value), (float(num_runs), value)], 2)]


def _changes(runs: Sequence[Scores], name: str) -> list[str]:
    """Each run's difference to the one before, which follows it."""
    changes = [_judged(one.minus(before, name), "") for one, before in pairwise(runs)]
    return [*changes, ""]


# Trainings, samples, progress.


def _trainings(run: RunDirectory, stages: Sequence[StageFacts]) -> Iterator[PageArtifact]:
    for section in read_trainings(run, stages):
        said = ", ".join(f"{markdown.text(n)} {markdown.text(v)}" for n, v in section.facts[:3])
        key = artifact_key(run.record["name"], "training", section.stage)
        yield PageArtifact(key, "markdown", said, _training_text(section))


def _training_text(section: TrainingSection) -> str:
    parts = [f"# {markdown.text(section.stage)}"]
    if section.source:
        parts.append(f"The records are those of run {markdown.text(section.source)}.")
    charts = [one.chart for one in section.figures if isinstance(one.chart, LineChart)]
    for chart in charts[:_MOST_PICTURES]:
        parts.append(f"![{markdown.text(chart.description)}]({picture_address(chart)})")
    facts = [[markdown.text(name), markdown.text(value)] for name, value in section.facts]
    parts += [markdown.table(["", ""], facts), *map(markdown.text, section.remarks)]
    return "\n\n".join(parts) + "\n"


def _samples(
    pipeline: str, stages: Sequence[StageFacts], store: ArtifactStore
) -> Iterator[PageArtifact]:
    for one in sample_sets(stages, store):
        said = markdown.text(f"{len(one.samples)} of {number(one.num_rows)} rows: {one.chosen_how}")
        rows = [_sample_row(sample) for sample in one.samples]
        yield PageArtifact(artifact_key(pipeline, "samples", one.stage), "table", said, rows)


def _sample_row(sample: Sample) -> dict[str, str]:
    prediction = "".join(piece for piece, _ in sample.pieces)
    references = " / ".join(sample.references)
    return {
        "row": markdown.text(sample.row_id),
        "why": sample.why,
        "prediction": _picture(sample.picture) or _clipped(prediction),
        "reference": _picture(sample.reference_picture) or _clipped(references),
        **{markdown.text(name): value for name, value in sample.scores},
        # Last: cells have one line each, and this is the longest.
        "source": " ".join(
            filter(None, [_picture(sample.source_picture), _clipped(sample.source)])
        ),
    }


def _picture(address: str) -> str:
    return f"![picture]({address})" if address else ""


def _clipped(text: str) -> str:
    return markdown.text(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…")


def _progress(pipeline: str, stages: Sequence[StageFacts]) -> Iterator[PageArtifact]:
    for stage in stages:
        attempt = stage.last_attempt
        told = _progress_of(attempt, is_done=stage.state == State.COMPLETED) if attempt else None
        if told is not None:
            share, said = told
            key = artifact_key(pipeline, "progress", stage.name)
            yield PageArtifact(key, "progress", markdown.text(f"{stage.name}: {said}"), share)


def _progress_of(attempt: AttemptDirectory, *, is_done: bool) -> tuple[float, str] | None:
    """How far an attempt is, in percent and in words; None where it counts no steps now."""
    progress = unless_damaged(attempt.read_progress)
    total = progress.get("total_steps") if progress else None
    if progress is None or not total:
        return None
    if is_done:
        return 100.0, "done"
    if progress.get("phase") == _EVALUATING:
        return None  # a training that evaluates counts other steps, and is where it was before
    step = progress.get("step") or 0
    words = [f"step {step:,} of {total:,}"]
    if (loss := progress.get("loss")) is not None:
        words.append(f"loss {number(loss)}")
    if (rate := progress.get("tokens_per_second")) is not None:
        words.append(f"{number(rate)} tokens/s")
    if (left := progress.get("seconds_left")) is not None:
        words.append(f"{duration(left)} left")
    return min(100.0, 100.0 * step / total), ", ".join(words)
