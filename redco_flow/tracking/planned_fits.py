"""Compare the predictions of `plan --fit` for a run's trainings with what they measured.

fits.json of a run has the predictions, written when the run is started; progress.json of a
training's attempts has the devices, the median step time and the allocator's peak.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict

from redco_flow.errors import DamagedRecord
from redco_flow.records import moment, write_json
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace

_NUM_RUNS = 100  # the newest, of which most have no prediction
_NUM_RECENT = 10
_DEVICES = re.compile(r"(?:(\d+) × )?(.+)", re.DOTALL)


class PlannedStepTime(TypedDict, total=False):
    """A predicted step, in seconds, and what it is spent on."""

    seconds: Required[float]
    parts_seconds: Required[dict[str, float]]


class MeshChoice(TypedDict):
    """The choice of the number of devices of a training.

    `objective` is the value of `mesh`, `requested` the devices that the pipeline requests, and the
    times, in ISO 8601, are of its job, where its cluster expected a start. `no_start` says why it
    expected none, and what was chosen then; it is empty where none was needed.
    """

    objective: str
    requested: str
    no_start: str
    expected_start: str | None
    expected_end: str | None


class PlannedFit(TypedDict, total=False):
    """The prediction for one training, as `stages.train.fitting` returns it.

    `device` is the device's name in targets, `reported` a regex of what JAX calls it,
    `device_facts` the figures that were computed with, and `assumed` says what rows were assumed;
    `choice` is there where numbers of devices were compared.
    """

    device: Required[str]
    reported: Required[str]
    num_devices: Required[int]
    used_bytes: Required[int]
    parts_bytes: Required[dict[str, int]]
    step_time: Required[PlannedStepTime | None]
    device_facts: Required[dict[str, dict[str, Any]]]
    assumed: Required[list[str]]
    choice: MeshChoice


@dataclass(frozen=True)
class PlannedFigure:
    """One quantity, predicted and, where it is known, measured."""

    name: str
    predicted: float
    unit: str
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """The measured value's difference, as a part of the predicted one."""
        return None if self.measured is None else self.measured / self.predicted - 1

    @property
    def text(self) -> str:
        """Both values for people, with the difference in percent."""
        predicted = f"predicted {self.predicted:.3g} {self.unit}"
        if self.measured is None or self.error is None:
            return predicted
        return f"{self.measured:.3g} {self.unit}, {predicted} ({100 * self.error:+.1f} %)"

    def to_json(self) -> dict[str, float | str | None]:
        """Return the values, and the difference in percent of the predicted one."""
        percent = None if self.error is None else round(100 * self.error, 2)
        return {**vars(self), "error_percent": percent}


@dataclass(frozen=True)
class FitComparison:
    """A training's prediction, and the measurement on the same devices.

    Args:
        stage: `RUN/STAGE`.
        device: that was predicted for, as in targets: `h100x8`.
        ran_on: other devices, which the training ran on; then nothing is compared.
        time, memory: of a step, and of a device; `time` is None where it was not predicted.
    """

    stage: str
    fit: PlannedFit
    ran_on: str
    time: PlannedFigure | None
    memory: PlannedFigure

    @property
    def target(self) -> str:
        """The devices that were predicted for."""
        return f"{self.fit['device']}x{self.fit['num_devices']}"

    @property
    def figures(self) -> list[PlannedFigure]:
        """The quantities that were predicted."""
        return [*([self.time] if self.time else []), self.memory]

    @property
    def text(self) -> str:
        """All figures in a line."""
        figures = "; ".join(f"{figure.name} {figure.text}" for figure in self.figures)
        if self.ran_on:
            return f"{figures}, for {self.target}; not compared: it ran on {self.ran_on}"
        return "; ".join([f"{figures}, on {self.target}", *self.assumed, *self.chosen])

    @property
    def assumed(self) -> list[str]:
        """Sentences on the assumptions about the rows, for people."""
        return [f"the prediction assumed that {one}" for one in self.fit["assumed"]]

    @property
    def chosen(self) -> list[str]:
        """A sentence on the choice of the devices, for people; none where there was none."""
        if (choice := self.fit.get("choice")) is None:
            return []
        chosen = f"chosen of {choice['requested']} by mesh: {choice['objective']}"
        return [chosen + expected_text(choice), *filter(None, [choice["no_start"]])]

    def to_json(self) -> dict[str, Any]:
        """Return the figures, and the devices that they are of."""
        time = self.time.to_json() if self.time else None
        return {
            "target": self.target,
            "ran_on": self.ran_on or None,
            "assumed": self.fit["assumed"],
            "choice": self.fit.get("choice"),
            "time": time,
            "memory": self.memory.to_json(),
            "text": self.text,
        }


def expected_text(choice: MeshChoice) -> str:
    """Say when the job is expected to start and to end; empty where nothing is expected."""
    start, end = choice["expected_start"], choice["expected_end"]
    return f", expected from {moment(start)} to {moment(end)}" if start and end else ""


def write_fits(run: RunDirectory, fits: Mapping[str, Mapping[str, Any]]) -> None:
    """Write fits.json, where something was predicted.

    Args:
        fits: by stage; those that could not be planned are left out.
    """
    known = {
        stage: {
            key: fit[key] for key in PlannedFit.__annotations__ if key != "choice" or key in fit
        }
        for stage, fit in fits.items()
        if "error" not in fit
    }
    if known:
        write_json(run.fits_path, known)


