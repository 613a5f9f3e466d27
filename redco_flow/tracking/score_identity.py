"""The identity of a score: split, rows, metric, the metric's code and settings.

Two scores of one name are subtracted only if these are equal (`ScoreIdentity.comparable_with`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from redco_flow.records import digest_json
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.run_metrics import TRAINING_LOSS, locate_metrics, role_of

_METRICS = "redco_flow.metrics"
# Modules that find metrics and call them, also of earlier versions; they compute no score.
_NOT_OF_A_METRIC = (_METRICS, f"{_METRICS}.metric", f"{_METRICS}.settings")
_OF_THE_LOSS = (TRAINING_LOSS, "eval_loss", "perplexity")
_MOST_NAMED = 3

FindArtifact = Callable[[str], Artifact | None]
"""From an artifact's id to the artifact, where it is there."""


@dataclass(frozen=True)
class ScoreIdentity:
    """Data and metric of a score; empty or None where no record has them.

    Args:
        split: "test", "validation", "train", or the name of another split.
        rows: digest of the scored rows; equal digests are equal rows in equal order.
        num_examples: how many rows; None: all of the split.
        metric: the metric that gave the score: its name in `redco_flow.metrics` or its module.
        code: digest of each of the metric's modules, and of its judge where it has one.
        settings: digest of the metric's settings.
        dataset: id of the dataset that the rows are of, where no digest was recorded with them.
    """

    split: str = ""
    rows: str = ""
    num_examples: int | None = None
    metric: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""
    dataset: str = ""

    def comparable_with(self, other: ScoreIdentity) -> str | None:
        """Return why the difference of the two scores has no meaning; None where it has one.

        A part that one of the two has no record of is not compared.
        """
        if self.split and other.split and self.split != other.split:
            return f"another split: '{other.split}', not '{self.split}'"
        if problem := self._other_rows(other):
            return problem
        if self.metric and other.metric and self.metric != other.metric:
            return f"another metric: '{other.metric}', not '{self.metric}'"
        common = [name for name in self.code if name in other.code]
        if changed := [name for name in common if self.code[name] != other.code[name]]:
            return f"other metric code: {', '.join(changed[:_MOST_NAMED])}"
        if self.settings and other.settings and self.settings != other.settings:
            return "other metric settings"
        return None

    def _other_rows(self, other: ScoreIdentity) -> str | None:
        split = self.split or other.split
        if self.rows and other.rows:
            are_equal = self.rows == other.rows
        elif self.dataset and other.dataset:
            are_equal = self.dataset == other.dataset
            if not are_equal:
                return f"rows of '{split}' are unknown: a dataset was deleted"
        else:
            return None
        if are_equal and self.num_examples == other.num_examples:
            return None
        here, there = (
            "all" if one.num_examples is None else f"{one.num_examples:,}" for one in (self, other)
        )
        counts = f" ({there}, not {here})" if here != there else ""
        return f"other rows of '{split}'{counts}"


def identify_scores(
    stages: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, StageResult],
    store: ArtifactStore,
) -> dict[str, ScoreIdentity]:
    """Return the identity of each score of a run, by the metric's name (`locate_metrics`).

    Args:
        stages: the entries of state.json.
        results: of the stages that have one.
    """
    found: dict[str, ScoreIdentity] = {}
    find = cache(store.find)  # a stage has many scores
    for name, (stage, key) in locate_metrics(stages).items():
        result, entry = results.get(stage), stages[stage]
        if role_of(entry) == "training" and result is not None:
            found[name] = _of_training(result, key, find)
        elif artifact := _metrics_artifact(entry, find):
            found[name] = of_evaluation(artifact, result, key)
    return found


def _metrics_artifact(entry: Mapping[str, Any], find: FindArtifact) -> Artifact | None:
    made = entry.get("artifacts") or {}
    ids = [one for output, one in made.items() if output.partition("/")[0] == "metrics"]
    return find(ids[0]) if ids else None


def of_evaluation(evaluation: Artifact, result: StageResult | None, key: str) -> ScoreIdentity:
    """Return the identity of one score of a metrics artifact; see `of_record`."""
    return of_record(evaluation.metadata, result, key)


