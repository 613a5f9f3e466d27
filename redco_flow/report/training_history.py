"""Read what a training logged, over all its attempts: its records, ascending by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redco_flow.report.charts import Point
from redco_flow.report.stage_facts import DAMAGED
from redco_flow.tracking.attempt import AttemptDirectory

Record = dict[str, Any]

# The fields of a step's record that are no measures of the loss function: LOGGED of the engine.
TRAINER_FIELDS = (
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


@dataclass
class History:
    """A training's records, ascending by step.

    Args:
        logged: of training: loss, learning_rate, grad_norm, tokens_per_second, how well devices
            are used, and the loss function's other measures.
        evaluations: eval_loss and the metrics that were measured during training.
        remarks: steps at which it resumed, damaged files.
    """

    logged: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was logged."""
        return not self.logged and not self.evaluations

    @property
    def evaluation_metrics(self) -> list[str]:
        """Metrics of evaluations without `eval_loss`, in the order of appearance."""
        names = _names_of_numbers(self.evaluations)
        return [name for name in names if name not in ("step", "epoch", "eval_loss")]

    @property
    def measures(self) -> list[str]:
        """Measures of the loss function without the loss, in the order of appearance."""
        return [name for name in _names_of_numbers(self.logged) if name not in TRAINER_FIELDS]

    def forget_after(self, step: float) -> None:
        """Forget what was logged beyond this step."""
        self.logged = [record for record in self.logged if record["step"] <= step]
        self.evaluations = [record for record in self.evaluations if record["step"] <= step]


def read_history(
    attempts: Sequence[AttemptDirectory],
    read: Callable[[AttemptDirectory], Iterable[Record]] = AttemptDirectory.read_metrics,
) -> History:
    """Return the records of a stage's attempts.

    Args:
        attempts: first to last; those that computed something else than the last one (the code
            was changed in between) are left out.
        read: returns an attempt's records.
    """
    history = History()
    fingerprints = [_fingerprint(attempt) for attempt in attempts]
    for attempt, fingerprint in zip(attempts, fingerprints, strict=True):
        if fingerprint == fingerprints[-1]:
            _add(history, attempt, *_read(attempt, read))
    return history


def points_of(records: Iterable[Record], key: str) -> list[Point]:
    """Return (step, value) of the records that have a finite value."""
    return [(record["step"], record[key]) for record in records if _is_number(record.get(key))]


def num_not_finite(records: Iterable[Record], key: str) -> int:
    """Return how many records have the key but no finite number (written as null)."""
    return sum(key in record and not _is_number(record[key]) for record in records)


def _add(history: History, attempt: AttemptDirectory, records: list[Record], remark: str) -> None:
    """Append an attempt's records from the step where it began."""
    if remark:
        history.remarks.append(remark)
    for index, of_one_start in enumerate(_split_at_starts(records)):
        _add_start(history, of_one_start, attempt.number, is_requeued=index > 0)


def _split_at_starts(records: Iterable[Record]) -> Iterator[list[Record]]:
    """An attempt's records by start: a cluster may queue its job again, and it resumes."""
    found: list[Record] = []
    for record in records:
        if record.get("is_resumed") and found:
            yield found
            found = []
        found.append(record)
    if found:
        yield found


def _add_start(history: History, records: list[Record], attempt: int, *, is_requeued: bool) -> None:
    start = _start(records)
    if start and history.is_empty:
        history.remarks.append(f"An earlier run did the steps up to {start:,}; it has its records.")
    elif start:
        how = "was queued again and resumed" if is_requeued else "resumed"
        history.remarks.append(f"Attempt {attempt} {how} from step {start:,}.")
    history.forget_after(start)
    history.logged = _ascending([*history.logged, *filter(_is_of_training, records)])
    scored = [_flat(record) for record in records if not _is_of_training(record)]
    history.evaluations = _ascending([*history.evaluations, *scored])


def _read(
    attempt: AttemptDirectory, read: Callable[[AttemptDirectory], Iterable[Record]]
) -> tuple[list[Record], str]:
    """An attempt's records that have a step; and a remark if the file is damaged."""
    records: list[Record] = []
    try:
        for record in read(attempt):
            if isinstance(record, dict) and _is_number(record.get("step")):
                records.append(record)
    except (ValueError, OSError) as error:
        return records, f"{attempt.metrics_path} is damaged: read up to the damage ({error})."
    return records, ""


def _start(records: Sequence[Record]) -> int:
    """The step whose checkpoint an attempt began with; 0 without one."""
    resumed = [record["step"] for record in records if record.get("is_resumed")]
    if resumed:
        return int(resumed[0])
    # Without scores a checkpoint leaves no record: records are at equal distances, so a first
    # one that is further from 0 than from the second is not the first of all.
    steps = sorted({record["step"] for record in records if _is_of_training(record)})
    if len(steps) < 2 or steps[0] <= steps[1] - steps[0]:
        return 0
    return int(steps[0]) - 1


def _is_of_training(record: Record) -> bool:
    """Whether a record is of training; an evaluation's has its scores in `metrics`."""
    return not isinstance(record.get("metrics"), dict)


def _flat(record: Record) -> Record:
    """An evaluation's scores with its step."""
    return {**record["metrics"], "step": record["step"], "epoch": record.get("epoch")}


def _ascending(records: Iterable[Record]) -> list[Record]:
    """By step, the last record of a step only."""
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _fingerprint(attempt: AttemptDirectory) -> str:
    try:
        return str(dict(attempt.read_call() or {}).get("fingerprint", ""))
    except DAMAGED:
        return ""


def _names_of_numbers(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(key for one in records for key in one if _is_number(one[key])))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
