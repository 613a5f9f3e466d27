"""The interface of a stage's `run`: its inputs, work directory and reports, and its outputs.

Writes progress.json and metrics.jsonl of the attempt, and passes on requests to stop.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from redco_flow.errors import ArtifactError, WorkspaceError
from redco_flow.launch.redaction import redact_record
from redco_flow.records import append_json_line, open_no_link
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import LASTING, AttemptDirectory, StageProgress
from redco_flow.tracking.process_identity import utc_now

if TYPE_CHECKING:
    from redco_flow.tracking.results import StageResult
    from redco_flow.tracking.workspace import Workspace

_SECONDS_BETWEEN_REPORTS = 0.5


class Stopped(BaseException):
    """The stage was asked to stop and did so early; what it saved is in its work directory.

    Not an `Exception`, so that a library's `except Exception` cannot swallow the request.
    """


class InputDamaged(ArtifactError):
    """An input is not what was published; nothing was published that was made from it."""


@dataclass(frozen=True)
class Shard:
    """One of the parts that a stage's work is cut into; by default all of it."""

    index: int = 0
    count: int = 1

    def has(self, block: int) -> bool:
        """Tell whether a block of the work is this shard's."""
        return block % self.count == self.index


@dataclass(frozen=True)
class InputArtifact:
    """One artifact that a stage takes in.

    Args:
        id: SHA-256 of its content.
        kind: dataset, checkpoint, predictions or metrics.
        path: the directory with its files; read only.
        manifest: its manifest.json: files, metadata, parents, produced_by.
    """

    id: str
    kind: str
    path: Path
    manifest: Mapping[str, Any]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata from the stage that made it."""
        metadata: Mapping[str, Any] = self.manifest.get("metadata", {})
        return metadata


@dataclass(frozen=True)
class Output:
    """One artifact to publish.

    Args:
        kind: dataset, checkpoint, predictions or metrics.
        path: a file or a directory; its files are linked or copied, never moved.
        metadata: JSON for the artifact's manifest; not part of its identity.
        digests: BLAKE3 by relative path where they are known already, to spare a second read.
        identity: name to digest of all that the artifact's id follows; None: its files.
    """

    kind: str
    path: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] | None = None
    identity: Mapping[str, str] | None = None


@dataclass(frozen=True)
class StageOutputs:
    """The result of `run`: outputs by name ("dataset", "checkpoint/last", ...), finite metrics."""

    outputs: Mapping[str, Output]
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class FinishedStage:
    """A stage whose result stands, for a kind's `conclude`.

    Args:
        pipeline: its name.
        run: the id of the run that has the result, computed or reused.
    """

    workspace: Workspace
    pipeline: str
    run: str
    result: StageResult


class StopFlag:
    """A request to stop: plain attributes, so that a signal handler may set it at any moment."""

    def __init__(self) -> None:
        self.requested = False
        self.is_watched = False


@dataclass
class StageContext:
    """The context in which a stage runs.

    Args:
        run: the run's id.
        stage: the stage's name in the pipeline.
        fingerprint: what determines the stage's result.
        inputs: artifacts by input slot.
        work_dir: the stage's own directory, kept over attempts and runs of this fingerprint.
        attempt_dir: where this attempt's progress and metrics are written.
        shares_disk: whether all processes of the stage see the work directory.
        node_directory: on this node's own disk, to which checkpoints go first; None: they do not.
        provenance: recorded in the outputs' `produced_by`.
        stop: set by what runs the stage.
        verify_inputs: set by what runs the stage; raises where an input is damaged.
    """

    run: str
    stage: str
    fingerprint: str
    inputs: Mapping[str, tuple[InputArtifact, ...]]
    work_dir: Path
    attempt_dir: AttemptDirectory
    shares_disk: bool = True
    node_directory: Path | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    stop: StopFlag = field(default_factory=StopFlag)
    verify_inputs: Callable[[], None] = field(default=lambda: None, repr=False)
    _progress: dict[str, Any] = field(
        default_factory=lambda: dict.fromkeys(StageProgress.__annotations__), init=False, repr=False
    )
    _written_at: float = field(default=-math.inf, init=False, repr=False)
    _is_pending: bool = field(default=False, init=False, repr=False)

    def input(self, slot: str) -> InputArtifact:
        """Return the one artifact in `slot`.

        Raises:
            ArtifactError: the slot is unknown, empty, or holds several.
        """
        artifacts = self.inputs.get(slot, ())
        if len(artifacts) != 1:
            raise ArtifactError(
                f"stage '{self.stage}': input '{slot}' holds {len(artifacts)} artifacts, not one; "
                f"inputs: { {name: len(held) for name, held in self.inputs.items()} }."
            )
        return artifacts[0]

    def check_inputs(self) -> None:
        """Verify that the inputs are still the published ones.

        Call it before keeping anything in the work directory from which a later attempt resumes;
        the worker calls it before and after the stage. Costs a stat of each file.

        Raises:
            ArtifactError: an input was damaged after the stage began.
        """
        self.verify_inputs()

    def holder(self) -> dict[str, Any]:
        """Return what a lock's file says of who holds it."""
        return {
            "run": self.run,
            "stage": self.stage,
            "attempt": self.attempt_dir.whole.path.name,
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "since": utc_now(),
        }

    def report(self, **said: Unpack[StageProgress]) -> None:
        """Write the stage's progress, which is also its heartbeat: call it every few minutes.

        What is not given keeps its last value within a phase, and `devices`, `parameters`,
        `warning`, `tflops_per_device`, `mfu`, `peak_memory_bytes` and `step_seconds` in all phases.
        Cheap: written at most twice a second, at once when the phase changes; `flush` writes what
        was held back.

        Args:
            said: these, `phase`, `step`, `total_steps`, `epoch`, `loss`, `tokens_per_second`,
                `seconds_left`.

        Raises:
            TypeError: there is no such key.
        """
        if unknown := said.keys() - StageProgress.__annotations__:
            raise TypeError(f"progress has no {', '.join(sorted(unknown))}")
        given = {name: _plain(value) for name, value in said.items() if value is not None}
        is_new_phase = given.get("phase", self._progress["phase"]) != self._progress["phase"]
        if is_new_phase:
            given = {name: self._progress[name] for name in LASTING} | given
            self._progress = dict.fromkeys(self._progress)
        self._progress.update(given)
        self._is_pending = True
        if is_new_phase or time.monotonic() - self._written_at >= _SECONDS_BETWEEN_REPORTS:
            self.flush()

    @property
    def devices(self) -> str | None:
        """The devices that the stage reported."""
        devices: str | None = self._progress["devices"]
        return devices

    @property
    def progress(self) -> dict[str, Any]:
        """The last report as a ProgressRecord, without secrets."""
        return self._redacted(self._progress) | {"time": utc_now()}

    def flush(self) -> None:
        """Write the last report if it was held back."""
        if not self._is_pending:
            return
        record = self.progress
        path = self.attempt_dir.progress_path
        # Not durable on purpose: an fsync twice a second would cost the training loop percents.
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8", opener=open_no_link) as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            raise WorkspaceError(f"{path}: cannot write progress: {error.strerror}.") from error
        self._written_at = time.monotonic()
        self._is_pending = False

    def log_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl; `time` is added, NaN and infinity become null.

        Of several processes that run the stage together, rank 0 alone writes it.
        """
        if self.attempt_dir.rank > 0:
            return
        path = self.attempt_dir.metrics_path
        try:
            append_json_line(path, {"time": utc_now(), **self._redacted(_plain(record))})
        except OSError as error:
            raise WorkspaceError(f"{path}: cannot write metrics: {error.strerror}.") from error

    def _redacted(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record without secrets, as the log is written without them."""
        shown: dict[str, Any] = redact_record(record, secret_values(os.environ))
        return shown

    def stop_requested(self) -> bool:
        """Tell whether to save and raise `Stopped` soon.

        A stage that never asks is interrupted instead, by a `Stopped` raised wherever it is.
        """
        self.stop.is_watched = True
        return self.stop.requested

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if the stage is to stop: for stages with nothing to save.

        Raises:
            Stopped: a stop was requested.
        """
        if self.stop_requested():
            raise Stopped(f"stage '{self.stage}' stopped as requested.")


def _plain(value: Any) -> Any:
    """Turn array scalars into numbers and what JSON has no number for into None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
