"""The interface of a user's script to its stage; outside a stage it works on a folder.

`trainer.fit(examples, num_epochs=3, **script_context().fit_options())` is all that a script needs
for its metrics, checkpoints and resuming to be the stage's.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.records import digest_json
from redco_flow.runtime.context import StageContext
from redco_flow.stages.provenance import Provenance
from redco_flow.tracking.attempt import AttemptDirectory

if TYPE_CHECKING:
    from redco_flow.engine.checkpoint.checkpointer import Checkpointer
    from redco_flow.engine.checkpoint.directory import Mode
    from redco_flow.stages.common_stop import CommonStop

_FOLDER_BY_HAND = Path("out")
_ACTIVE: ContextVar[ScriptContext] = ContextVar("script_context")


def script_context() -> ScriptContext:
    """Return what the stage that runs this script gives it.

    A script that is started by hand writes to `out/` instead: metrics.jsonl, and the checkpoints of
    `python SCRIPT ARGUMENTS`, from which the same command goes on.
    """
    script = _ACTIVE.get(None)
    if script is None:
        script = _by_hand()
        until_exit = ExitStack()
        until_exit.enter_context(script.active())
        atexit.register(until_exit.close)
    return script


class ScriptContext:
    """The stage, as its script sees it; `script_context()` returns it.

    Args:
        context: the stage's.
        provenance: what every record of metrics names.
    """

    def __init__(self, context: StageContext, provenance: Provenance) -> None:
        self._context = context
        self._provenance = provenance
        self._opened = ExitStack()
        self._has_checkpointer = False
        self.found: dict[str, float] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Be what `script_context` returns; wait for the last checkpoint in the end.

        Raises:
            CheckpointError: it could not be written.
        """
        token = _ACTIVE.set(self)
        try:
            with self._opened:
                yield
        finally:
            _ACTIVE.reset(token)

    @property
    def work_dir(self) -> Path:
        """A folder of the stage's own, kept when it is tried again."""
        return self._context.work_dir

    def fit_options(
        self, *, keep_last: int = 1, keep_best: Mapping[str, Mode] | None = None
    ) -> dict[str, Any]:
        """Return arguments for `Trainer.fit`: checkpointer, callbacks, should_stop.

        With them a training saves at each epoch's end and evaluation, resumes from its newest
        checkpoint when the stage is retried, reports progress and metrics, and stops on
        request.

        Args:
            keep_last, keep_best: see `checkpointer`.

        Raises:
            ValueError: the script has a checkpointer already.
        """
        from redco_flow.stages.script.records import ScriptRecords

        checkpointer = self.checkpointer(keep_last=keep_last, keep_best=keep_best)
        records = ScriptRecords(self._context, checkpointer, self._provenance, self.found)
        return {
            "checkpointer": checkpointer,
            "callbacks": [records],
            "should_stop": self._should_stop,
        }

    def checkpointer(
        self, *, keep_last: int = 1, keep_best: Mapping[str, Mode] | None = None
    ) -> Checkpointer:
        """Open the stage's checkpoints, for a loop of one's own; closed when the script ends.

        Args:
            keep_last: how many of the newest stay; one more is kept to fall back to.
            keep_best: metric -> "max" or "min": the best by each stays too.

        Raises:
            ValueError: the script has a checkpointer already.
        """
        from redco_flow.engine.checkpoint.checkpointer import Checkpointer

        if self._has_checkpointer:
            raise ValueError(
                "a script has one checkpointer, and fit_options() opens it: a second training "
                "would resume from the first one's checkpoints. Save both states in one loop, or "
                "make two stages of them."
            )
        self._has_checkpointer = True
        return self._opened.enter_context(
            Checkpointer(
                self.work_dir / "checkpoints",
                keep_last=keep_last + 1,
                keep_best=keep_best,
                is_shared=self._context.shares_disk,
                while_waiting=self._context.report,
            )
        )

    def log(self, step: int, *, total_steps: int | None = None, **numbers: float) -> None:
        """Append numbers of a step to metrics.jsonl, and tell the progress.

        This is the stage's sign of life too: a script that is silent for the profile's
        `stall_timeout_minutes` is stopped.

        Args:
            numbers: by name; `loss` is drawn as one.
        """
        loss = numbers.get("loss")
        self._context.report(phase="training", step=step, total_steps=total_steps, loss=loss)
        record = {"kind": "training", "step": step, "total_steps": total_steps, **numbers}
        self._context.log_metrics({**record, **asdict(self._provenance)})
        self.found |= {name: float(value) for name, value in numbers.items()}

    def metrics(self, **numbers: float) -> None:
        """Say what the stage's metrics are, beside what was logged last."""
        self.found |= {name: float(value) for name, value in numbers.items()}

    def stop_if_asked(self) -> None:
        """End the script if the stage is to stop; for loops of one's own, after each save.

        Every process must call it as often as the others.

        Raises:
            Stopped: no `except Exception` catches it; the next attempt runs the script again.
        """
        self._stop.raise_if_requested()

    def _should_stop(self) -> bool:
        self._context.report(phase="training")
        return self._stop.requested()

    @cached_property
    def _stop(self) -> CommonStop:
        from redco_flow.stages.common_stop import CommonStop

        return CommonStop(self._context)


def _by_hand() -> ScriptContext:
    source = Path(sys.argv[0])
    text = source.read_text(errors="replace") if source.is_file() else ""
    command = digest_json([text, sys.argv[1:]])
    work_dir = _FOLDER_BY_HAND / command[:12]
    work_dir.mkdir(parents=True, exist_ok=True)
    context = StageContext(
        run="by hand",
        stage=source.stem,
        fingerprint=command,
        inputs={},
        work_dir=work_dir,
        attempt_dir=AttemptDirectory(work_dir),
    )
    return ScriptContext(context, Provenance("", ""))
