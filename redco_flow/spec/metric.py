"""The interface of metric modules, and their lookup by name.

A metric is one module of `redco_flow.metrics`, or any importable one: adding a metric is adding a
file. What it is of says its `READS`: "texts" where there is none, "classes" (texts or whole
numbers), "numbers", or "rows", whose predictions may be anything and which gets the data's rows in
place of references. Scores of texts and of classes are percentages (0 to 100), so that numbers of
different metrics can be read beside each other. This file knows no metric by name and imports none
until asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

from redco_flow.spec.names import (
    PYTHON_PREFIX,
    NoSuchModuleError,
    dotted_name_advice,
    import_named,
    known_modules,
    named_module,
    nearest,
)

METRICS_PACKAGE = "redco_flow.metrics"
_DEFINES = ("compute", "of_likelihoods", "of_answers")


@runtime_checkable
class Metric(Protocol):
    """The module-level names of a metric.

    `KEYS` says for each score whether "max" or "min" is better. `references[i]` holds all the
    references of example i, at least one; of a metric of rows it is the row.
    """

    KEYS: dict[str, str]

    def compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Score the whole set: one number per key."""
        ...


@runtime_checkable
class ExampleMetric(Metric, Protocol):
    """A metric that also scores each example: what `compare` and the report's samples read."""

    def per_example(
        self, predictions: Sequence[Any], references: Sequence[Any]
    ) -> dict[str, list[float]]:
        """Score each example on its own: one list per key, in input order."""
        ...


@runtime_checkable
class PooledMetric(ExampleMetric, Protocol):
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
class MetricWithBaselines(Metric, Protocol):
    """A metric of rows that knows what a model would predict that learnt nothing."""

    def baselines(self, references: Sequence[Any]) -> dict[str, list[Any]]:
        """Return such predictions for the rows, by a name for what makes them."""
        ...


@runtime_checkable
class LikelihoodMetric(Protocol):
    """A metric of how likely a model finds each example's first reference.

    `losses[i]` is the summed cross-entropy of that reference in nats, `counts[i]` its number of
    tokens, or of the text's bytes as UTF-8 where the module's `COUNTS` is "bytes". As of a
    `PooledMetric`, the score of a set is that of its examples' summed statistics.
    """

    KEYS: dict[str, str]

    def of_likelihoods(
        self, losses: Sequence[float], counts: Sequence[int]
    ) -> dict[str, list[float]]:
        """Score each example on its own: one list per key, in input order."""
        ...

    def likelihood_statistics(
        self, losses: Sequence[float], counts: Sequence[int]
    ) -> list[list[float]]:
        """Return one vector of additive counts per example."""
        ...

    def from_statistics(self, totals: Sequence[float]) -> dict[str, float]:
        """Score a set from the sum of its examples' vectors."""
        ...


class Verdict(NamedTuple):
    """A judge's verdict on one answer.

    Args:
        answer: what the text answers, the same of equal answers; None: it has no answer.
    """

    is_right: bool
    answer: str | None


@runtime_checkable
class AnswersMetric(Protocol):
    """A metric of several answers to each prompt, each of which a judge finds right or wrong.

    The names in `KEYS` end with `@k`, in whose place a score has the number: `pass@10`.
    """

    KEYS: dict[str, str]

    def of_answers(self, verdicts: Sequence[Sequence[Verdict]], k: int) -> list[float]:
        """Score each prompt by its answers' verdicts; the score of a set is the mean."""
        ...


AnyMetric = Metric | LikelihoodMetric | AnswersMetric


def key_at(key: str, k: int) -> str:
    """Return the name of an `AnswersMetric`'s score: `pass@10` of `pass@k`."""
    return f"{key.removesuffix('@k')}@{k}"


def gives_score(metric: AnyMetric, key: str) -> bool:
    """Whether a score's name is one of a metric's, for any k."""
    name, _, number = key.rpartition("@")
    return key in metric.KEYS or (number.isdecimal() and f"{name}@k" in metric.KEYS)


Reads = Literal["texts", "classes", "numbers", "rows"]
_READ: Mapping[str, tuple[tuple[type, ...], str]] = {
    "texts": ((str,), "texts"),
    "classes": ((str, int), "classes: texts or whole numbers"),
    "numbers": ((int, float), "numbers"),
    "rows": ((object,), "anything"),
}


def reads_of(metric: Metric) -> Reads:
    """Return what a metric's predictions are."""
    reads: Reads = getattr(metric, "READS", "texts")
    return reads


def counts_bytes(metric: LikelihoodMetric) -> bool:
    """Whether a metric of likelihoods is given the texts' bytes, and not their tokens."""
    return getattr(metric, "COUNTS", "tokens") == "bytes"


