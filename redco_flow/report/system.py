"""Charts of what a stage's job used of its host: processors, memory, GPUs, free disk space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redco_flow.errors import DamagedRecord
from redco_flow.report.charts import Figure, Gap, Line, LineChart, Point
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.attempt import AttemptDirectory, SystemSample

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
