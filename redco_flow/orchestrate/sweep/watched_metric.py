"""Check which metric a sweep watches, to stop trainings early or to choose points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from redco_flow.errors import UsageError
from redco_flow.orchestrate.run.ingredients import Sources
from redco_flow.orchestrate.sweep.planned_jobs import work_keys
from redco_flow.orchestrate.sweep.successive_halving import Mode, SuccessiveHalving
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.names import listed, nearest
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class WatchedMetric:
    """A metric that the trainings of a sweep log.

    Args:
        stage: which trains.
        metric: its name there, such as `val/eval_loss`.
        mode: whether less or more of it is better.
    """

    stage: str
    metric: str
    mode: Mode


def read_early_stopping(
    text: str,
    pipelines: Sequence[ResolvedPipeline],
    workspace: Workspace,
    *,
    mode: Mode | None,
    min_steps: int,
    reduction_factor: int,
) -> SuccessiveHalving:
    """Return the settings by which the trainings of a sweep are stopped.

    Args:
        text, pipelines, mode: as of `read_watched_metric`.
        min_steps: 0 where the user has given none.

    Raises:
        UsageError: as of `read_watched_metric`; or there are fewer than two points.
    """
    if len(pipelines) < 2:
        raise UsageError(
            "--stop-early compares points, and this sweep has one: give it more values."
        )
    if not min_steps:
        raise UsageError(
            "--stop-early needs --min-steps N: the optimizer steps after which points are first "
            "compared, at least one evaluation."
        )
    watched = read_watched_metric("--stop-early", text, pipelines, workspace, mode=mode)
    return SuccessiveHalving(
        **asdict(watched), min_steps=min_steps, reduction_factor=reduction_factor
    )


def read_watched_metric(
    option: str,
    text: str,
    pipelines: Sequence[ResolvedPipeline],
    workspace: Workspace,
    *,
    mode: Mode | None,
) -> WatchedMetric:
    """Return the metric that an option of the command line names.

    Args:
        text: `METRIC` or `STAGE/METRIC`, with the metric's name in `status`.
        pipelines: of the points.
        mode: which of two values is better; None where the metric's stage declares it.

    Raises:
        UsageError: no such stage or metric, it is not known which of two values is better, or two
            points share one training.
    """
    logged = _logged(pipelines[0])
    stage, metric = _split(option, text, logged)
    for pipeline in pipelines:
        known = _logged(pipeline).get(stage, {})
        if known is not None and metric not in known:
            raise UsageError(
                f"{option} {text}: stage '{stage}' logs no metric '{metric}' while it "
                f"trains{nearest(metric, known)} It logs: {listed(known)}."
            )
    declared = (logged[stage] or {}).get(metric)
    if declared is None and mode is None:
        raise UsageError(
            f"{option} {text}: it is not known whether more is better: add --mode min or "
            f"--mode max."
        )
    if declared is not None and mode not in (None, declared):
        raise UsageError(
            f"{option} {text}: {'less' if declared == 'min' else 'more'} of it is better; leave "
            f"out --mode {mode}."
        )
    _refuse_shared(option, stage, pipelines, workspace)
    better: Mode = "max" if (mode or declared) == "max" else "min"
    return WatchedMetric(stage, metric, better)


def _logged(pipeline: ResolvedPipeline) -> dict[str, Mapping[str, str] | None]:
    """Return the metrics that each stage logs while it trains; without stages that log none."""
    found = {
        name: find_stage_kind(stage.kind).logged_metrics(stage.config)
        for name, stage in pipeline.stages.items()
    }
    return {name: metrics for name, metrics in found.items() if metrics is None or metrics}


def _split(option: str, text: str, logged: Mapping[str, object]) -> tuple[str, str]:
    """Return the stage and the metric's name in it."""
    stage, _, metric = text.partition("/")
    if stage in logged and metric:
        return stage, metric
    if len(logged) == 1:
        return next(iter(logged)), text
    found = f"the stages that do are {listed(logged)}" if logged else "no stage does"
    raise UsageError(
        f"{option} {text}: name a stage that logs metrics while it trains, as STAGE/METRIC; "
        f"{found}."
    )


def _refuse_shared(
    option: str, stage: str, pipelines: Sequence[ResolvedPipeline], workspace: Workspace
) -> None:
    """Raise where two points have one training: it has one end and one score for both."""
    sources = Sources()
    keys = [work_keys(pipeline, workspace, sources)[stage] for pipeline in pipelines]
    if len(set(keys)) < len(keys):
        raise UsageError(
            f"{option}: several points of this sweep share one training of stage '{stage}': "
            f"leave out the settings of other stages, and sweep over them afterwards."
        )
