"""Losses and scores to TensorBoard and to Weights & Biases, beside the run's own records.

A log is no result: what fails here is warned of once, and the training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from redco_flow.engine.callbacks import Callback
from redco_flow.engine.metric_logs import GuardedLog, MetricLog, TensorBoardLog, WandbLog
from redco_flow.stages.context import StageContext
from redco_flow.stages.train import Config

TENSORBOARD_FOLDER = "tensorboard"


@contextmanager
def open_logs(context: StageContext, config: Config) -> Iterator[list[Callback]]:
    """Yield a callback for each of `config.log_to`; none but in rank 0."""
    with ExitStack() as stack:
        names = config.log_to if context.attempt_dir.rank == 0 else []
        logs = [GuardedLog(name, partial(_open, name, context, config)) for name in names]
        for log in logs:
            stack.callback(log.close)
        yield list(logs)


def _open(name: str, context: StageContext, config: Config) -> MetricLog:
    if name == "tensorboard":
        return TensorBoardLog(context.attempt_dir.path / TENSORBOARD_FOLDER)
    return WandbLog(
        name=f"{context.run}/{context.stage}",
        directory=context.attempt_dir.path,
        settings=config.model_dump(mode="json"),
    )
