"""Callbacks of `Trainer.fit`, and writers for TensorBoard, Weights & Biases and MLflow.

Every process gets every call, and only plain numbers: nothing here can save or change a state.
TensorBoard and Weights & Biases are imported when their log is opened, and need their extra:
`redco-flow[tensorboard]` or `redco-flow[wandb]`.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

Record = dict[str, Any]

# What the trainer logs of a step in any case, or may.
LOGGED = (
    "step",
    "total_steps",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_skipped",
    "tokens_per_second",
    "step_seconds",
    "tflops_per_device",
    "mfu",
    "peak_memory_bytes",
    "steps_seconds",
    "evaluation_seconds",
    "checkpoints_seconds",
)


class Callback:
    """Override what you want to hear; each does nothing by default."""

    def on_log(self, record: Record) -> None:
        """Hear about training.

        `step`, `total_steps`, `epoch` (fraction of epochs done), `loss` (mean since the last
        record), `grad_norm` (of the last step, before clipping; absent where that step was
        skipped), `learning_rate` (that of the last step, where the trainer knows the schedule),
        `num_skipped` (steps of this call that changed nothing, where such are skipped),
        `tokens_per_second` (sum of weights over time, without evaluations and compilation; absent
        until there was a second step), `step_seconds` (the median time of the last 64 steps, absent
        as well), `tflops_per_device` (model TFLOP/s over the same time,
        padding counted; absent where they cannot be counted), `mfu` (their share of what the
        devices could compute in bfloat16; absent where that is not known), `peak_memory_bytes` (the
        most that one of this process' devices had in use since the process began; absent if
        devices do not report it), `steps_seconds`, `evaluation_seconds` and
        `checkpoints_seconds` (time since the last record, steps that compiled left
        out), and the mean of each measure that loss_fn returns, by its name.
        """

    def on_eval(self, record: Record) -> None:
        """Hear about an evaluation: `step`, `epoch`, `seconds`, and its metrics."""

    def on_save(self, step: int) -> None:
        """Hear that a checkpoint is about to be written; an error keeps it from being written."""

    def on_checkpoint(self, record: Record) -> None:
        """Hear that a checkpoint was committed: `step`, `epoch`, `metrics`.

        Called with a log record, before the next save or at the end, whichever comes first; the
        checkpoint is on the disk then.
        """


logger = logging.getLogger(__name__)

_NO_SCALARS = ("step", "total_steps", "metrics")


class MetricLog(ABC):
    """A destination of scalars by name and step."""

    @abstractmethod
    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Take numbers of one step, by names such as `train/loss`."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is left."""


class TensorBoardLog(MetricLog):
    """A TensorBoard event file.

    Args:
        directory: of the event file; a run of its own in TensorBoard.

    Raises:
        ImportError: `redco-flow[tensorboard]` is not installed.
    """

    def __init__(self, directory: Path) -> None:
        tensorboard = _import("tensorboardX", extra="tensorboard")
        self._writer = tensorboard.SummaryWriter(str(directory))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Add to the event file, and flush it: a training may end at any time."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbLog(MetricLog):
    """A run of Weights & Biases.

    Args:
        name: of the run.
        directory: where its files go.
        settings: JSON shown beside it; must hold no secret.

    Raises:
        ImportError: `redco-flow[wandb]` is not installed.
    """

    def __init__(self, *, name: str, directory: Path, settings: Mapping[str, Any]) -> None:
        wandb = _import("wandb", extra="wandb")
        # Standard output is the caller's, not to be wrapped.
        how = wandb.Settings(console="off")
        self._run = wandb.init(name=name, dir=str(directory), config=dict(settings), settings=how)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send numbers, or keep them in the run's files where W&B is offline."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


@final
class GuardedLog(Callback):
    """Passes records on to a log that may fail: it is warned of once, and asked no more.

    Args:
        name: of the log in the warning.
        open_log: opens it; called at once.
    """

    def __init__(self, name: str, open_log: Callable[[], MetricLog]) -> None:
        self._name = name
        self._log: MetricLog | None = None
        self._guarded(lambda: setattr(self, "_log", open_log()))

    def on_log(self, record: Record) -> None:
        """Pass on a training record as `train/…`."""
        self._write("train", record)

    def on_eval(self, record: Record) -> None:
        """Pass on an evaluation on the validation rows as `val/…`."""
        self._write("val", record)

    def close(self) -> None:
        """Close the log."""
        log, self._log = self._log, None
        if log is not None:
            self._guarded(log.close)

    def _write(self, group: str, record: Record) -> None:
        log = self._log
        if log is None:
            return
        scalars = {
            f"{group}/{name}": float(value)
            for name, value in record.items()
            if name not in _NO_SCALARS and isinstance(value, int | float)
        }
        self._guarded(lambda: log.write(scalars, int(record["step"])))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a log does, the training goes on
            self._log = None
            logger.warning(
                "no more is logged to %s, for it failed: %s: %s",
                self._name, type(error).__name__, error,
            )  # fmt: skip


def _import(module: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; install redco-flow[{extra}].") from error
