"""compare: two or more evaluations in, how sure their differences are out.

Paired bootstrap (Koehn 2004): draw the examples with replacement, score all systems on the same
draw, many times. Scores that pool counts, such as BLEU, are pooled anew for each draw.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redco_flow.errors import RedcoFlowError
from redco_flow.metrics.metric import (
    LikelihoodMetric,
    PooledMetric,
    find_any_metric,
)
from redco_flow.records import write_json
from redco_flow.stages.artifacts.metrics import MetricsSummary, read_metrics
from redco_flow.stages.context import InputArtifact, Output, StageContext, StageOutputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

from redco_flow.stages.compare.config import Config

COMPARISON_FILE = "comparison.json"
_RESAMPLES_AT_ONCE = 250

logger = logging.getLogger(__name__)


class CannotCompare(RedcoFlowError):
    """The evaluations are not of the same examples, or there are fewer than two."""


@dataclass(frozen=True)
class _System:
    """One evaluation."""

    name: str
    artifact: InputArtifact
    summary: MetricsSummary
    lines: Sequence[dict[str, Any]]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Compare every pair of the evaluations by every score that both have."""
    systems = _systems(context.inputs.get("metrics", ()))
    common = [key for key in systems[0].summary.metrics if _have(systems, key)]
    if not common:
        raise CannotCompare("the evaluations have no score in common; evaluate the same metrics.")
    not_compared = {key: why for key in common if (why := _no_examples(systems, key))}
    keys = [key for key in common if key not in not_compared]
    if not keys:
        raise CannotCompare("; ".join(not_compared.values()) + ": nothing is left to compare.")
    for why in not_compared.values():
        logger.warning("not compared: %s", why)
    draws = _draw(context, systems, keys, config)
    pairs = [
        _compared(first, second, key, draws, config)
        for key in keys
        for first, second in itertools.combinations(systems, 2)
    ]
    folder = context.work_dir / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = {
        "format": 1,
        "num_examples": systems[0].summary.num_examples,
        "num_resamples": config.num_resamples,
        "confidence": config.confidence,
        "seed": config.seed,
        "systems": [_described(system) for system in systems],
        "pairs": pairs,
        "not_compared": not_compared,
    }
    write_json(folder / COMPARISON_FILE, record)
    differences = {f"{p['key']}({p['first']}-{p['second']})": p["difference"] for p in pairs}
    return StageOutputs({"metrics": Output("metrics", folder, record)}, differences)


def _systems(artifacts: Sequence[InputArtifact]) -> list[_System]:
    if len(artifacts) < 2:
        raise CannotCompare(f"{len(artifacts)} evaluation given; comparing takes at least two.")
    stages = [artifact.manifest.get("produced_by", {}).get("stage") for artifact in artifacts]
    systems = []
    for artifact, stage in zip(artifacts, stages, strict=True):
        # Two evaluations by one stage (of two runs, say) are told apart by their ids.
        name = stage if stage and stages.count(stage) == 1 else artifact.id[:12]
        systems.append(_System(name, artifact, *read_metrics(artifact.path)))
    first = systems[0]
    for other in systems[1:]:
        if other.summary.examples_digest != first.summary.examples_digest:
            raise CannotCompare(
                f"'{first.name}' and '{other.name}' were not evaluated on the same examples "
                f"({first.summary.num_examples} and {other.summary.num_examples}, or other rows "
                "or references): evaluate both on the same split of the same data."
            )
    return systems


def _have(systems: Sequence[_System], key: str) -> bool:
    return all(key in system.summary.metrics for system in systems)


def _no_examples(systems: Sequence[_System], key: str) -> str:
    """Say which evaluation has no score of each example by this key; empty where all have one."""
    for system in systems:
        if not all(key in line["scores"] for line in system.lines):
            return (
                f"'{key}' of '{system.name}' is known of the whole set alone (its metric has no "
                "per_example, which says how sure a difference is)"
            )
    return ""


def _draw(
    context: StageContext, systems: Sequence[_System], keys: Sequence[str], config: Config
) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Each system's score by each key on each draw; the draws are the same for all."""
    import numpy as np

    rng = np.random.default_rng(config.seed)
    num_examples = systems[0].summary.num_examples
    shares = np.full(num_examples, 1 / num_examples)
    found: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    tables = {(s.name, key): _table(s, key) for s in systems for key in keys}
    for start in range(0, config.num_resamples, _RESAMPLES_AT_ONCE):
        context.raise_if_stopped()
        context.report(phase="resampling", step=start, total_steps=config.num_resamples)
        size = min(_RESAMPLES_AT_ONCE, config.num_resamples - start)
        times = rng.multinomial(num_examples, shares, size=size).astype(np.float64)
        for key, (table, pooled) in tables.items():
            sums = times @ table
            found.setdefault(key, []).append(_scores(sums, key[1], pooled, num_examples))
    return {key: np.concatenate(parts) for key, parts in found.items()}


Pooled = PooledMetric | LikelihoodMetric


def _table(system: _System, key: str) -> tuple[NDArray[np.float64], Pooled | None]:
    """What of each example is summed for a score: counts, or the example's own score."""
    import numpy as np

    for name in system.summary.modules:
        metric = find_any_metric(name)
        if key in metric.KEYS and isinstance(metric, PooledMetric | LikelihoodMetric):
            return np.array([line["statistics"][name] for line in system.lines]), metric
    return np.array([[line["scores"][key]] for line in system.lines]), None


def _scores(
    sums: NDArray[np.float64], key: str, pooled: Pooled | None, num_examples: int
) -> NDArray[np.float64]:
    import numpy as np

    if pooled is None:
        return sums[:, 0] / num_examples
    return np.array([pooled.from_statistics(row.tolist())[key] for row in sums])


def _compared(
    first: _System,
    second: _System,
    key: str,
    draws: dict[tuple[str, str], NDArray[np.float64]],
    config: Config,
) -> dict[str, Any]:
    import numpy as np

    differences = draws[first.name, key] - draws[second.name, key]
    tail = (1 - config.confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    # Two-sided, and never 0: no number of draws can show that.
    one_side = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    p_value = min(1.0, 2 * (one_side + 1) / (len(differences) + 1))
    scores = first.summary.metrics[key], second.summary.metrics[key]
    return {
        "key": key,
        "better": first.summary.directions[key],
        "first": first.name,
        "second": second.name,
        "first_score": scores[0],
        "second_score": scores[1],
        "difference": scores[0] - scores[1],
        "low": float(low),
        "high": float(high),
        "p_value": p_value,
        "is_significant": p_value < 1 - config.confidence,
    }


def _described(system: _System) -> dict[str, Any]:
    summary = system.summary
    return {
        "name": system.name,
        "metrics_artifact": system.artifact.id,
        "checkpoint": summary.checkpoint,
        "data": summary.data,
        "config": summary.config,
        "metrics": dict(summary.metrics),
    }