def read_fits(run: RunDirectory) -> dict[str, PlannedFit]:
    """Return the predictions by stage; empty where there are none.

    Raises:
        DamagedRecord: fits.json is damaged.
    """
    fits = find_record(run.fits_path, dict[str, PlannedFit]) or {}
    for stage, fit in fits.items():
        if problem := _problem(fit):
            raise DamagedRecord(run.fits_path, f"stage '{stage}': {problem}")
    return fits


def _problem(fit: PlannedFit) -> str:
    try:
        re.compile(fit["reported"])
    except re.error as error:
        return f"'reported' is no regular expression: {error}"
    time = fit["step_time"]
    values = {"used_bytes": fit["used_bytes"], "seconds": time["seconds"] if time else 1.0}
    wrong = [f"'{name}' is {value}" for name, value in values.items() if not _is_positive(value)]
    return " and ".join(wrong)


def _is_positive(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf


def compare_fits(run: RunDirectory) -> dict[str, FitComparison]:
    """Return each prediction of a run next to the last attempt's measurement, by stage."""
    fits = unless_damaged(lambda: read_fits(run)) or {}
    return {stage: _compare(run, stage, fit) for stage, fit in fits.items()}


def _compare(run: RunDirectory, stage: str, fit: PlannedFit) -> FitComparison:
    attempt = run.latest_attempt(stage)
    progress = (unless_damaged(attempt.read_progress) if attempt else None) or {}
    devices = progress.get("devices") or ""
    ran_on = devices if devices and not _are_meant(devices, fit) else ""
    measured = (progress.get("step_seconds"), progress.get("peak_memory_bytes"))
    seconds, peak = (one if _is_positive(one) and not ran_on else None for one in measured)
    time = fit["step_time"]
    return FitComparison(
        f"{run.id}/{stage}",
        fit,
        ran_on,
        time and PlannedFigure("step time", time["seconds"], "s", seconds),
        PlannedFigure("memory per device", fit["used_bytes"] / 2**30, "GiB", peak and peak / 2**30),
    )


def _are_meant(devices: str, fit: PlannedFit) -> bool:
    """Return whether a worker's devices (`2 × NVIDIA L4`) are those that were predicted for."""
    found = _DEVICES.fullmatch(devices)
    assert found is not None, "any text is devices"
    is_number = int(found[1] or 1) == fit["num_devices"]
    is_part = "MIG" in found[2]  # which has less than the whole GPU
    return is_number and not is_part and bool(re.fullmatch(fit["reported"], found[2], re.I))


def recent_comparisons(workspace: Workspace) -> list[FitComparison]:
    """Return recent runs' trainings that ran as predicted, the newest first.

    That is on these devices, and on rows about which nothing was assumed.
    """
    return [
        one
        for run in list_runs(workspace)[:_NUM_RUNS]
        for one in compare_fits(run).values()
        if any(figure.measured for figure in one.figures) and not one.assumed
    ]


def like(recent: Sequence[FitComparison], fit: Mapping[str, Any]) -> list[FitComparison]:
    """Return the newest ten that were predicted for the same kind of device, by equal figures."""
    same_kind = [one for one in recent if one.fit["device"] == fit.get("device")]
    found = [one for one in same_kind if _agree(one.fit["device_facts"], fit["device_facts"])]
    return found[:_NUM_RECENT]


def of_same_program(
    recent: Sequence[FitComparison], fit: Mapping[str, Any]
) -> FitComparison | None:
    """Return the newest whose prediction has equal figures, for as many equal devices."""

    def figures(one: Mapping[str, Any]) -> list[Any]:
        time = one.get("step_time")
        keys = ("device", "num_devices", "parts_bytes")
        return [*map(one.get, keys), time and time["parts_seconds"]]

    return next((one for one in recent if figures(one.fit) == figures(fit)), None)


def _agree(facts: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether the figures that two predictions were both computed with are equal."""
    return all(facts[name] == others[name] for name in facts.keys() & others.keys())


def errors_text(compared: Sequence[FitComparison]) -> str:
    """Say how far off predictions for a kind of device were; empty where there are none."""
    if not compared:
        return ""
    times = _range_text((one.time for one in compared if one.time), "slower", "faster")
    memory = _range_text((one.memory for one in compared), "more", "less")
    runs = f"{len(compared)} recent runs" if len(compared) > 1 else "a recent run"
    found = [f"steps {times} than predicted"] if times else []
    found += [f"{memory} memory than predicted"] if memory else []
    return f"{runs} on {compared[0].fit['device']}: {', '.join(found)}"


def _range_text(figures: Iterable[PlannedFigure], above: str, below: str) -> str:
    """Return `4 to 9 % slower`, or `2 % faster to 9 % slower`; empty where nothing is measured."""
    percents = [round(100 * figure.error) for figure in figures if figure.error is not None]
    if not percents:
        return ""
    ends = sorted({min(percents), max(percents)})
    words = [above if end >= 0 else below for end in ends]
    if len(set(words)) > 1:
        return " to ".join(f"{abs(end)} % {word}" for end, word in zip(ends, words, strict=True))
    return f"{' to '.join(str(abs(end)) for end in sorted(ends, key=abs))} % {words[0]}"
