"""What `Trainer.fit` tells its caller while it runs.

Every process gets every call, and only plain numbers: nothing here can save or change a state.
"""

from __future__ import annotations

from typing import Any

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
        until there was a second step), `tflops_per_device` (model TFLOP/s over the same time,
        padding counted; absent where they cannot be counted), `mfu` (their share of what the
        devices could compute in bfloat16; absent where that is not known), `peak_memory_bytes` (the
        most that one of this process' devices had in use since the process began; absent where
        devices do not tell), `steps_seconds`, `evaluation_seconds` and `checkpoints_seconds` (what
        these took since the last record, steps that compiled left out), and of each measure that
        loss_fn returns its mean since the last record, by its name.
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
