"""The scores that a run is looked at beside: of its pipeline's runs before, and of production.

Reads run.json, state.json and aliases; a run's page in the Prefect UI is the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redco_flow.report.stage_facts import DAMAGED
from redco_flow.tracking.aliases import Alias, AliasEvent, AliasStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.run_metrics import locate_metrics, read_metrics
from redco_flow.tracking.workspace import Workspace

_PRODUCTION = "production"
_MOST_RUNS_READ = 200


@dataclass(frozen=True)
class Scores:
    """The metrics of a run or of a promoted checkpoint.

    Args:
        name: the run's id, or the alias.
        metrics: by name, as `status` has them.
        created_at: ISO time of the run's start, or of the promotion.
        address: the run's page in the Prefect UI; empty where it has none.
    """

    name: str
    metrics: Mapping[str, float]
    created_at: str = ""
    address: str = ""

    def find(self, metric: str) -> float | None:
        """Return a metric's value; of a stage's metric also where it stands without the stage."""
        return self.metrics.get(metric, self.metrics.get(metric.rpartition("/")[2]))


def scores_of_run(run: RunDirectory) -> Scores:
    """Return a run's own scores, those of evaluations first.

    Raises:
        DamagedRecord: its records are damaged.
    """
    state = run.read_state()
    stages = state["stages"]
    found, located = read_metrics(stages), locate_metrics(stages)
    ordered = sorted(found, key=lambda name: not _is_evaluated(stages[located[name][0]]))
    metrics = {name: found[name] for name in ordered}
    address = str(state.get("prefect_url") or "")
    return Scores(run.id, metrics, str(run.record.get("created_at") or ""), address)


def _is_evaluated(stage: Mapping[str, Any]) -> bool:
    return any(name.partition("/")[0] == "metrics" for name in stage.get("artifacts") or ())


def earlier_scores(run: RunDirectory, workspace: Workspace, num_runs: int) -> list[Scores]:
    """Return the scores of the runs of the same pipeline that completed before, newest first.

    Points of sweeps are compared with points of the same sweep alone.

    Args:
        num_runs: at most so many; of the last 200 that began before.
    """
    return list(islice(_earlier(run, workspace), num_runs))


def _earlier(run: RunDirectory, workspace: Workspace) -> Iterator[Scores]:
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
            yield scores


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
    return Scores(str(alias.name), event.metrics, event.time)


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
