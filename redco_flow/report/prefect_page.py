"""The summary of a run in the Prefect UI, as Markdown: report, metrics with baselines, stages.

Imports no Prefect: `orchestrate.prefect.report` sends it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redco_flow.report.metrics import metrics_artifact
from redco_flow.report.stage_facts import StageFacts, read_stages
from redco_flow.terminal_text import visible
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import read_metrics, role_of, training_metric
from redco_flow.tracking.workspace import Workspace

_MEANT_AS_MARKDOWN = re.compile(r"[\[\]`\\*~]|(?<![^\W_])_|_(?![^\W_])")


@dataclass(frozen=True)
class RunSummary:
    """The artifact of a run's page.

    Args:
        key: the same in every run of the pipeline, so that the key's page in the UI lists the
            runs: lowercase letters, digits, dashes.
        description: the metrics, as one line of Markdown, which lists of artifacts show.
        data: Markdown.
    """

    key: str
    description: str
    data: str


def run_summary(run: RunDirectory, workspace: Workspace) -> RunSummary:
    """Return the summary of a run at its present state; it names what cannot be read.

    Raises:
        DamagedRecord: the run's own records cannot be read.
    """
    remarks: list[str] = []
    stages = list(read_stages(run, workspace, remarks.append).values())
    metrics = read_metrics(run.read_state()["stages"]).items()
    listed = ", ".join(f"{as_text(name)} {value:.4g}" for name, value in metrics)
    parts = [*_parts(run, stages, ArtifactStore(workspace)), *map(as_text, remarks)]
    key = re.sub(r"[^a-z0-9]+", "-", f"{run.record['name']}-summary".lower()).strip("-")
    return RunSummary(key, listed or "no metrics", "\n\n".join(parts) + "\n")


def _parts(run: RunDirectory, stages: Sequence[StageFacts], store: ArtifactStore) -> Iterator[str]:
    yield f"# {as_text(run.id)}"
    # A browser opens no file from a web page: paths are text, to be copied.
    # Of a sweep's point the page is made on demand.
    report = f"redco-flow report {run.id}" if run.record.get("sweep") else run.report_path
    paths = [["report", as_code(report)], ["run", as_code(run.path)]]
    yield as_table(["", ""], paths)
    yield from (_metrics(one, store) for one in stages if one.entry.get("metrics"))
    rows = [
        [
            as_text(stage.name),
            _state_text(stage.entry),
            "" if stage.entry["seconds"] is None else f"{stage.entry['seconds']:.1f}",
            _outputs(stage.entry) or as_text(str(stage.entry["message"]).partition("\n")[0]),
        ]
        for stage in stages
        if stage.entry
    ]
    yield f"## Stages\n\n{as_table(['stage', 'state', 'seconds', 'outputs'], rows)}"


def _metrics(stage: StageFacts, store: ArtifactStore) -> str:
    """A stage's metrics, each next to the baselines of its evaluation."""
    artifact = metrics_artifact(stage, store)
    baselines = (artifact.metadata.get("baselines") if artifact else None) or {}
    is_training = role_of(stage.entry) == "training"
    rows = [
        [
            as_text(training_metric(key) if is_training else key),
            _short(value),
            *(_short((one.get("metrics") or {}).get(key)) for one in baselines.values()),
        ]
        for key, value in stage.entry["metrics"].items()
    ]
    names = [as_text(title.replace("_", " ")) for title in baselines]
    return f"## {as_text(stage.name)}\n\n{as_table(['metric', 'value', *names], rows)}"


def _outputs(entry: Mapping[str, Any]) -> str:
    outputs = entry["artifacts"].items()
    return ", ".join(f"{as_text(key)} {as_code(one[:12])}" for key, one in outputs)


def _state_text(entry: Mapping[str, Any]) -> str:
    maker = (entry.get("made_by") or {}).get("run")
    if entry["reused"]:
        return f"reused from {as_text(maker)}" if maker else "reused"
    return as_text(entry["state"])


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def as_text(value: object) -> str:
    """Return text in one line that Markdown shows as it is: no HTML, link, image or code."""
    line = html.escape(" ".join(visible(str(value)).split()), quote=False)
    return _MEANT_AS_MARKDOWN.sub(r"\\\g<0>", line)


def as_code(value: object) -> str:
    """Return a path or an id as code; what would end the code is written out."""
    return "`" + " ".join(visible(str(value)).replace("`", "\\x60").split()) + "`"


def as_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
