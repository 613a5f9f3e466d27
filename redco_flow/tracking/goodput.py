"""Account for the time of a training: from the submission of its first attempt to its end.

Read from the records of the attempts and the run's journal. Every second is in exactly one part; of
a training that runs it ends with the last log record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from redco_flow.errors import DamagedRecord
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.journal import read_journal
from redco_flow.tracking.run_directory import RunDirectory

# The `kind` of the record that a training's process writes before its first step.
START = "start"
_STOPPED = "Stopped"


@dataclass(frozen=True)
class TimeParts:
    """Seconds of a training.

    Args:
        steps: computing steps that count, the waiting for their data included.
        repeated: computing steps that a later attempt had to compute again.
        waiting: in queues and for locks of the cluster, and between two attempts.
        starting: from a process' start to its first step, and all compiling.
        evaluation: scoring the validation split.
        checkpoints: waiting for checkpoints to be written.
        ending: after an attempt's last log record: last scores, last checkpoint, publishing.
    """

    steps: float = 0.0
    repeated: float = 0.0
    waiting: float = 0.0
    starting: float = 0.0
    evaluation: float = 0.0
    checkpoints: float = 0.0
    ending: float = 0.0

    @property
    def total(self) -> float:
        """All of the time."""
        seconds: dict[str, float] = asdict(self)
        return sum(seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time in which steps that count were computed."""
        return self.steps / self.total if self.total > 0 else 0.0

    def to_json(self) -> dict[str, float]:
        """Return `goodput`, `total` and every part, in seconds."""
        parts = {"total": self.total, **asdict(self)}
        return {"goodput": round(self.goodput, 6), **{k: round(v, 3) for k, v in parts.items()}}


@dataclass(frozen=True)
class _Start:
    """The record of one process start; a cluster may start an attempt again."""

    began: float
    prepared: float
    first_step: int
    records: list[dict[str, Any]]
    ended: float | None = None
    # Whether no step is lost at its end: it ended well, or saved before it stopped.
    is_saved: bool = True

    @property
    def last_step(self) -> int:
        return int(self.records[-1]["step"]) if self.records else self.first_step


COMPILING = "compiling"


@dataclass(frozen=True)
class TimeSpan:
    """One stretch of a training's time.

    Args:
        part: a field of `TimeParts`, or COMPILING for that part of `starting`.
        begin, end: in seconds since the epoch.
    """

    part: str
    begin: float
    end: float


@dataclass
class _Account:
    """Takes a time line in, moment after moment; clocks of several hosts never turn it back."""

    now: float
    spans: list[TimeSpan] = field(default_factory=list)

    @property
    def parts(self) -> TimeParts:
        seconds: dict[str, float] = {}
        for span in self.spans:
            name = "starting" if span.part == COMPILING else span.part
            seconds[name] = seconds.get(name, 0.0) + span.end - span.begin
        return TimeParts(**seconds)

    def until(self, moment: float) -> float:
        """Go on to a moment; return the seconds."""
        seconds = max(0.0, moment - self.now)
        self.now += seconds
        return seconds

    def add(self, **seconds: float) -> None:
        """Say what the seconds up to now were, in this order."""
        begin = self.now - sum(seconds.values())
        for part, length in seconds.items():
            if length > 0:
                self.spans.append(TimeSpan(part, begin, begin + length))
            begin += length


def read_goodput(run: RunDirectory, stage: str) -> TimeParts | None:
    """Return how a stage's attempts spent their time; None where none of them trained.

    Attempts that computed something else than the last one are left out, as are those of other
    runs. Steps that no log record tells of are estimated from those before them.

    Raises:
        DamagedRecord: a record is damaged.
    """
    account = _read_account(run, stage)
    return None if account is None else account.parts


def read_spans(run: RunDirectory, stage: str) -> list[TimeSpan]:
    """Return the stretches of time that `read_goodput` adds up, in order; none of no training.

    Within the time between two log records the order of its parts is not known.

    Raises:
        DamagedRecord: a record is damaged.
    """
    account = _read_account(run, stage)
    return [] if account is None else account.spans


