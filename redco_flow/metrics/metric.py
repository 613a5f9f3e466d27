"""What a metric module offers, and how to find one by its name.

A metric is one module of this package, or any importable dotted module: adding a metric is
adding a file. Scores of texts are percentages (0 to 100), so that numbers of different metrics
can be read beside each other. This file knows no metric by name and imports none until asked.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from redco_flow import metrics

_NOT_METRICS = frozenset({"metric"})


@runtime_checkable
class Metric(Protocol):
    """The module-level names of a metric.

    `KEYS` says for each score whether "max" or "min" is better. `references[i]` holds all the
    references of example i, at least one.
    """

    KEYS: dict[str, str]

    def compute(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        """Score the whole set: one number per key."""
        ...

    def per_example(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]]
    ) -> dict[str, list[float]]:
        """Score each example on its own: one list per key, in input order."""
        ...


@runtime_checkable
class PooledMetric(Metric, Protocol):
    """A metric whose score of a set is no mean of its examples' scores, such as BLEU.

    `statistics` gives one vector per example; the score of any set (a bootstrap resample, say)
    is `from_statistics` of the sum of its examples' vectors.
    """

    def statistics(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Return one vector of additive counts per example."""
        ...

    def from_statistics(self, totals: Sequence[float]) -> dict[str, float]:
        """Score a set from the sum of its examples' vectors."""
        ...


@runtime_checkable
class LikelihoodMetric(Protocol):
    """A metric of how likely a model finds each example's first reference; it reads no text.

    `losses[i]` is the summed cross-entropy of that reference in nats, `num_tokens[i]` of how many
    tokens. As of a `PooledMetric`, the score of a set is that of its examples' summed statistics.
    """

    KEYS: dict[str, str]

    def of_likelihoods(
        self, losses: Sequence[float], num_tokens: Sequence[int]
    ) -> dict[str, list[float]]:
        """Score each example on its own: one list per key, in input order."""
        ...

    def likelihood_statistics(
        self, losses: Sequence[float], num_tokens: Sequence[int]
    ) -> list[list[float]]:
        """Return one vector of additive counts per example."""
        ...

    def from_statistics(self, totals: Sequence[float]) -> dict[str, float]:
        """Score a set from the sum of its examples' vectors."""
        ...


AnyMetric = Metric | LikelihoodMetric


def metric_names() -> list[str]:
    """List the metrics of this package, sorted, without importing them."""
    names = (module.name for module in pkgutil.iter_modules(metrics.__path__))
    return sorted(name for name in names if name not in _NOT_METRICS)


def metric_module(name: str) -> str:
    """Return the dotted module of a metric: its name in this package, or `name` when dotted."""
    return name if "." in name else f"{metrics.__name__}.{name}"


def find_metric(name: str) -> Metric:
    """Import a metric of texts by its short or dotted name.

    Raises:
        ValueError: there is no such module, it lacks one of the names that a metric has, or it is
            a metric of likelihoods.
    """
    metric = find_any_metric(name)
    if not isinstance(metric, Metric):
        raise ValueError(f"the metric '{name}' is of likelihoods, and scores no generated texts.")
    return metric


def find_any_metric(name: str) -> AnyMetric:
    """Import a metric, of texts or of likelihoods, by its short or dotted name.

    Raises:
        ValueError: there is no such module, or it lacks one of the names that a metric has.
    """
    known = metric_names()
    if "." not in name and name not in known:
        raise ValueError(
            f"there is no metric '{name}'; known metrics: {', '.join(known)}, "
            "or the dotted name of a module with KEYS, compute and per_example."
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no metric's name: words of a module's name, joined by dots.")
    try:
        module = importlib.import_module(metric_module(name))
    except Exception as error:  # a module of the user's may raise anything
        raise ValueError(
            f"the metric '{name}' cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if isinstance(module, LikelihoodMetric):
        return cast("LikelihoodMetric", module)
    if not isinstance(module, Metric):
        missing = [key for key in ("KEYS", "compute", "per_example") if not hasattr(module, key)]
        raise ValueError(f"the metric module '{name}' lacks {', '.join(missing)}.")
    return cast("Metric", module)


def find_metric_of(key: str) -> str:
    """Return the name of this package's metric of texts that gives `key`: "rouge" for "rouge2".

    Raises:
        ValueError: no metric of texts gives it; the message lists every key.
    """
    metrics_of_texts = {
        name: metric
        for name in metric_names()
        if isinstance(metric := find_any_metric(name), Metric)
    }
    keys = {key: name for name, metric in metrics_of_texts.items() for key in metric.KEYS}
    if key not in keys:
        raise ValueError(f"no metric gives a score '{key}'; known scores: {', '.join(keys)}.")
    return keys[key]


def check_pairs(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse what no metric can score.

    Raises:
        ValueError: nothing to score, unequal lengths, or an example without a reference.
    """
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions but {len(references)} lists of references: "
            "every example needs one of each."
        )
    if not predictions:
        raise ValueError("there is nothing to score: no predictions.")
    for index, texts in enumerate(references):
        if not texts:
            raise ValueError(f"example {index} has no reference; every example needs at least one.")
