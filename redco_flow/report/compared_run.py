"""Data of the runs of a comparison, each part read when it is needed, and which scores are best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.records import digest_json
from redco_flow.report.metrics import direction_of
from redco_flow.report.numbers import seconds_between
from redco_flow.report.run_diff.settings import read_settings
from redco_flow.report.stage_facts import DAMAGED, StageFacts, logging_attempts, read_stages
from redco_flow.report.training_history import History, read_history
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import read_metrics
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace


@dataclass(eq=False)
class ComparedRun:
    """One run of a comparison; what cannot be read is empty.

    Args:
        label: its name in tables and legends; the run's id where it is empty.
        view: state, seconds and metrics as `status` shows them; by state.json where it is empty.
        remarks: of records of the stages that could not be read, once `stages` was read.
    """

    run: RunDirectory
    label: str = ""
    view: Mapping[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.label = self.label or self.run.id

    @cached_property
    def workspace(self) -> Workspace:
        """The workspace of the run."""
        return Workspace(self.run.path.parents[1])

    @cached_property
    def store(self) -> ArtifactStore:
        """The artifacts of that workspace."""
        return ArtifactStore(self.workspace)

    @cached_property
    def stages(self) -> dict[str, StageFacts]:
        """Each stage by name, in the pipeline's order."""
        return read_stages(self.run, self.workspace, self.remarks.append)

    @cached_property
    def _status(self) -> Mapping[str, Any]:
        return unless_damaged(self.run.read_state) or {}

    @cached_property
    def entries(self) -> Mapping[str, Any]:
        """The stages' entries of state.json."""
        return self._status.get("stages") or {}

    @cached_property
    def results(self) -> dict[str, StageResult]:
        """The results of the stages that have one."""
        return unless_damaged(lambda: run_results(self.workspace, self.run)) or {}

    @cached_property
    def state(self) -> str:
        """The run's state."""
        return str(self.view.get("state") or self._status.get("state") or "damaged")

    @cached_property
    def message(self) -> str:
        """The message of its end."""
        return str(self._status.get("message") or "")

    @cached_property
    def created_at(self) -> str:
        """The time of its start, as records have it."""
        return str((unless_damaged(lambda: self.run.record) or {}).get("created_at") or "")

    @cached_property
    def seconds(self) -> float | None:
        """Its duration; None where that is not known."""
        if "seconds" in self.view:
            seconds: float | None = self.view["seconds"]
            return seconds
        return seconds_between(self._status.get("started_at"), self._status.get("ended_at"))

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """All of resolved.yaml, by dotted key."""
        try:
            return read_settings(self.run)
        except (RedcoFlowError, *DAMAGED):
            return {}

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """Each metric by the name that `status` gives it."""
        return dict(self.view["metrics"]) if "metrics" in self.view else read_metrics(self.entries)

    @cached_property
    def identities(self) -> Mapping[str, ScoreIdentity]:
        """The identity of each metric: data and metric."""
        return identify_scores(self.entries, self.results, self.store)

    @cached_property
    def directions(self) -> Mapping[str, str]:
        """The better direction of each score, "max" or "min", as far as evaluations record it."""
        found: dict[str, str] = {}
        for _, artifact in self._evaluations():
            found |= artifact.metadata.get("directions") or {}
        return found

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, float]]:
        """Scores by metric, then by part of the data; with several such stages by STAGE/metric."""
        scored = {name: one.metadata.get("parts") or {} for name, one in self._evaluations()}
        of_stages = {name: parts for name, parts in scored.items() if parts}
        found: dict[str, dict[str, float]] = {}
        for stage, parts in of_stages.items():
            prefix = f"{stage}/" if len(of_stages) > 1 else ""
            for part, record in parts.items():
                for name, value in record["metrics"].items():
                    found.setdefault(f"{prefix}{name}", {})[part] = value
        return found

    def _evaluations(self) -> Iterator[tuple[str, Artifact]]:
        for stage, entry in self.entries.items():
            # The result, where a launcher has not collected it yet.
            result = self.results.get(stage)
            made = entry.get("artifacts") or (result.outputs if result else {})
            for output, id in made.items():
                is_metrics = output.partition("/")[0] == "metrics"
                if is_metrics and (artifact := self.store.find(id)) is not None:
                    yield stage, artifact
                    break

    @cached_property
    def trainings(self) -> Mapping[str, History]:
        """The records that each training stage logged."""
        read = {name: read_history(logging_attempts(one)[0]) for name, one in self.stages.items()}
        return {name: found for name, found in read.items() if found.logged}

    @cached_property
    def ingredients(self) -> Mapping[str, Mapping[str, Any]]:
        """The ingredients of the fingerprint of each stage that has a result."""
        return {stage: result.ingredients for stage, result in self.results.items()}

    @property
    def data(self) -> str:
        """One digest of the raw data of all stages; empty where none of them has any."""
        data = {stage: one["data"] for stage, one in self.ingredients.items() if one.get("data")}
        return digest_json(data) if data else ""

    def identity(self, metric: str) -> ScoreIdentity:
        """Return the identity of a metric; an empty one where no record has it."""
        return self.identities.get(metric, ScoreIdentity())


def metric_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the metrics of any of the runs, in the order of appearance."""
    return list(dict.fromkeys(name for one in runs for name in one.metrics))


def best_of(values: Sequence[float | None], direction: str) -> float | None:
    """Return the best of a metric's values; None where it is not known which way is better."""
    known = [value for value in values if value is not None]
    if not direction or len(known) < 2 or min(known) == max(known):
        return None
    return min(known) if direction == "min" else max(known)


def not_compared(name: str, runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Return why a metric of a run cannot be compared with the first run's that has it, by label.

    Args:
        name: the metric's.
    """
    scored = [one for one in runs if name in one.metrics]
    if not scored:
        return {}
    first, *others = scored
    found = {one.label: first.identity(name).comparable_with(one.identity(name)) for one in others}
    return {label: f"not compared with {first.label}: {why}" for label, why in found.items() if why}


def best_run_value(name: str, runs: Sequence[ComparedRun]) -> float | None:
    """Return the best value of a metric; None where not all of its values can be compared."""
    if not_compared(name, runs):
        return None
    return best_of([one.metrics.get(name) for one in runs], direction(name, runs))


def direction(name: str, runs: Sequence[ComparedRun]) -> str:
    """Return "max" or "min", which is better of a metric; empty where no evaluation records it."""
    known = {key: way for one in runs for key, way in one.directions.items()}
    return direction_of(name, known)
