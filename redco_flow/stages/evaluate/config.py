"""The settings of evaluate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redco_flow.local_paths import is_file
from redco_flow.metrics.settings import MetricSettings, check_metric_settings
from redco_flow.spec.metric import AnswersMetric, find_any_metric, metric_module
from redco_flow.spec.model import (
    DataFile,
    OnlyWhereSet,
    Placement,
    PositiveFloat,
    PositiveInt,
    Regex,
    StrictModel,
    Texts,
)
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.tracking.code_digest import read_script

INPUTS = {"predictions": InputSlot(kind="predictions")}
OUTPUTS = {"metrics": "metrics"}


class JudgeSection(StrictModel):
    """The judge of answers, for `pass_at_k` and `majority_at_k`.

    Args:
        k: of how many answers each of these metrics is to tell: `k: [1, 10]` gives `pass@1` and
            `pass@10`.
        extract: a regular expression whose last match in a text is the answer: its first group, or
            all of it where it has none. A text without a match has no answer. None: the whole text.
        compare: an answer is right that equals a reference as a text, white space aside, or as a
            number. A reference is searched for `extract`, too.
        program: a program that judges, instead: a Python file (`.py`) or any other executable. It
            gets JSON with `prompt`, `answer`, `text`, `references`, `row` and `proof` on standard
            input. Where the answer is right, it prints `proof` as its last line on standard output
            and ends with exit code 0.
        timeout_seconds: for the program and for `extract`, for each answer; what takes longer is
            not right.
        memory_mib: of each of the program's processes.
        num_workers: answers judged at once; None: one for each core.
    """

    k: list[PositiveInt] = Field(default_factory=lambda: [1], min_length=1)
    extract: Regex | None = None
    compare: Literal["text", "number"] = "text"
    program: DataFile | None = None
    timeout_seconds: PositiveFloat = 10.0
    memory_mib: PositiveInt = 1024
    num_workers: Annotated[PositiveInt | None, Placement()] = None

    @field_validator("k")
    @classmethod
    def _each_once(cls, k: list[int]) -> list[int]:
        if len(set(k)) < len(k):
            raise ValueError("names a number twice")
        return k

    @model_validator(mode="after")
    def _rule_or_program(self) -> JudgeSection:
        useless = ["compare"] if self.program else ["memory_mib"]
        if not self.program and not self.extract:
            useless += ["timeout_seconds", "num_workers"]
        given = [
            name for name in useless if getattr(self, name) != type(self).model_fields[name].default
        ]
        if given:
            why = "a program compares by itself" if self.program else "there is no 'program'"
            raise ValueError(f"{', '.join(given)} would change nothing: {why}")
        return self


class Config(StageConfig):
    """Evaluation.

    Args:
        metrics: names of metrics of this package, or dotted modules.
        metric_settings: by metric: settings such as `{bleu: {tokenize: zh}}`.
        judge: what finds answers right or wrong, where a metric is of several answers to each
            prompt (`pass_at_k`, `majority_at_k`).
    """

    metrics: Texts = Field(default_factory=lambda: ["rouge"], min_length=1)
    metric_settings: Annotated[MetricSettings, OnlyWhereSet()] = Field(default_factory=dict)
    judge: Annotated[JudgeSection | None, OnlyWhereSet()] = None

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            find_any_metric(name)
        if len(set(metrics)) < len(metrics):
            raise ValueError("names a metric twice")
        return metrics

    @field_validator("metric_settings")
    @classmethod
    def _settings_of_the_metrics(
        cls, settings: MetricSettings, info: ValidationInfo
    ) -> MetricSettings:
        if "metrics" in info.data:
            check_metric_settings(settings, info.data["metrics"])
        return settings

    @field_validator("judge")
    @classmethod
    def _judges_for_a_metric(
        cls, judge: JudgeSection | None, info: ValidationInfo
    ) -> JudgeSection | None:
        if "metrics" not in info.data:
            return judge  # a mistake in them is reported separately
        judged = [one for one in info.data["metrics"] if _is_of_answers(one)]
        if judged and judge is None:
            raise ValueError(
                f"is needed for {', '.join(judged)}: it says which answers are right, such as "
                "'judge: {k: [1, 4], compare: number}'"
            )
        if judge is not None and not judged:
            raise ValueError("is for metrics of several answers: pass_at_k, majority_at_k")
        return judge


def _is_of_answers(name: str) -> bool:
    return isinstance(find_any_metric(name), AnswersMetric)


def code_modules(config: Config) -> list[str]:
    """The metrics, and what a judge that is a Python file imports that is not installed."""
    metrics = [metric_module(name) for name in config.metrics]
    script = _script(config)
    return [*metrics, *(read_script(script).modules if script is not None else ())]


def code_files(config: Config) -> Mapping[str, Path]:
    """Return a judge that is a Python file, and the modules beside it."""
    script = _script(config)
    return read_script(script).files if script is not None else {}


def data_files(config: Config) -> list[Path]:
    """Return the judge's program."""
    judge = config.judge
    return [Path(judge.program)] if judge is not None and judge.program is not None else []


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what keeps the judge's program from starting."""
    for path in data_files(config):
        if not is_file(path):
            continue  # reported already
        if path.suffix != ".py":
            if not os.access(path, os.X_OK):
                yield ("judge", "program"), f"{path} is neither a .py file nor executable"
            continue
        try:
            compile(path.read_bytes(), str(path), "exec")
        except SyntaxError as error:
            yield ("judge", "program"), f"is not Python, at {path}:{error.lineno}: {error.msg}"
            continue
        files = [path, *read_script(path).files.values()]
        if not any(b"proof" in file.read_bytes() for file in files):
            message = (
                f"{path} never uses the question's 'proof': a judge prints it as its last line "
                "where the answer is right, because exit code 0 alone does not show that the tests "
                "ran to their end"
            )
            yield ("judge", "program"), message


def _script(config: Config) -> Path | None:
    paths = [path for path in data_files(config) if path.suffix == ".py" and is_file(path)]
    return paths[0] if paths else None
