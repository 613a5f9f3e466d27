"""Metrics records of a script stage, in the form of a train stage's."""

from __future__ import annotations

from typing import Any

from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.runtime.context import StageContext
from redco_flow.stages.provenance import Provenance
from redco_flow.stages.train.records import TrainingRecords

_NO_METRICS = ("step", "epoch", "seconds")


class ScriptRecords(TrainingRecords):
    """Records of `Trainer.fit` in a script.

    Args:
        found: the stage's metrics by name; takes the newest loss and the newest evaluation.
    """

    def __init__(
        self,
        context: StageContext,
        checkpointer: Checkpointer,
        provenance: Provenance,
        found: dict[str, float],
    ) -> None:
        super().__init__(context, checkpointer, provenance)
        self._found = found
        step = checkpointer.latest()
        scores = {} if step is None else checkpointer.commit(step).metrics
        found |= {name: value for name, value in scores.items() if value is not None}

    def on_log(self, record: dict[str, Any]) -> None:
        """Record a training loss."""
        super().on_log(record)
        self._found["loss"] = record["loss"]

    def on_eval(self, record: dict[str, Any]) -> None:
        """Keep the scores; they are recorded with their checkpoint."""
        super().on_eval(record)
        self._found |= {name: v for name, v in record.items() if name not in _NO_METRICS}
