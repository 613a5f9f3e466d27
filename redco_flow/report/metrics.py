"""The run's metrics next to trivial baselines on the same examples, and confusion tables.

Reads stages' metrics and the manifests of metrics artifacts; computes only differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redco_flow.report.numbers import score, signed
from redco_flow.report.runs_page import Cell, Table
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.run_metrics import Role, role_of, training_metric

_MAX_TEXT = 200


@dataclass(frozen=True)
class Baseline:
    """A trivial prediction.

    Args:
        name: such as "most frequent target".
        text: its prediction for every example; empty if that is not one text.
    """

    name: str
    text: str


@dataclass(frozen=True)
class MetricRow:
    """One metric.

    Args:
        baselines: one value for each of the group's; None where one has none.
        better: "higher" or "lower"; empty where that is not known.
        difference: value minus the best baseline, with its sign; empty without one.
        is_better: whether the value beats that baseline; None where that is not known.
        bar, ticks: the value and the baselines in percent of the scale; None without a scale.
    """

    name: str
    value: float
    baselines: tuple[float | None, ...] = ()
    better: str = ""
    difference: str = ""
    is_better: bool | None = None
    bar: float | None = None
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class MetricsGroup:
    """One stage's metrics.

    Args:
        is_evaluation: whether the stage made a metrics artifact; the others only report.
        is_training: whether it made a checkpoint instead.
        num_examples: how many were scored; None where that is not said.
        scored: what was scored: split and checkpoint; empty where that is not said.
    """

    stage: str
    is_evaluation: bool
    is_training: bool
    rows: tuple[MetricRow, ...]
    baselines: tuple[Baseline, ...]
    num_examples: int | None
    scored: str

    @property
    def has_bars(self) -> bool:
        """Whether any metric can be drawn as a bar; what a stage only reports is not."""
        return self.is_evaluation and any(row.bar is not None for row in self.rows)


def metrics_groups(stages: Iterable[StageFacts], store: ArtifactStore) -> list[MetricsGroup]:
    """Return the metrics of every stage that has some, evaluations first; no comparisons."""
    made = [(stage, metrics_artifact(stage, store)) for stage in stages if stage.metrics]
    scored = [(stage, one) for stage, one in made if not (one and "pairs" in one.metadata)]
    directions: dict[str, str] = {}
    for _, artifact in scored:
        directions |= artifact.metadata.get("directions") or {} if artifact else {}
    groups = [_group(stage, artifact, directions, store) for stage, artifact in scored]
    return sorted(groups, key=lambda group: not group.is_evaluation)


def metrics_artifact(stage: StageFacts, store: ArtifactStore) -> Artifact | None:
    """Return the metrics artifact that a stage made, if it made one and it is still there."""
    found = (store.find(one) for name, one in stage.outputs.items() if is_metrics(name))
    return next((one for one in found if one is not None), None)


def direction_of(name: str, directions: Mapping[str, str]) -> str:
    """Return "max" or "min", which is better of a metric; "" where that is not known.

    Args:
        name: a score's key, also with its stage or `val/` before it.
        directions: by key, as evaluations have them.
    """
    parts = name.split("/")
    keys = ["/".join(parts[start:]) for start in range(len(parts))]
    known = next((directions[key] for key in keys if key in directions), "")
    return known or ("min" if parts[-1].endswith(("loss", "perplexity")) else "")


def is_metrics(output: str) -> bool:
    """Whether an output of this name is a metrics artifact."""
    return output.partition("/")[0] == "metrics"


def _group(
    stage: StageFacts,
    artifact: Artifact | None,
    directions: Mapping[str, str],
    store: ArtifactStore,
) -> MetricsGroup:
    known: Mapping[str, Any] = artifact.metadata if artifact else {}
    baselines: Mapping[str, Any] = known.get("baselines") or {}
    count = known.get("num_examples")
    scores = [one.get("metrics") or {} for one in baselines.values()]
    modules = known.get("modules")  # of lm-eval's tasks there are none
    are_percentages = bool(directions if modules is None else modules)
    return MetricsGroup(
        stage=stage.name,
        is_evaluation=_role(stage) == "evaluation",
        is_training=_role(stage) == "training",
        rows=tuple(_rows(_named_metrics(stage), scores, directions, are_percentages)),
        baselines=tuple(
            Baseline(name.replace("_", " "), _shortened(one.get("text")))
            for name, one in baselines.items()
        ),
        num_examples=count if isinstance(count, int) else None,
        scored=", ".join(_scored(known, store)),
    )


def _role(stage: StageFacts) -> Role:
    return role_of({**stage.entry, "artifacts": stage.outputs})


def _named_metrics(stage: StageFacts) -> dict[str, float]:
    """A stage's metrics; what a training measured has `val/` or `train/` before it."""
    is_training = _role(stage) == "training"
    return {
        training_metric(key) if is_training else key: value for key, value in stage.metrics.items()
    }


def _rows(
    metrics: Mapping[str, float],
    baselines: list[Mapping[str, float]],
    directions: Mapping[str, str],
    are_percentages: bool,  # noqa: FBT001
) -> Iterator[MetricRow]:
    drawn = (
        value
        for of in (metrics, *baselines)
        for name, value in of.items()
        if direction_of(name, directions) != "min"
    )
    top = _scale([*drawn], are_percentages=are_percentages)
    for name, value in metrics.items():
        better = direction_of(name, directions)
        others = tuple(one.get(name) for one in baselines)
        known = [one for one in others if one is not None]
        best = (min if better == "min" else max)(known, default=None)
        gain = None if best is None else value - best
        yield MetricRow(
            name=name,
            value=value,
            baselines=others,
            better={"max": "higher", "min": "lower"}.get(better, ""),
            difference="" if gain is None else signed(gain),
            is_better=None if not gain or not better else (gain > 0) == (better == "max"),
            bar=100 * value / top if top and better != "min" else None,
            ticks=tuple(100 * one / top for one in known) if top else (),
        )