def check_predictions(name: str, metric: Metric, predictions: Sequence[Any]) -> None:
    """Refuse predictions that a metric cannot read.

    Raises:
        ValueError: the first of them, and what the metric reads.
    """
    types, what = _READ[reads_of(metric)]
    for index, value in enumerate(predictions):
        if not isinstance(value, types):
            kind = type(value).__name__
            raise ValueError(
                f"the metric '{name}' reads {what}, and prediction {index} is a {kind}."
            )


def metric_names() -> tuple[str, ...]:
    """Return the metrics of `redco_flow.metrics`, sorted, without importing them."""
    return known_modules(METRICS_PACKAGE, defines=_DEFINES)


def metric_module(name: str) -> str:
    """Return the dotted module of a metric: of the package's own ones, or the one `name` says."""
    return named_module(METRICS_PACKAGE, name)


def find_metric(name: str) -> Metric:
    """Import a metric of predictions by its short or dotted name.

    Raises:
        ValueError: there is no such module, it lacks one of the names that a metric has, or it is
            a metric of likelihoods or of several answers.
    """
    metric = find_any_metric(name)
    if isinstance(metric, AnswersMetric):
        raise ValueError(
            f"the metric '{name}' is of several answers to a prompt, which a judge finds right or "
            "wrong: name it in the stage evaluate, with its 'judge'."
        )
    if not isinstance(metric, Metric):
        raise ValueError(f"the metric '{name}' is of likelihoods, and scores no generated texts.")
    return metric


def find_any_metric(name: str) -> AnyMetric:
    """Import a metric, of predictions, likelihoods or answers, by its short or dotted name.

    Raises:
        ValueError: there is no such module, or it lacks one of the names that a metric has.
    """
    known = metric_names()
    is_own = "." in name or name.startswith(PYTHON_PREFIX)
    if not is_own and name not in known:
        raise ValueError(
            f"there is no metric '{name}'{nearest(name, known)} Known metrics: {', '.join(known)}; "
            f"{dotted_name_advice(name)}"
        )
    if not all(part.isidentifier() for part in name.removeprefix(PYTHON_PREFIX).split(".")):
        raise ValueError(f"{name!r} is no metric's name: words of a module's name, joined by dots.")
    try:
        module = import_named(metric_module(name))
    except ValueError as error:
        raise type(error)(f"metric '{name}': {error}") from error
    if isinstance(module, LikelihoodMetric):
        return cast("LikelihoodMetric", module)
    if isinstance(module, AnswersMetric):
        return cast("AnswersMetric", module)
    if not isinstance(module, Metric):
        missing = [key for key in ("KEYS", "compute") if not hasattr(module, key)]
        raise ValueError(f"the metric module '{name}' lacks {', '.join(missing)}.")
    if (reads := getattr(module, "READS", "texts")) not in _READ:
        raise ValueError(f"the metric '{name}' READS {reads!r}; it may read {', '.join(_READ)}.")
    return cast("Metric", module)


@dataclass(frozen=True)
class Score:
    """One score of texts.

    Args:
        metric: the metric that gives it, by its short or dotted name.
        key: one of the metric's KEYS.
    """

    metric: str
    key: str

    @property
    def direction(self) -> str:
        """The better direction, "max" or "min"."""
        return find_metric(self.metric).KEYS[self.key]


def find_score(text: str, metrics_in_use: Sequence[str] = ()) -> Score:
    """Find the score of texts that a person names.

    Args:
        text: a key of one of `metrics_in_use` or of this package's metrics ("rouge2"); or a
            metric's dotted module, and its key where it has several: "mine.shout",
            "mine.shout.loudness".

    Raises:
        ValueError: no metric of texts gives it; the message lists what there is.
    """
    known = {
        key: name
        for name in (*metric_names(), *metrics_in_use)  # what is in use wins over a namesake
        if isinstance(metric := find_any_metric(name), Metric)
        for key in metric.KEYS
    }
    if text in known:
        return Score(known[text], text)
    if "." in text:
        return _score_of_module(text)
    raise ValueError(
        f"no metric gives a score '{text}'{nearest(text, known)} Known scores: "
        f"{', '.join(known)}; or the dotted name of a metric's module."
    )


def _score_of_module(text: str) -> Score:
    try:
        keys = find_metric(text).KEYS
    except NoSuchModuleError as error:
        name, _, key = text.rpartition(".")
        if "." not in name:
            raise
        try:
            keys = find_metric(name).KEYS
        except NoSuchModuleError:
            raise error from None
        if key not in keys:
            raise ValueError(
                f"the metric '{name}' gives no score '{key}'; its scores: {', '.join(keys)}."
            ) from None
        return Score(name, key)
    if len(keys) != 1:
        raise ValueError(
            f"the metric '{text}' gives {len(keys)} scores ({', '.join(keys)}): say which, as "
            f"'{text}.KEY'."
        )
    return Score(text, next(iter(keys)))


def check_pairs(predictions: Sequence[Any], references: Sequence[Sequence[Any]]) -> None:
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
