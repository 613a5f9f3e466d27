"""Charts of what a stage's job used of its host: processors, memory, GPUs, free disk space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redco_flow.errors import DamagedRecord
from redco_flow.report.charts import Figure, Line, LineChart, Point
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.attempt import SystemSample

_GIB = float(1 << 30)
_HEIGHT = 220
_SECONDS_OF_A_MINUTE = 60.0


@dataclass(frozen=True)
class SystemSection:
    """One stage's charts, and the damage of its record if there is any."""

    stage: str
    figures: tuple[Figure, ...]
    remark: str = ""


def system_sections(stages: Iterable[StageFacts]) -> list[SystemSection]:
    """Return the charts of each stage whose job was sampled."""
    return [found for one in stages if (found := _section(one)) is not None]


def _section(stage: StageFacts) -> SystemSection | None:
    samples: list[SystemSample] = []
    remark = ""
    for attempt in stage.maker.attempts if stage.maker else stage.attempts:
        try:
            samples.extend(attempt.read_system_metrics())
        except DamagedRecord as damage:
            remark = str(damage)
    samples.sort(key=lambda sample: sample["time"])
    return (
        SystemSection(stage.name, tuple(_figures(samples)), remark) if samples or remark else None
    )


def _figures(samples: Sequence[SystemSample]) -> Iterator[Figure]:
    gpus = sorted({gpu["index"] for sample in samples for gpu in sample["gpus"]})

    def of_gpus(title: str, label: str, key: str, unit: float) -> Iterator[Figure]:
        lines = [
            (f"GPU {index}", lambda sample, index=index: _of_gpu(sample, index, key))
            for index in gpus
        ]
        yield from _figure(title, label, samples, lines, unit)

    yield from of_gpus("GPU utilization", "%", "utilization_percent", 1.0)
    yield from of_gpus("GPU memory", "GiB in use", "memory_used_bytes", _GIB)
    for title, label, key, unit in (
        ("CPU", "cores in use", "cpu_cores", 1.0),
        ("Memory", "GiB of the job's processes", "memory_bytes", _GIB),
        ("Disk", "GiB free in the workspace", "disk_free_bytes", _GIB),
    ):
        read = lambda sample, key=key: sample.get(key)  # noqa: E731
        yield from _figure(title, label, samples, [("", read)], unit)


def _figure(
    title: str,
    label: str,
    samples: Sequence[SystemSample],
    lines: Iterable[tuple[str, Callable[[SystemSample], Any]]],
    unit: float,
) -> Iterator[Figure]:
    """A chart over the minutes since the first sample; none where nothing was measured."""
    begin = samples[0]["time"] if samples else 0.0
    drawn = []
    for colour, (name, read) in enumerate(lines, 1):
        points: list[Point] = [
            ((sample["time"] - begin) / _SECONDS_OF_A_MINUTE, value / unit)
            for sample in samples
            if (value := read(sample)) is not None
        ]
        if points:
            drawn.append(Line(name, points, colour))
    if drawn:
        chart = LineChart(
            title=f"{title} over time",
            x_label="minutes",
            y_label=label,
            lines=drawn,
            height=_HEIGHT,
            from_zero=True,
        )
        yield Figure(title, chart, is_wide=False)


def _of_gpu(sample: SystemSample, index: int, key: str) -> Any:
    found = (gpu for gpu in sample["gpus"] if gpu["index"] == index)
    return next((gpu.get(key) for gpu in found), None)
