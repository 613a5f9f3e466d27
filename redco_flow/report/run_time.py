"""Account for a run's wall time: each moment counts as what its most useful stage was at.

Read from the journal and the attempts' records. The parts add up to the time from the run's start
to its end, however many stages ran at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redco_flow.errors import DamagedRecord
from redco_flow.report.charts import Figure, Gap, Line, LineChart, Point
from redco_flow.report.numbers import duration
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.attempt import AttemptDirectory, Cause, SystemSample
from redco_flow.tracking.goodput import TimeSpan, read_spans, read_submissions, unix_time
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

_GIB = float(1 << 30)
_LABELS = {
    "GPU utilization": "%",
    "GPU memory": "GiB in use",
    "CPU": "cores in use",
    "Memory": "GiB of the job's processes",
    "Disk": "GiB free in the workspace",
}
_HEIGHT = 220
_SECONDS_OF_A_MINUTE = 60.0


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
    begin, end = unix_time(state["started_at"]), unix_time(state.get("ended_at") or now)
    if end <= begin:  # the clock was set back
        return []
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
    last = unix_time(ended.ended_at) if ended and ended.ended_at else end
    if ended is not None and ended.cause not in _NOT_LOST:
        yield TimeSpan("lost", submitted, last)
        return
    result = attempt.read_result()
    began = max(submitted, last - float(result["seconds"])) if result else submitted
    yield TimeSpan("queue", submitted, began)
    yield TimeSpan(_OF_KIND.get(kind, "other stages"), began, last)


@dataclass(frozen=True)
class SystemSection:
    """One stage's charts, and the damage of its record if there is any."""

    stage: str
    figures: tuple[Figure, ...]
    remark: str = ""


def system_sections(
    stages: Iterable[StageFacts],
    read: Callable[
        [AttemptDirectory], Iterable[SystemSample]
    ] = AttemptDirectory.read_system_metrics,
) -> list[SystemSection]:
    """Return the charts of each stage whose job was sampled.

    Args:
        read: returns an attempt's samples.
    """
    return [found for one in stages if (found := _section(one, read)) is not None]


def _section(
    stage: StageFacts, read: Callable[[AttemptDirectory], Iterable[SystemSample]]
) -> SystemSection | None:
    remark = ""
    # By chart and line; every sample is read once and not kept.
    drawn: dict[str, dict[str, list[Point | Gap]]] = {title: {} for title in _LABELS}
    begin = None
    for attempt in stage.maker.attempts if stage.maker else stage.attempts:
        continued = set()
        try:
            for sample in read(attempt):
                begin = sample["time"] if begin is None else begin
                x = (sample["time"] - begin) / _SECONDS_OF_A_MINUTE
                for title, line, y in _values(sample):
                    points = drawn[title].setdefault(line, [])
                    # No line from the last sample of an attempt to the first of the next one.
                    if points and (title, line) not in continued:
                        points.append((x, None))
                    continued.add((title, line))
                    points.append((x, y))
        except DamagedRecord as damage:
            remark = str(damage)
    if begin is None and not remark:
        return None
    return SystemSection(stage.name, tuple(_figures(drawn)), remark)


def _values(sample: SystemSample) -> Iterator[tuple[str, str, float]]:
    """Yield chart, line and value of each number that was measured."""
    found: list[tuple[str, str, float | None, float]] = [
        ("CPU", "", sample.get("cpu_cores"), 1.0),
        ("Memory", "", sample.get("memory_bytes"), _GIB),
        ("Disk", "", sample.get("disk_free_bytes"), _GIB),
    ]
    for gpu in sample["gpus"]:
        line = f"GPU {gpu['index']}"
        found.append(("GPU utilization", line, gpu.get("utilization_percent"), 1.0))
        found.append(("GPU memory", line, gpu.get("memory_used_bytes"), _GIB))
    for title, line, value, unit in found:
        if value is not None:
            yield title, line, value / unit


def _figures(drawn: Mapping[str, Mapping[str, Sequence[Point | Gap]]]) -> Iterator[Figure]:
    """The charts over the minutes since the first sample; none where nothing was measured."""
    for title, lines in drawn.items():
        if lines:
            chart = LineChart(
                title=f"{title} over time",
                x_label="minutes",
                y_label=_LABELS[title],
                lines=[Line(name, points, n) for n, (name, points) in enumerate(lines.items(), 1)],
                height=_HEIGHT,
                from_zero=True,
            )
            yield Figure(title, chart, is_wide=False)
