"""Settings of metrics (`metric_settings: {bleu: {tokenize: zh}}`), and metrics bound to them.

A metric with settings has a class `Settings`, a dataclass or a pydantic model, and its functions
take the keyword argument `settings`. Functions of a metric of classes may also take `classes`, the
`ClassNames` of the data; `check_settings(settings, classes)` refuses what the metric cannot use
before anything is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from pydantic import ValidationError

from redco_flow.metrics.confusion import ClassNames
from redco_flow.spec.metric import AnyMetric, find_any_metric
from redco_flow.spec.model import known_keys
from redco_flow.spec.names import listed, nearest
from redco_flow.spec.recipe_settings import SETTINGS, settings_model

MetricSettings = dict[str, dict[str, bool | int | float | str | list[str] | None]]
"""The settings of each metric, by the metric's name."""


def check_metric_settings(settings: MetricSettings, metrics: list[str]) -> None:
    """Refuse settings that no metric in use has.

    Args:
        metrics: the names of the metrics in use.

    Raises:
        ValueError: the first problem: a metric that is not in use or has no settings, an unknown
            key, or a value of a wrong type.
    """
    for name, values in settings.items():
        if name not in metrics:
            raise ValueError(
                f"names '{name}', which is not among the metrics in use{nearest(name, metrics)} "
                f"Metrics in use: {listed(metrics)}."
            )
        _validated(name, find_any_metric(name), values)


def configured_metric(
    name: str, settings: MetricSettings, classes: ClassNames | None = None
) -> AnyMetric:
    """Return the metric of this name, whose functions use its settings and the data's classes.

    Raises:
        ValueError: there is no such metric, or it cannot use its settings with these classes.
    """
    metric = find_any_metric(name)
    bound: dict[str, Any] = {"classes": classes}
    if hasattr(metric, SETTINGS):
        bound["settings"] = _validated(name, metric, settings.get(name, {}))
    check = getattr(metric, "check_settings", None)
    if check is not None:
        check(**_taken_by(check, bound))
    names = {key: one for key, one in vars(metric).items() if not key.startswith("_")}
    functions = {
        key: partial(one, **_taken_by(one, bound))
        for key, one in names.items()
        if inspect.isfunction(one)
    }
    return cast("AnyMetric", SimpleNamespace(**{**names, **functions}))


def described_settings(metric: AnyMetric) -> dict[str, Any]:
    """Return the settings that a configured metric computes with, as JSON; empty without any."""
    describe: Callable[[], dict[str, Any]] | None = getattr(metric, "describe_settings", None)
    return describe() if describe is not None else {}


def warnings_of(metric: AnyMetric, references: Any) -> list[str]:
    """Return why a metric's scores of texts with these references may mean little."""
    find: Callable[[Any], list[str]] | None = getattr(metric, "find_warnings", None)
    if find is None or not all(isinstance(one, str) for texts in references for one in texts):
        return []  # what is not a text is refused when it is scored
    return find(references)


def _taken_by(function: Callable[..., Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {key: value for key, value in bound.items() if key in parameters}


def _validated(name: str, metric: AnyMetric, values: Mapping[str, Any]) -> Any:
    own = getattr(metric, SETTINGS, None)
    if own is None:
        raise ValueError(f"names '{name}', which is a metric without settings")
    model = settings_model(own)
    try:
        checked = model.model_validate(dict(values))
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"])) or SETTINGS
        known = sorted(known_keys(model, ()) or ())
        if detail["type"] == "extra_forbidden":
            hint = f"{nearest(key, known)} Known keys: {listed(known)}."
            raise ValueError(f"the metric '{name}' has no setting '{key}'{hint}") from error
        reason = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ValueError(f"'{name}.{key}' must be {reason}, not {detail['input']!r}") from error
    return own(**checked.model_dump())
