"""harness: a checkpoint in, the scores of lm-eval's tasks out, of each question too."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
from lm_eval.tasks import TaskManager

from redco_flow.errors import RedcoFlowError
from redco_flow.records import digest_json, write_json, write_json_lines
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.runtime.process_group import describe_devices
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.common_stop import CommonStop
from redco_flow.stages.harness.config import Config
from redco_flow.stages.harness.language_model import HarnessModel
from redco_flow.stages.provenance import provenance_of
from redco_flow.tracking.metrics_artifact import (
    HARNESS_FILE,
    MetricsSummary,
    is_mean,
    write_metrics,
)

SAMPLES_FILE = "samples.jsonl"


class CannotEvaluateTasks(RedcoFlowError):
    """lm-eval knows no such task, or a task failed."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Ask the checkpoint what the tasks ask, and keep every answer.

    Raises:
        CannotEvaluateTasks: a task is unknown, cannot be read, or its data are not there.
        CannotAsk: the checkpoint's recipe cannot answer it.
    """
    context.report(phase="preparing", devices=describe_devices())
    tasks = load_tasks(config)
    stop = CommonStop(context)

    def on_progress(phase: str, done: int, total: int) -> None:
        context.report(phase=phase, step=done, total_steps=total)
        stop.raise_if_requested()

    checkpoint = CheckpointArtifact(context.input("checkpoint").path)
    model = HarnessModel(checkpoint, config, on_progress)
    found = _evaluate(model, tasks, config)
    lines = list(_lines(found["samples"], found["results"], config))
    summary = _summary(context, config, checkpoint, found, lines)
    folder = context.work_dir / "metrics"
    if context.attempt_dir.rank == 0:  # every process has all answers
        _write(folder, summary, lines, found)
    record = {"kind": "evaluation", "step": summary.step, "metrics": summary.metrics}
    digests = {"checkpoint": summary.checkpoint, "data": summary.data, "config": summary.config}
    context.log_metrics(record | digests)
    output = Output("metrics", folder, summary.to_json())
    return StageOutputs({"metrics": output}, dict(summary.metrics))


def load_tasks(config: Config) -> dict[str, Any]:
    """Return lm-eval's tasks; its own ones, thousands of files, are read where one is not ours."""
    # What a task has drawn is in that cache without the seed.
    datasets.disable_caching()
    _seed_generators(config)
    folder = config.tasks_folder
    manager = TaskManager(include_path=folder, include_defaults=False)
    if any(name not in manager.all_tasks for name in config.tasks):
        manager = TaskManager(include_path=folder)
    unknown = [name for name in config.tasks if not manager.match_tasks([name])]
    if unknown:
        where = f"neither in {folder} nor among" if folder else "not among"
        raise CannotEvaluateTasks(
            f"{', '.join(unknown)}: {where} the tasks of lm-eval {lm_eval.__version__}; "
            "`lm-eval ls tasks` lists those."
        )
    with contextlib.chdir(folder) if folder else contextlib.nullcontext(), _told("read"):
        tasks = dict(manager.load(config.tasks))
        for task in tasks["tasks"].values():
            _process_once(task, config)
    return tasks


def _process_once(task: Any, config: Config) -> None:
    """Let a task process each of its splits once, with seeded generators.

    lm-eval calls `process_docs`, which may shuffle answers, whenever it reads a split: to ask, and
    again to score.
    """

    @cache
    def processed(process: Callable[[Any], Any], split: Any) -> Any:
        _seed_generators(config)
        return process(split)

    configs: tuple[Any, ...] = (task.config, getattr(task, "fewshot_cfg", None))
    processing = [one for one in configs if getattr(one, "process_docs", None) is not None]
    for one in processing:
        one.process_docs = wraps(one.process_docs)(partial(processed, one.process_docs))
    if processing and hasattr(task, "sampler"):
        task.sampler.replace_df(list(task.fewshot_docs()))


def _seed_generators(config: Config) -> None:
    """Seed Python's and NumPy's global generators, which some tasks draw from."""
    random.seed(config.seed)
    np.random.seed(config.seed)