def _read_account(run: RunDirectory, stage: str) -> _Account | None:
    attempts = _same_work(run.attempts(stage))
    starts = [list(_starts(attempt)) for attempt in attempts]
    if not any(starts):
        return None
    submitted = read_submissions(run, stage)
    begun = [submitted.get(attempt.number) for attempt in attempts]
    first = next((moment for moment in begun if moment is not None), None)
    flat = [start for of_attempt in starts for start in of_attempt]
    account = _Account(flat[0].began if first is None else first)
    for attempt, moment, of_attempt in zip(attempts, begun, starts, strict=True):
        account.add(waiting=account.until(account.now if moment is None else moment))
        for start in of_attempt:
            later = flat[flat.index(start) + 1 :]
            _add_start(account, start, min((one.first_step for one in later), default=None))
        ended = _ended(attempt)
        if not of_attempt and ended is not None:
            account.add(starting=account.until(ended))
    return account


def find_goodput(run: RunDirectory, stage: str) -> TimeParts | None:
    """Return what `read_goodput` does, or None where a record is damaged: others say that."""
    try:
        return read_goodput(run, stage)
    except (DamagedRecord, OSError, ValueError, KeyError, TypeError):
        return None


def _add_start(account: _Account, start: _Start, resumed: int | None) -> None:
    """Add the time of one process.

    Args:
        resumed: the step from which later ones resumed; those after it were computed again.
    """
    account.add(waiting=account.until(start.began))
    account.add(starting=account.until(start.prepared))
    step, num_timed, seconds_timed = start.first_step, 0, 0.0
    for record in start.records:
        passed = account.until(unix_time(record["time"]))
        parts = _scaled(record, passed)
        num_steps = max(1, int(record["step"]) - step)
        kept = num_steps if resumed is None else min(max(0, resumed - step), num_steps)
        useful = parts["steps"] * kept / num_steps
        account.add(**{**parts, "steps": useful, "repeated": parts["steps"] - useful})
        num_timed, seconds_timed = num_timed + num_steps, seconds_timed + parts["steps"]
        step = int(record["step"])
    if start.ended is None:
        return
    tail = account.until(start.ended)
    # Steps that were saved after the last record.
    num_saved = max(0, (start.last_step if resumed is None else resumed) - start.last_step)
    useful = min(tail, num_saved * seconds_timed / num_timed) if num_timed else 0.0
    rest = "ending" if start.is_saved else "repeated"
    account.add(steps=useful, **{rest: tail - useful})


def _scaled(record: dict[str, Any], passed: float) -> dict[str, float]:
    """Split the time since the record before; what no part tells was compiling."""
    names = ("steps", "evaluation", "checkpoints")
    told = [float(record.get(f"{name}_seconds") or 0.0) for name in names]
    scale = min(1.0, passed / sum(told)) if sum(told) > 0 else 0.0
    parts = {name: seconds * scale for name, seconds in zip(names, told, strict=True)}
    return {COMPILING: max(0.0, passed - sum(parts.values())), **parts}


def _same_work(attempts: Sequence[AttemptDirectory]) -> list[AttemptDirectory]:
    fingerprints = [(attempt.read_call() or {}).get("fingerprint") for attempt in attempts]
    return [
        one
        for one, digest in zip(attempts, fingerprints, strict=True)
        if digest == fingerprints[-1]
    ]


def _starts(attempt: AttemptDirectory) -> Iterator[_Start]:
    """Yield what each process of an attempt recorded."""
    records = list(attempt.read_metrics())
    begins = [number for number, record in enumerate(records) if record.get("kind") == START]
    bounds = list(pairwise([*begins, len(records)]))
    for number, (begin, end) in enumerate(bounds):
        first = records[begin]
        trained = [one for one in records[begin + 1 : end] if one.get("kind") == "training"]
        is_last = number == len(bounds) - 1
        yield _Start(
            began=unix_time(first["process_started_at"]),
            prepared=unix_time(first["time"]),
            first_step=int(first["start_step"]),
            records=trained,
            ended=_ended(attempt) if is_last else None,
            is_saved=_is_saved(attempt),
        )


def _is_saved(attempt: AttemptDirectory) -> bool:
    error = attempt.read_error() or {}
    return attempt.cause is Cause.COMPLETED or error.get("type") == _STOPPED


def _ended(attempt: AttemptDirectory) -> float | None:
    record = attempt.read_exit()
    return None if record is None or record.ended_at is None else unix_time(record.ended_at)


def read_submissions(run: RunDirectory, stage: str) -> dict[int, float]:
    """Return when each attempt's job was submitted, as the journal says."""
    events = (one for one in read_journal(run.journal_path) if one["event"] == "job_submitting")
    return {one["attempt"]: unix_time(one["time"]) for one in events if one.get("stage") == stage}


def unix_time(time: str) -> float:
    """Return an ISO time of a record in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
