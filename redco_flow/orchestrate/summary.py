"""The run's story in Markdown, for its Prefect page: metrics beside the baseline, and whose.

Pure apart from reading manifests of artifacts; the same facts as state.json.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from redco_flow.terminal_text import visible
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace


def summary_key(run: RunDirectory) -> str:
    """Return the key of the run's summary among Prefect's artifacts: lowercase, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"redco-flow-{run.id}".lower())


def run_summary(run: RunDirectory, workspace: Workspace) -> str:
    """Return the run's summary, by its state.json."""
    states = run.read_state()["stages"]
    store = ArtifactStore(workspace)
    parts = [f"# {run.id}"]
    for name, stage in states.items():
        if stage.get("metrics"):
            parts += _metrics(name, stage, store)
    parts += _stages(states)
    parts.append(f"Report: {_code(run.report_path)}")
    parts.append(f"Everything else: {_code(run.path)}")
    return "\n\n".join(parts) + "\n"


def headline(run: RunDirectory) -> str:
    """Return the run's metrics in one line, for places that show no more."""
    found = [
        (name, key, value)
        for name, stage in run.read_state()["stages"].items()
        for key, value in (stage.get("metrics") or {}).items()
    ]
    counts = Counter(key for _, key, _ in found)
    named = (
        f"{_text(key if counts[key] == 1 else f'{stage}.{key}')} {_number(value)}"
        for stage, key, value in found
    )
    return ", ".join(named) or "no metrics"


def _metrics(name: str, stage: Mapping[str, Any], store: ArtifactStore) -> Iterator[str]:
    """A stage's metrics beside what trivial baselines get, and the checkpoint they belong to."""
    evaluation = _evaluation(stage, store)
    baselines: Mapping[str, Any] = evaluation.get("baselines") or {}
    columns = ["metric", "value", *(_text(title.replace("_", " ")) for title in baselines)]
    rows = [
        [_text(key), _number(value)]
        + [_number((one.get("metrics") or {}).get(key)) for one in baselines.values()]
        for key, value in stage["metrics"].items()
    ]
    yield f"## {_text(name)}\n\n{_table(columns, rows)}"
    checkpoint = _checkpoint(stage, evaluation, store)
    if checkpoint is not None:
        step = evaluation.get("step", checkpoint.metadata.get("step"))
        at = f" (step {_text(step)})" if step is not None else ""
        yield f"Checkpoint `{checkpoint.short_id}`{at}: {_code(checkpoint.path)}"


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


def _stages(states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for name, stage in states.items():
        state = "reused" if stage["reused"] else stage["state"]
        made = ", ".join(
            f"{_text(key)} {_code(one[:12])}" for key, one in stage["artifacts"].items()
        )
        seconds = "" if stage["seconds"] is None else f"{stage['seconds']:.1f}"
        told = made or _text(str(stage["message"]).partition("\n")[0])
        rows.append([_text(name), state, seconds, told])
    yield f"## Stages\n\n{_table(['stage', 'state', 'seconds', 'made'], rows)}"


def _find_checkpoint(store: ArtifactStore, artifact_id: str, depth: int) -> Artifact | None:
    """The artifact itself or the nearest of its parents that is a checkpoint."""
    artifact = store.find(artifact_id)
    if artifact is None or artifact.kind == "checkpoint":
        return artifact
    found = (_find_checkpoint(store, one, depth - 1) for one in artifact.parents.values())
    return next((one for one in found if one is not None), None) if depth else None


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(text: object) -> str:
    """Text in one line that Markdown shows as it is: no HTML, no link, no image, no code."""
    line = html.escape(" ".join(visible(str(text)).split()), quote=False)
    return re.sub(r"[\[\]`\\]", r"\\\g<0>", line)


def _code(text: object) -> str:
    """A path or an id as code; what would end the code is written out."""
    return "`" + " ".join(visible(str(text)).replace("`", "\\x60").split()) + "`"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