def of_record(record: Mapping[str, Any], result: StageResult | None, key: str) -> ScoreIdentity:
    """Return the identity of one score of an evaluation.

    Args:
        record: what `metrics.json` holds.
        result: of the stage that made it; None where that is gone: its code is not known then.
        key: the score's.
    """
    names = [str(name) for name in record.get("modules") or ()]
    metric = metric_of(key, names)
    ingredients = result.ingredients if result is not None else {}
    given: Mapping[str, Any] = ingredients.get("settings") or {}
    # What another kind of stage computes with is not the metric's code alone.
    code = dict(_metric_code(ingredients.get("code") or {}, metric, names)) if names else {}
    if judge := given.get("judge"):
        code["the judge"] = digest_json([judge, ingredients.get("data") or {}])
    settings = _own_settings(record.get("settings"), metric)
    if result is not None and result.kind == "harness":
        of_rows = ("tasks", "num_examples")
        settings = {name: value for name, value in given.items() if name not in of_rows}
        settings["data"] = ingredients.get("data") or {}  # lm-eval's version, files of tasks
    return ScoreIdentity(
        split=str(record.get("split") or ""),
        rows=str(record.get("examples_digest") or ""),
        num_examples=record.get("num_examples"),
        metric=metric,
        code=code,
        settings=digest_json(settings) if settings else "",
    )


def _own_settings(settings: Any, metric: str) -> Any:
    """The settings of one metric; all of them where it is not known which one it is."""
    found = settings.get(metric) if isinstance(settings, dict) and metric else settings
    return found or None


def metric_of(key: str, names: Sequence[str]) -> str:
    """Return which of some metrics gives a score; empty where none does, or not any more.

    Args:
        names: of the metrics, as the evaluate stage names them.
    """
    if len(names) == 1 or key in names:
        return key if key in names else names[0]
    # Imported here: modules of metrics are needed only if the names are not enough.
    from redco_flow.spec.metric import find_any_metric, gives_score

    for name in names:
        try:
            if gives_score(find_any_metric(name), key):
                return name
        except (ValueError, ImportError):
            continue
    return ""


def _metric_code(
    code: Mapping[str, str], metric: str, names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """The modules that a metric computes with, without those of the other metrics."""
    others = {_module(name) for name in names if metric and name != metric}
    for module, digest in code.items():
        is_ours = module.partition(".")[0] == "redco_flow"
        is_of_metrics = module.startswith(f"{_METRICS}.") and module not in _NOT_OF_A_METRIC
        if module not in others and (is_of_metrics or not is_ours):
            yield module, digest


def _module(name: str) -> str:
    plain = name.removeprefix("python:")
    return plain if "." in plain or plain != name else f"{_METRICS}.{plain}"


def _of_training(result: StageResult, key: str, find: FindArtifact) -> ScoreIdentity:
    """The identity of what a training measured itself: its loss, and scores of its validation."""
    ingredients = result.ingredients
    settings: Mapping[str, Any] = ingredients.get("settings") or {}
    evaluation: Mapping[str, Any] = settings.get("eval") or {}
    split = "train" if key == TRAINING_LOSS else "validation"
    dataset = str(((ingredients.get("inputs") or {}).get("dataset") or [""])[0])
    is_loss = key in _OF_THE_LOSS
    names = [] if is_loss else [str(name) for name in evaluation.get("metrics") or ()]
    code = ingredients.get("code") or {}
    metric = metric_of(key, names) or (key if _module(key) in code else "")
    of_metric = {_module(metric): code[_module(metric)]} if _module(metric) in code else {}
    # A loss is another quantity under another recipe or objective, such as DPO's and ORPO's; other
    # settings of a recipe, such as its augmentation, do not change what is measured.
    of_recipe: Mapping[str, Any] = settings.get("settings") or {}
    objective = [settings.get("recipe"), of_recipe.get("loss")] if is_loss else None
    return ScoreIdentity(
        split=split,
        rows=_rows_of_split(find, dataset, split),
        dataset=dataset,
        num_examples=None if split == "train" else evaluation.get("num_examples"),
        metric=metric,
        code=of_metric,
        settings=digest_json([objective, _own_settings(evaluation.get("metric_settings"), metric)]),
    )


def _rows_of_split(find: FindArtifact, dataset_id: str, split: str) -> str:
    """The digest of a split's files; empty where the dataset is gone."""
    dataset = find(dataset_id) if dataset_id else None
    files = dataset.manifest["files"] if dataset is not None else []
    found = [[one["path"], one["blake3"]] for one in files if one["path"].startswith(f"{split}-")]
    return digest_json(sorted(found)) if found else ""
