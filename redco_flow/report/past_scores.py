"""The scores that a run is looked at beside: of its pipeline's runs before, and of production.

Reads run.json, state.json and aliases; a run's page in the Prefect UI is the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from redco_flow.report.stage_facts import DAMAGED
from redco_flow.tracking.aliases import Alias, AliasEvent, AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.evaluations import evaluations_of, scores_of
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.results import read_result
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.run_metrics import is_of_training, read_metrics
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores, of_evaluation
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_PRODUCTION = "production"
_MOST_RUNS_READ = 200


@dataclass(frozen=True)
class Scores:
    """The metrics of a run or of a promoted checkpoint.

    Args:
        name: the run's id, or the alias.
        metrics: by name, as `status` has them; of a promoted checkpoint by an evaluation's keys.
        identities: what each metric was measured on and by, as far as records say it.
    """

    name: str
    metrics: Mapping[str, float]
    identities: Mapping[str, ScoreIdentity] = field(default_factory=dict)

    def find(self, metric: str) -> float | None:
        """Return a metric's value; of `STAGE/KEY` also an evaluation's that is called `KEY`."""
        return self.metrics.get(self._name_here(metric))

    def minus(self, other: Scores, metric: str) -> float | str | None:
        """Return the difference to another's value; why there is none; None without a value."""
        here, there = self.find(metric), other.find(metric)
        if here is None or there is None:
            return None
        why = other._identity(metric).comparable_with(self._identity(metric))
        return here - there if why is None else why

    def _name_here(self, metric: str) -> str:
        if metric in self.metrics or is_of_training(metric):
            return metric
        return metric.partition("/")[2]

    def _identity(self, metric: str) -> ScoreIdentity:
        return self.identities.get(self._name_here(metric), ScoreIdentity())


def scores_of_run(run: RunDirectory) -> Scores:
    """Return a run's own scores, those of evaluations first.

    Raises:
        DamagedRecord: its records are damaged.
    """
    workspace = Workspace(run.path.parents[1])
    state = run.read_state()
    stages = state["stages"]
    results = unless_damaged(lambda: run_results(workspace, run)) or {}
    return Scores(
        run.id,
        read_metrics(stages),
        identify_scores(stages, results, ArtifactStore(workspace)),
    )


def last_scores(run: RunDirectory, workspace: Workspace) -> Scores | None:
    """Return the scores of the pipeline's last run that completed before this one, if there is any.

    A point of a sweep has those of a point of the same sweep. Reads at most the last 200 runs.
    """
    pipeline, sweep = run.record["name"], run.record.get("sweep", "")
    others = (one for one in list_runs(workspace) if one.id.rpartition("-")[0] == pipeline)
    for other in islice(others, _MOST_RUNS_READ):
        try:
            is_before = other.sequence < run.sequence and other.record.get("sweep", "") == sweep
            if not is_before or other.read_state()["state"] != State.COMPLETED:
                continue
            scores = scores_of_run(other)
        except DAMAGED:
            continue
        if scores.metrics:
            return scores
    return None


def production_scores(run: RunDirectory, workspace: Workspace) -> Scores | None:
    """Return the scores of what is in production beside a run, if anything is.

    That is the alias `production` of the run's pipeline, or its only alias. Where that names a
    checkpoint of the run's own, what it named before counts.
    """
    aliases = AliasStore(workspace).list(run.record["name"])
    alias = next((one for one in aliases if one.name.alias == _PRODUCTION), None)
    if alias is None and len(aliases) == 1:
        alias = aliases[0]
    event = _event_beside(alias, _own_artifacts(run)) if alias is not None else None
    if alias is None or event is None or not event.metrics:
        return None
    identities = _promoted_identities(workspace, event)
    return Scores(str(alias.name), event.metrics, identities)


def _promoted_identities(workspace: Workspace, event: AliasEvent) -> dict[str, ScoreIdentity]:
    """What a promoted checkpoint's scores were measured on and by: those of its evaluation."""
    for evaluation in evaluations_of(workspace, event.checkpoint):
        if scores_of(evaluation) == event.metrics:
            result = read_result(workspace, str(evaluation.produced_by.get("fingerprint", "")))
            return {key: of_evaluation(evaluation, result, key) for key in event.metrics}
    return {}


def _event_beside(alias: Alias, own: set[str]) -> AliasEvent | None:
    """The event by which the alias names what it does; before the run's own promotion if any."""
    checkpoint = alias.previous if alias.checkpoint in own else alias.checkpoint
    found = (one for one in reversed(alias.history) if one.checkpoint == checkpoint)
    return next(found, None)


def _own_artifacts(run: RunDirectory) -> set[str]:
    """The artifacts that the run made itself; what it reuses was there before."""
    stages = run.read_state()["stages"].values()
    made = [stage for stage in stages if not stage.get("reused")]
    return {one for stage in made for one in (stage.get("artifacts") or {}).values()}