def _evaluate(model: HarnessModel, tasks: dict[str, Any], config: Config) -> dict[str, Any]:
    _seed_generators(config)
    for task in tasks["tasks"].values():
        _set_fewshot(task, config)
    with _told("evaluated"):
        found = lm_eval.evaluate(
            lm=model,
            task_dict=tasks,
            limit=config.num_examples,
            bootstrap_iters=config.bootstrap_iters,
            log_samples=True,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template,  # lm-eval's own default
            system_instruction=config.system_instruction,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        )
    return dict(found)


def _set_fewshot(task: Any, config: Config) -> None:
    """Do what `lm_eval.simple_evaluate` does: a task that says 0 stays without examples."""
    said = task.get_config("num_fewshot")
    if config.num_fewshot is not None and said != 0:
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    elif said is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=config.seed)


@contextlib.contextmanager
def _told(verb: str) -> Iterator[None]:
    """Say that lm-eval failed, and how; our own errors are passed on unchanged."""
    try:
        yield
    except RedcoFlowError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CannotEvaluateTasks(f"the tasks could not be {verb}: {reason}") from error


def _summary(
    context: StageContext,
    config: Config,
    checkpoint: CheckpointArtifact,
    found: Mapping[str, Any],
    lines: list[dict[str, Any]],
) -> MetricsSummary:
    examples = digest_json([[line["row_id"], line["digest"]] for line in lines])
    provenance = provenance_of(context, config, data=examples)
    metrics, directions = _scores(found)
    return MetricsSummary(
        metrics=metrics,
        directions=directions,
        modules=[],
        baselines={},
        num_examples=len(lines),
        split="test",
        step=checkpoint.record.step,
        predictions="",
        checkpoint=context.input("checkpoint").id,
        data=provenance.data,
        config=provenance.config,
        examples_digest=examples,
    )


def _scores(found: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return lm-eval's own numbers by `task/metric`, and which way is better."""
    metrics: dict[str, float] = {}
    directions: dict[str, str] = {}
    for task, scores in {**found["results"], **found.get("groups", {})}.items():
        higher = found.get("higher_is_better", {}).get(task, {})
        for name, value in scores.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_finite(value):
                continue
            key = f"{task}/{metric}" + ("" if chosen == "none" else f",{chosen}")
            metrics[key] = float(value)
            directions[key] = "min" if higher.get(metric) is False else "max"
    return metrics, directions


Samples = Mapping[str, list[Mapping[str, Any]]]


def _lines(
    samples: Samples, results: Mapping[str, Any], config: Config
) -> Iterator[dict[str, Any]]:
    """Yield a line per question of a task, in their order: what it scored by each metric.

    Its digest has the prompt, but for one that the model's own chat template has rendered.
    """
    hashes = ("doc_hash", "target_hash", *([] if config.apply_chat_template else ["prompt_hash"]))
    for task in sorted(samples):
        kept = set(_means(samples[task], results[task]))
        for sample in sorted(samples[task], key=lambda one: (one["doc_id"], one["filter"])):
            chosen = "" if sample["filter"] == "none" else f",{sample['filter']}"
            yield {
                "row_id": f"{task}/{sample['doc_id']}{chosen}",
                "digest": digest_json([sample[name] for name in hashes]),
                "scores": {
                    f"{task}/{metric}{chosen}": float(sample[metric])
                    for metric in sample["metrics"]
                    if f"{metric},{sample['filter']}" in kept
                },
                "statistics": {},
            }


def _means(samples: list[Mapping[str, Any]], scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield the scores of a task that are the mean of its questions'.

    Of the perplexity of an answer, say, lm-eval records the log-likelihood for each question.
    """
    values = defaultdict(list)
    for sample in samples:
        for metric in sample["metrics"]:
            values[f"{metric},{sample['filter']}"].append(sample[metric])
    for name, found in values.items():
        if all(map(_is_finite, found)) and is_mean(scores.get(name, math.nan), found):
            yield name


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _write(
    folder: Path,
    summary: MetricsSummary,
    lines: list[dict[str, Any]],
    found: Mapping[str, Any],
) -> None:
    write_metrics(folder, summary, lines)
    answers = (one for task in sorted(found["samples"]) for one in found["samples"][task])
    write_json_lines(folder / SAMPLES_FILE, answers, default=str)
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "configs")
    said = {key: found[key] for key in kept if key in found}
    record = {"lm_eval": lm_eval.__version__, **json.loads(json.dumps(said, default=str))}
    write_json(folder / HARNESS_FILE, record)
