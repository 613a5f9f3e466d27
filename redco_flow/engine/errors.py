"""Exceptions of the engine: children of `ValueError` that name what, where and what to do.

The engine is a library on its own, so these know no YAML files, no stages and no runs.
`TrainingStopped` is not an error, but it ends the same calls.
"""

from __future__ import annotations


class EngineError(ValueError):
    """Something the engine was given, or found on disk, cannot be used."""


class ShardingError(EngineError):
    """Parameters, rules and mesh do not fit each other; the message names path and shape."""


class CheckpointError(EngineError):
    """A checkpoint cannot be written, is damaged, or has another shape than was asked for."""


class DataError(EngineError):
    """Examples cannot be read or collated; the message names the rows."""


class NonFiniteLoss(EngineError):
    """The loss became NaN or infinite.

    Args:
        step: the optimizer step whose loss it was; nothing was saved at or after it.
        message: replaces the standard text.
    """

    def __init__(self, step: int, message: str | None = None) -> None:
        self.step = step
        super().__init__(
            message
            or f"the loss at step {step} is not finite; training stopped before any later "
            "checkpoint. Lower the learning rate, clip gradients (max_grad_norm), or look at the "
            "examples of that step."
        )


class TrainingStopped(EngineError):
    """Training was asked to stop and did, after saving what it had.

    Args:
        step: optimizer steps done.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"stopped on request after {step} steps")
