"""Stop all processes of a stage after the same step, by JAX's preemption sync point.

One process stops when it is asked to. Of several, JAX has taken SIGTERM, and they agree on a step.
"""

from __future__ import annotations

import jax
from jax.experimental import multihost_utils

from redco_flow.runtime.context import StageContext, Stopped


class CommonStop:
    """Asked after each step, by every process as often as by the others."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._num_asked = 0

    def requested(self) -> bool:
        """Tell whether all processes are to stop after this step."""
        self._num_asked += 1
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(self._num_asked))
        return self._context.stop_requested()

    def raise_if_requested(self) -> None:
        """Stop after this step if so asked; for stages with nothing to save.

        Raises:
            Stopped: in all processes.
        """
        if self.requested():
            raise Stopped(f"stage '{self._context.stage}' stopped as requested.")
