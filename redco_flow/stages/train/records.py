"""Write progress and metrics records of a training.

An evaluation is recorded when its checkpoint is committed, not before: a score always points at
parameters that are on the disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psutil

from redco_flow.engine.callbacks import Callback, GuardedLog, MetricLog, TensorBoardLog, WandbLog
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.records import digest_file
from redco_flow.runtime.context import StageContext, Stopped
from redco_flow.stages.common_stop import CommonStop
from redco_flow.stages.provenance import Provenance
from redco_flow.stages.train.config import Config
from redco_flow.tracking.goodput import START
from redco_flow.tracking.mlflow_server import FINGERPRINT_TAG, MlflowServer

COMMIT_FILE = "commit.json"


class TrainingRecords(Callback):
    """Write progress.json and metrics.jsonl while the engine trains.

    Args:
        first_step: where the training begins, if it resumes from no checkpoint.
    """

    def __init__(
        self,
        context: StageContext,
        checkpointer: Checkpointer,
        provenance: Provenance,
        *,
        first_step: int = 0,
    ) -> None:
        self._context = context
        self._checkpointer = checkpointer
        self._provenance = asdict(provenance)
        self._first_step = first_step
        self._pace: tuple[int, float] | None = None
        self._stop = CommonStop(context)
        self._record_what_is_resumed()
        self._record_start()

    def should_stop(self) -> bool:
        """Ask after each step; also the heartbeat between log records."""
        self._context.report(phase="training")
        return self._stop.requested()

    def on_log(self, record: dict[str, Any]) -> None:
        """Record a training loss."""
        self._context.report(
            phase="training",
            step=record["step"],
            total_steps=record["total_steps"],
            epoch=record["epoch"],
            loss=record["loss"],
            tokens_per_second=record.get("tokens_per_second"),
            seconds_left=self._seconds_left(record["step"], record["total_steps"]),
            tflops_per_device=record.get("tflops_per_device"),
            mfu=record.get("mfu"),
            peak_memory_bytes=record.get("peak_memory_bytes"),
            step_seconds=record.get("step_seconds"),
        )
        self._context.log_metrics({"kind": "training", **record, **self._provenance})

    def on_eval(self, record: dict[str, Any]) -> None:
        """Restart the clock: evaluations are no steps."""
        self._pace = None

    def on_save(self, step: int) -> None:
        """Let nothing be saved that was trained on damaged bytes: later attempts resume from it."""
        self._context.check_inputs()

    def on_checkpoint(self, record: dict[str, Any]) -> None:
        """Record the scores of a checkpoint that is committed."""
        if record["metrics"] is None:
            return
        self._record_scores(record["step"], record["epoch"], record["metrics"])

    def _record_start(self) -> None:
        """Say from which step this process goes on, and since when it runs."""
        started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
        self._context.log_metrics(
            {
                "kind": START,
                "start_step": self._checkpointer.latest() or self._first_step,
                "process_started_at": started.isoformat(timespec="milliseconds"),
                **self._provenance,
            }
        )

    def _record_what_is_resumed(self) -> None:
        """The scores of the checkpoint from which training resumes, for this attempt's readers."""
        step = self._checkpointer.latest()
        if step is not None and (metrics := self._checkpointer.commit(step).metrics):
            self._record_scores(step, None, dict(metrics), is_resumed=True)

    def _record_scores(
        self, step: int, epoch: float | None, metrics: dict[str, Any], **more: Any
    ) -> None:
        commit = self._checkpointer.step_directory(step) / COMMIT_FILE
        record = {"kind": "evaluation", "step": step, "epoch": epoch, "metrics": metrics, **more}
        self._context.log_metrics({**record, "checkpoint": digest_file(commit), **self._provenance})

    def _seconds_left(self, step: int, total_steps: int) -> float | None:
        """From the pace since the last evaluation; None before there is one."""
        now = time.monotonic()
        if self._pace is None:
            self._pace = (step, now)
            return None
        first_step, since = self._pace
        return (now - since) / (step - first_step) * (total_steps - step)


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


class MlflowLog(MetricLog):
    """A run on an MLflow server: one for all attempts of a training.

    Args:
        experiment: which it belongs to; made where there is none.
        name: of the run.
        fingerprint: of the training, by which a later attempt finds its run.
        settings: JSON that become its parameters; must hold no secret.
        tags: what else it is found by.

    Raises:
        MlflowError: there is no server, or it refuses.
    """

    def __init__(
        self,
        *,
        experiment: str,
        name: str,
        fingerprint: str,
        settings: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        self._server = MlflowServer.of(os.environ)
        self._run = self._server.find_run(fingerprint)
        if not self._run:
            group = self._server.experiment(experiment)
            known = {FINGERPRINT_TAG: fingerprint, **tags}
            self._run = self._server.create_run(group, name, settings, known)
        self._server.set_status(self._run, "RUNNING")

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Send numbers."""
        self._server.log(self._run, scalars, step)

    def close(self) -> None:
        """End the run: as failed where an error is on its way, killed where it is to be stopped."""
        ending = sys.exc_info()[1]
        status = "KILLED" if isinstance(ending, Stopped) else "FAILED" if ending else "FINISHED"
        self._server.set_status(self._run, status)


def _open(name: str, context: StageContext, config: Config) -> MetricLog:
    if name == "tensorboard":
        return TensorBoardLog(context.attempt_dir.path / TENSORBOARD_FOLDER)
    if name == "mlflow":
        pipeline = context.run.rpartition("-")[0]
        return MlflowLog(
            experiment=os.environ.get("MLFLOW_EXPERIMENT_NAME") or pipeline,
            name=f"{context.run}/{context.stage}",
            fingerprint=context.fingerprint,
            settings=config.model_dump(mode="json"),
            tags={"redco_flow.run": context.run, "redco_flow.stage": context.stage},
        )
    return WandbLog(
        name=f"{context.run}/{context.stage}",
        directory=context.attempt_dir.path,
        settings=config.model_dump(mode="json"),
    )
