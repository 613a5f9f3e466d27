"""Account for a run's wall time: each moment counts as what its most useful stage was at.

Read from the journal and the attempts' records. The parts add up to the time from the run's start
to its end, however many stages ran at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from redco_flow.report.numbers import duration
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.goodput import TimeSpan, read_spans, read_submissions
from redco_flow.tracking.run_directory import RunDirectory

LAUNCHER = "launcher"
# The most useful first: of several stages at once the first of these counts.
PARTS = {
    "steps": "training steps that count, waiting for their data included",
    "evaluation": "prediction and scoring, those during training included",
    "checkpoints": "waiting for checkpoints to be written; publishing",
    "compile": "compiling, as far as a training tells it",
    "data": "making datasets",
    "other stages": "stages of other kinds",
    "start-up": "from a training process' start to its first step",
    "lost": "attempts that failed, and steps that were computed again",
    "queue": "jobs in a cluster's queue, and between attempts",
    LAUNCHER: "no stage was at work: the launcher, or nothing",
}
_OF_TRAINING = {
    "steps": "steps",
    "repeated": "lost",
    "waiting": "queue",
    "starting": "start-up",
    "compiling": "compile",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "ending": "checkpoints",
}
_OF_KIND = {
    "preprocess": "data",
    "predict": "evaluation",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "promote": "evaluation",
}
_NOT_LOST = (Cause.COMPLETED, Cause.CANCELLED, None)


@dataclass(frozen=True)
class TimeShare:
    """One part of a run's time.

    Args:
        part: one of PARTS; `meaning` is its description there.
        share: in percent of the run's.
    """

    part: str
    seconds: float
    share: float

    @property
    def meaning(self) -> str:
        """The activities that count as this part."""
        return PARTS[self.part]

    @property
    def css_class(self) -> str:
        """The class by which the style sheet colours it."""
        return self.part.replace(" ", "-")

    @property
    def text(self) -> str:
        """Its duration."""
        return duration(self.seconds)


def time_shares(run: RunDirectory, stages: Iterable[StageFacts], now: str) -> list[TimeShare]:
    """Return what a run's time went into, in the order of PARTS; none before it began.

    Args:
        now: the time as `utc_now` gives it, up to which a run counts that has no end yet.

    Raises:
        DamagedRecord, ValueError, OSError: a record cannot be read.
    """
    state = run.read_state()
    if not state.get("started_at"):
        return []
    begin, end = _seconds(state["started_at"]), _seconds(state.get("ended_at") or now)
    spans = [span for stage in stages for span in _spans(run, stage, end)]
    seconds = add_up(spans, begin, end)
    total = end - begin
    return [TimeShare(part, seconds[part], 100 * seconds[part] / total) for part in seconds]


def add_up(spans: Iterable[TimeSpan], begin: float, end: float) -> dict[str, float]:
    """Return the seconds of each part between two moments; what no span tells is LAUNCHER.

    Args:
        spans: their parts are among PARTS; they may overlap and reach beyond the moments.
    """
    changes = [(begin, LAUNCHER, 1), (end, LAUNCHER, -1)]
    for span in spans:
        first, last = max(begin, span.begin), min(end, span.end)
        if first < last:
            changes += [(first, span.part, 1), (last, span.part, -1)]
    seconds: defaultdict[str, float] = defaultdict(float)
    active: Counter[str] = Counter()
    before = begin
    for moment, part, change in sorted(changes):
        if moment > before:
            seconds[next(one for one in PARTS if active[one] > 0)] += moment - before
        active[part] += change
        before = moment
    return {part: seconds[part] for part in PARTS if seconds[part] > 0}


def _spans(run: RunDirectory, stage: StageFacts, end: float) -> Iterator[TimeSpan]:
    """A stage's time in this run by the parts of PARTS."""
    found = read_spans(run, stage.name)
    for span in found:
        yield TimeSpan(_OF_TRAINING[span.part], span.begin, span.end)
    if not found:
        submitted = read_submissions(run, stage.name)
        for attempt in stage.attempts:
            if attempt.number in submitted:
                yield from _of_attempt(attempt, stage.kind, submitted[attempt.number], end)


def _of_attempt(
    attempt: AttemptDirectory, kind: str, submitted: float, end: float
) -> Iterator[TimeSpan]:
    """The queue, then what the stage does; all of it was lost where it failed."""
    ended = attempt.read_exit()
    last = _seconds(ended.ended_at) if ended and ended.ended_at else end
    if ended is not None and ended.cause not in _NOT_LOST:
        yield TimeSpan("lost", submitted, last)
        return
    result = attempt.read_result()
    began = max(submitted, last - float(result["seconds"])) if result else submitted
    yield TimeSpan("queue", submitted, began)
    yield TimeSpan(_OF_KIND.get(kind, "other stages"), began, last)


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
