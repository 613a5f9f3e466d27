"""Artifacts of a run in the Prefect UI: summary, metrics, progress of its stages; from its files.

Imports no Prefect: `orchestrate.prefect.artifacts` sends them. A key names the pipeline and the
stage, not the run, so that an artifact's page in the UI lists the runs over weeks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redco_flow.report import markdown
from redco_flow.report.metrics import direction_of, metrics_artifact
from redco_flow.report.numbers import duration, number, score, signed
from redco_flow.report.past_scores import Scores, last_scores, production_scores, scores_of_run
from redco_flow.report.stage_facts import StageFacts, read_stages
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory, State
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import role_of, training_metric
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_EVALUATING = "evaluating"


@dataclass(frozen=True)
class PageArtifact:
    """One artifact of a run's page.

    Args:
        key: the same in every run of the pipeline: lowercase letters, digits, dashes.
        kind: Prefect's name of it.
        description: one line of Markdown, shown in lists.
        data: Markdown; the rows of a table, whose cells are Markdown; a percentage.
    """

    key: str
    kind: Literal["markdown", "table", "progress"]
    description: str
    data: str | list[dict[str, str]] | float


def artifact_key(pipeline: str, kind: str, name: str = "") -> str:
    """Return the key of one kind of artifact of a pipeline, such as `weekly-progress-train`."""
    words = "-".join(filter(None, (pipeline, kind, name)))
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def page_artifacts(run: RunDirectory, workspace: Workspace) -> list[PageArtifact]:
    """Return all artifacts of a run, as far as it has run; the summary names what is missing.

    Raises:
        DamagedRecord: the run's own records cannot be read.
    """
    remarks: list[str] = []
    stages = list(read_stages(run, workspace, remarks.append).values())
    mine = scores_of_run(run)
    found = [one for stage in stages if (one := _progress(run, stage)) is not None]
    if mine.metrics:
        try:
            found.insert(0, _metrics(run, mine, stages, workspace))
        except Exception as error:  # noqa: BLE001 (a page that says so is better than none)
            remarks.append(f"The metrics cannot be shown: {type(error).__name__}: {error}")
    said = ", ".join(f"{markdown.text(name)} {value:.4g}" for name, value in mine.metrics.items())
    summary = PageArtifact(
        artifact_key(run.record["name"], "summary"),
        "markdown",
        said or "no metrics",
        "\n\n".join(
            [*_summary(run, stages, ArtifactStore(workspace)), *map(markdown.text, remarks)]
        )
        + "\n",
    )
    return [summary, *found]


def live_artifact(run: RunDirectory, stage: str) -> PageArtifact | None:
    """Return the progress of a stage that is at work; None while it counts no steps."""
    return _progress(run, StageFacts(stage, {"state": State.RUNNING}, tuple(run.attempts(stage))))


def _summary(
    run: RunDirectory, stages: Sequence[StageFacts], store: ArtifactStore
) -> Iterator[str]:
    yield f"# {markdown.text(run.id)}"
    # A browser opens no file from a web page: paths are text, to be copied.
    paths = [["report", markdown.code(run.report_path)], ["run", markdown.code(run.path)]]
    yield markdown.table(["", ""], paths)
    entries = {stage.name: stage.entry for stage in stages if stage.entry}
    yield from (_beside_baselines(one, store) for one in stages if one.entry.get("metrics"))
    rows = [
        [
            markdown.text(name),
            _state_text(entry),
            "" if entry["seconds"] is None else f"{entry['seconds']:.1f}",
            _made(entry) or markdown.text(str(entry["message"]).partition("\n")[0]),
        ]
        for name, entry in entries.items()
    ]
    yield f"## Stages\n\n{markdown.table(['stage', 'state', 'seconds', 'made'], rows)}"


def _beside_baselines(stage: StageFacts, store: ArtifactStore) -> str:
    artifact = metrics_artifact(stage, store)
    baselines = (artifact.metadata.get("baselines") if artifact else None) or {}
    is_training = role_of(stage.entry) == "training"
    rows = [
        [
            markdown.text(training_metric(key) if is_training else key),
            _short(value),
            *(_short((one.get("metrics") or {}).get(key)) for one in baselines.values()),
        ]
        for key, value in stage.entry["metrics"].items()
    ]
    names = [markdown.text(title.replace("_", " ")) for title in baselines]
    return f"## {markdown.text(stage.name)}\n\n{markdown.table(['metric', 'value', *names], rows)}"


def _made(stage: Mapping[str, Any]) -> str:
    made = stage["artifacts"].items()
    return ", ".join(f"{markdown.text(key)} {markdown.code(one[:12])}" for key, one in made)


def _state_text(stage: Mapping[str, Any]) -> str:
    maker = (stage.get("made_by") or {}).get("run")
    if stage["reused"]:
        return f"reused from {markdown.text(maker)}" if maker else "reused"
    return markdown.text(stage["state"])


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _metrics(
    run: RunDirectory, mine: Scores, stages: Sequence[StageFacts], workspace: Workspace
) -> PageArtifact:
    """All metrics beside those of the last run and of what is in production."""
    others = last_scores(run, workspace), production_scores(run, workspace)
    beside = [one for one in others if one is not None]
    directions: dict[str, str] = {}
    for stage in stages:
        artifact = metrics_artifact(stage, ArtifactStore(workspace))
        directions |= artifact.metadata.get("directions") or {} if artifact else {}
    rows = [_metric_row(name, mine, beside, directions) for name in mine.metrics]
    key = artifact_key(run.record["name"], "metrics")
    return PageArtifact(key, "table", _beside(next(iter(mine.metrics)), mine, beside), rows)


def _metric_row(
    name: str, mine: Scores, beside: Sequence[Scores], directions: Mapping[str, str]
) -> dict[str, str]:
    row = {"metric": markdown.text(name), "value": score(mine.metrics[name])}
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
    """A metric in one line: its value, and its differences to others'."""
    differences = [
        f"{signed(difference)} to {markdown.text(other.name)}"
        for other in beside
        if not isinstance(difference := mine.minus(other, name), str | None)
    ]
    said = f"{markdown.text(name)} **{score(mine.metrics[name])}**"
    return f"{said} ({', '.join(differences)})" if differences else said


def _progress(run: RunDirectory, stage: StageFacts) -> PageArtifact | None:
    attempt = stage.last_attempt
    found = _steps(attempt, is_done=stage.state == State.COMPLETED) if attempt else None
    if found is None:
        return None
    share, said = found
    key = artifact_key(run.record["name"], "progress", stage.name)
    return PageArtifact(key, "progress", markdown.text(f"{stage.name}: {said}"), share)


def _steps(attempt: AttemptDirectory, *, is_done: bool) -> tuple[float, str] | None:
    """The progress of an attempt, in percent and in words; None where it counts no steps now."""
    progress = unless_damaged(attempt.read_progress)
    total = progress.get("total_steps") if progress else None
    if progress is None or not total:
        return None
    if is_done:
        return 100.0, "done"
    if progress.get("phase") == _EVALUATING:
        return None  # an evaluation counts other steps; the training is where it was before
    step = progress.get("step") or 0
    words = [f"step {step:,} of {total:,}"]
    if (loss := progress.get("loss")) is not None:
        words.append(f"loss {number(loss)}")
    if (rate := progress.get("tokens_per_second")) is not None:
        words.append(f"{number(rate)} tokens/s")
    if (left := progress.get("seconds_left")) is not None:
        words.append(f"{duration(left)} left")
    return min(100.0, 100.0 * step / total), ", ".join(words)