def _scale(values: list[float], *, are_percentages: bool) -> float | None:
    """The end of a scale from 0: 100 for our scores, which are percentages; 1 for fractions."""
    if not values or min(values) < 0 or max(values) > 100:
        return None
    return 1.0 if max(values) <= 1 and not are_percentages else 100.0


def _scored(known: Mapping[str, Any], store: ArtifactStore) -> Iterator[str]:
    """The scored split, and the checkpoint with its stage and step."""
    if known.get("split"):
        yield f"split {known['split']}"
    checkpoint_id = str(known.get("checkpoint") or "")
    if checkpoint_id:
        found = store.find(checkpoint_id)
        made_by = found.produced_by.get("stage") if found else None
        yield f"checkpoint {checkpoint_id[:12]}{f' of stage {made_by}' if made_by else ''}"
    if known.get("step") is not None:
        yield f"step {known['step']:,}"


def _shortened(text: object) -> str:
    shown = "" if text is None else str(text)
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}…"


@dataclass(frozen=True)
class ConfusionCell:
    """Number of examples of a true class that were predicted as a class.

    Args:
        percent: of the true class' examples.
        is_right: whether both are the same class.
        text: the same in words.
    """

    count: int
    percent: float
    is_right: bool
    text: str


@dataclass(frozen=True)
class ConfusionRow:
    """One true class.

    Args:
        cells: of each predicted class.
        recall: share of its examples that were, in percent; empty where there is none.
    """

    name: str
    cells: tuple[ConfusionCell, ...]
    recall: str


@dataclass(frozen=True)
class Confusion:
    """Counts of true and predicted classes by one evaluating stage.

    Args:
        classes: of the columns.
        note: says that rare classes share a row; empty where none do.
    """

    stage: str
    classes: tuple[str, ...]
    rows: tuple[ConfusionRow, ...]
    note: str


_OTHERS = "others"


def confusions(stages: Iterable[StageFacts], store: ArtifactStore) -> list[Confusion]:
    """Return the confusion of every stage that scored classes."""
    found = []
    for stage in stages:
        artifact = metrics_artifact(stage, store)
        known = artifact.metadata.get("confusion") if artifact is not None else None
        if known:
            found.append(_confusion(stage.name, known))
    return found


def _confusion(stage: str, known: Mapping[str, Any]) -> Confusion:
    names = tuple(_OTHERS if name is None else _shortened(name) for name in known["classes"])
    has_others = known["classes"][-1] is None
    note = f"The {len(names) - 1} commonest classes; the rest are “{_OTHERS}”, right or not."
    return Confusion(
        stage=stage,
        classes=names,
        rows=tuple(
            _confusion_row(names, counts, index, is_one=name is not None)
            for index, (name, counts) in enumerate(
                zip(known["classes"], known["counts"], strict=True)
            )
        ),
        note=note if has_others else "",
    )


def _confusion_row(
    names: Sequence[str], counts: list[int], index: int, *, is_one: bool
) -> ConfusionRow:
    total = sum(counts)
    cells = tuple(
        ConfusionCell(
            count,
            percent=100 * count / total if total else 0.0,
            is_right=is_one and place == index,
            text=f"{count:,} of {total:,} “{names[index]}” were taken for “{names[place]}”",
        )
        for place, count in enumerate(counts)
    )
    return ConfusionRow(
        names[index], cells, f"{100 * counts[index] / total:.1f}" if total and is_one else ""
    )


def comparisons(stages: Iterable[StageFacts], store: ArtifactStore) -> dict[str, Table]:
    """Return the comparison that each comparing stage made: a row for two systems by a metric."""
    made = ((stage.name, metrics_artifact(stage, store)) for stage in stages)
    return {
        name: _comparison(name, artifact.metadata)
        for name, artifact in made
        if artifact is not None and "pairs" in artifact.metadata
    }


def _comparison(stage: str, record: Mapping[str, Any]) -> Table:
    caption = (
        f"Stage {stage}: paired bootstrap over {record['num_examples']:,} examples, "
        f"{record['num_resamples']:,} draws; intervals contain {100 * record['confidence']:g} % "
        "of the draws"
    )
    header = ["metric", "first", "second", "difference", "interval", "p", "verdict"]
    return Table(caption, header, [_row(pair) for pair in record["pairs"]])


def _row(pair: Mapping[str, Any]) -> list[Cell]:
    first_is_better = (pair["difference"] > 0) == (pair["better"] == "max")
    better = pair["first"] if first_is_better else pair["second"]
    return [
        Cell(str(pair["key"])),
        Cell(f"{pair['first']} {score(pair['first_score'])}"),
        Cell(f"{pair['second']} {score(pair['second_score'])}"),
        Cell(signed(pair["difference"]), is_number=True),
        Cell(f"{signed(pair['low'])} to {signed(pair['high'])}", is_number=True),
        Cell(f"{pair['p_value']:.2g}", is_number=True),
        Cell(f"{better} is better" if pair["is_significant"] else "not significant"),
    ]
