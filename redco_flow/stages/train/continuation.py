"""Continue another training's optimizer state, steps and position in the data.

Settings are compared in `sections`, shapes by the engine.
"""

from __future__ import annotations

import logging

from redco_flow.engine.continuation import Continuation, plan_continuation
from redco_flow.runtime.context import StageContext
from redco_flow.stages.artifacts.checkpoint import CHECKPOINT_FOLDER, CheckpointArtifact
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.data import TrainingData
from redco_flow.stages.train.scores import CannotTrain, early_stopping
from redco_flow.stages.train.sections import OPTIMIZER_STATE, continuation_problems

BATCHING = "batching"
"""The key of a checkpoint's metadata with the settings that its rows of examples depend on."""

logger = logging.getLogger(__name__)


def find_continuation(
    context: StageContext, config: Config, data: TrainingData
) -> Continuation | None:
    """Return the checkpoint that the training continues; None where it begins at step 0.

    Raises:
        CannotTrain: the checkpoint's optimizer state cannot be continued with these settings.
        CheckpointError: its commit is damaged.
    """
    if not config.continue_optimizer or not context.inputs.get("start_from"):
        return None
    start = context.input("start_from")
    problems = continuation_problems(config, start.metadata.get(OPTIMIZER_STATE))
    if problem := next(problems, None):
        raise CannotTrain(f"start_from is checkpoint {start.id[:12]}: {problem}.")
    found = plan_continuation(
        start.path / CHECKPOINT_FOLDER,
        data.sampler(config),
        other_rows=_other_rows(context, config, data),
    )
    step = found.commit.step
    if found.differences:
        logger.warning(
            "the training continues at step %d with the optimizer state of checkpoint %s; reading "
            "starts at the first batch: %s",
            step,
            start.id[:12],
            "; ".join(found.differences),
        )
    else:
        logger.info(
            "the training continues at step %d of checkpoint %s, with its optimizer state and "
            "position in the data",
            step,
            start.id[:12],
        )
    return found


def _other_rows(context: StageContext, config: Config, data: TrainingData) -> str:
    start = context.input("start_from")
    if CheckpointArtifact(start.path).record.data != context.input("dataset").id:
        return "other data"
    before, now = start.metadata.get(BATCHING), data.row_settings(config)
    return "" if before == now else f"batching: checkpoint {before!r}, now {now!r}"


def check_steps_left(continuation: Continuation, config: Config, total_steps: int) -> None:
    """Refuse a training that would end before its first step.

    Raises:
        CannotTrain: says what to change.
    """
    step = continuation.commit.step
    if step >= total_steps:
        raise CannotTrain(
            f"start_from is a checkpoint of step {step}, and these settings end at step "
            f"{total_steps}, counted from the first step on these data: increase num_epochs or "
            "max_steps. '@last' is the checkpoint that this stage published last."
        )
    stopping = early_stopping(config)
    if stopping is not None:
        stopping.restore(continuation.early_stopping)
        if stopping.is_due:
            raise CannotTrain(
                f"start_from is a checkpoint of step {step}, where early_stopping ended its "
                "training: increase early_stopping.patience, choose another metric, or remove "
                "early_stopping."
            )
