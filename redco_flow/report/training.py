"""A training's part of the page: charts, a few numbers, tables of its logged values.

Decides which values share a chart, and the labels of its axes; `charts` describes charts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from redco_flow.report.charts import Figure, Line, LineChart
from redco_flow.report.numbers import duration, number, plural, score, size
from redco_flow.report.training_history import History, num_not_finite, points_of
from redco_flow.tracking.goodput import TimeParts
from redco_flow.tracking.planned_fits import FitComparison, PlannedFigure
from redco_flow.tracking.run_metrics import training_metric

_MAX_LINES = 4  # more cannot be distinguished
_SIMILAR_RATIO = 10.0
_MAX_TABLE_ROWS = 30
_TABLED = ("learning_rate", "grad_norm", "tokens_per_second", "tflops_per_device", "mfu")
_HALF_HEIGHT = 250


@dataclass(frozen=True)
class ValueTable:
    """Logged values as text, for those who read rather than look."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class TrainingSection:
    """One stage's training.

    Args:
        stage: its name.
        source: whose records they are, if not this run's.
        facts: (name, value) of what one wants to know first.
    """

    stage: str
    source: str
    facts: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]
    tables: tuple[ValueTable, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Units:
    """Units of a training's numbers.

    Args:
        loss: such as "nats per target token"; empty where it is not known.
        counted: what the weights of its loss count, in the plural: tokens, images.
    """

    loss: str = ""
    counted: str = "tokens"

    def name(self, key: str) -> str:
        """A logged value's name for people."""
        return key.replace("tokens", self.counted).replace("_", " ")


def view_training(
    stage: str,
    history: History,
    units: Units,
    *,
    source: str = "",
    goodput: TimeParts | None = None,
    parameters: str = "",
    warning: str = "",
    fit: FitComparison | None = None,
) -> TrainingSection:
    """Return a stage's training for the page.

    Args:
        stage: its name.
        history: what it logged.
        units: of its loss and its speed.
        source: whose records they are, if not this run's.
        goodput: what its time went into, where that is known.
        parameters: how many there are, and how many of them are trained.
        warning: what the training warned of before it began.
        fit: what `plan --fit` predicted, and what was measured.
    """
    figures = [
        *_loss_figure(history, units.loss),
        *_metric_figures(history),
        *_measure_figures(history),
        *_small_figure(history, "learning_rate", "Learning rate", "learning rate", from_zero=True),
        *_small_figure(
            history, "grad_norm", "Gradient norm", "gradient norm before clipping", may_be_log=True
        ),
        *_small_figure(
            history, "tokens_per_second", "Speed", units.name("tokens_per_second"), from_zero=True
        ),
        *_small_figure(history, "mfu", "MFU", "share of the devices' peak", from_zero=True),
    ]
    return TrainingSection(
        stage=stage,
        source=source,
        facts=(
            *_facts(history, units),
            *([("model", parameters)] if parameters else []),
            *([("warning", warning)] if warning else []),
            *_goodput_facts(goodput),
            *_fit_facts(fit),
        ),
        figures=tuple(figures),
        tables=(*_tables(history, units), *_time_table(goodput), *_fit_tables(fit)),
        remarks=(*history.remarks, *_not_finite(history)),
    )


def overlay_trainings(histories: Mapping[str, History]) -> Iterator[Figure]:
    """Yield the losses of all trainings in one chart, where there are several.

    Args:
        histories: by stage.
    """
    lines = []
    for colour, (stage, history) in enumerate(histories.items(), 1):
        if losses := points_of(history.logged, "loss"):
            lines.append(Line(stage, losses, colour))
        if scored := points_of(history.evaluations, "eval_loss"):
            lines.append(Line(f"{stage}, validation", scored, colour, is_sparse=True))
    if len(histories) > 1 and lines:
        chart = LineChart("Losses of all trainings", "step", "loss", lines, may_be_log=True)
        yield Figure("Losses of all trainings", chart)


def _facts(history: History, units: Units) -> Iterator[tuple[str, str]]:
    if history.is_empty:
        return
    losses = points_of(history.logged, "loss")
    if losses:
        yield "training loss", f"{number(float(losses[-1][1]))} at step {number(losses[-1][0])}"
    eval_losses = points_of(history.evaluations, "eval_loss")
    if eval_losses:
        step, lowest = min(eval_losses, key=lambda point: point[1])
        yield "lowest validation loss", f"{number(float(lowest))} at step {number(step)}"
    last = max((*history.logged, *history.evaluations), key=lambda record: record["step"])
    total = max((record.get("total_steps") or 0 for record in history.logged), default=0)
    of_total = f" of {total:,}" if total else ""
    epochs = f" ({float(last['epoch']):.4g} epochs)" if last.get("epoch") else ""
    yield "steps", f"{number(last['step'])}{of_total}{epochs}"
    rates = [rate for _, rate in points_of(history.logged, "tokens_per_second")]
    if rates:
        yield units.name("tokens_per_second"), f"{number(float(median(rates)))} (median)"
    if speeds := [speed for _, speed in points_of(history.logged, "tflops_per_device")]:
        shares = [share for _, share in points_of(history.logged, "mfu")]
        mfu = f", MFU {median(shares):.1%}" if shares else ""
        yield "TFLOP/s per device", f"{number(float(median(speeds)))}{mfu} (median)"

    if peaks := [peak for _, peak in points_of(history.logged, "peak_memory_bytes")]:
        yield "peak memory per device", size(int(max(peaks)))


def _goodput_facts(goodput: TimeParts | None) -> Iterator[tuple[str, str]]:
    if goodput is not None:
        yield "goodput", f"{goodput.goodput:.1%} of {duration(goodput.total)}"


def _time_table(goodput: TimeParts | None) -> Iterator[ValueTable]:
    """The parts of a training's time; they add up to the whole."""
    if goodput is None:
        return
    parts = {**asdict(goodput), "all": goodput.total}
    rows = tuple(
        (name, number(seconds), f"{seconds / goodput.total:.1%}" if goodput.total else "–")
        for name, seconds in parts.items()
    )
    note = "From the submission of the first attempt to the end; waiting is also between attempts."
    yield ValueTable("Time", ("part", "seconds", "share"), rows, note)


def _fit_facts(fit: FitComparison | None) -> Iterator[tuple[str, str]]:
    if fit is not None:
        yield from ((figure.name, figure.text) for figure in fit.figures)
        if fit.ran_on:
            yield "predicted for", f"{fit.target}; not compared, it ran on {fit.ran_on}"
        if fit.fit["assumed"]:
            yield "predicted assuming", "; ".join(fit.fit["assumed"])


def _fit_tables(fit: FitComparison | None) -> Iterator[ValueTable]:
    """The predicted parts of a step's time and of a device's memory, each after their sum."""
    if fit is None:
        return
    header = ("part", "predicted", "measured", "difference")
    note = f"Predicted by plan --fit for {fit.target}."
    if fit.time and (time := fit.fit["step_time"]):
        parts = sorted(time["parts_seconds"].items(), key=lambda part: -part[1])
        rows = [fit.time, *(PlannedFigure(name, seconds, "s") for name, seconds in parts)]
        yield ValueTable("Step time", header, tuple(map(_fit_row, rows)), note)
    sizes = fit.fit["parts_bytes"].items()
    rows = [
        fit.memory,
        *(PlannedFigure(name.replace("_", " "), n / 2**30, "GiB") for name, n in sizes),
    ]
    yield ValueTable("Memory per device", header, tuple(map(_fit_row, rows)), note)


def _fit_row(figure: PlannedFigure) -> tuple[str, str, str, str]:
    measured = "–" if figure.measured is None else f"{number(figure.measured)} {figure.unit}"
    error = "–" if figure.error is None else f"{figure.error:+.1%}"
    return figure.name, f"{number(figure.predicted)} {figure.unit}", measured, error


def _loss_figure(history: History, unit: str) -> Iterator[Figure]:
    lines = []
    if losses := points_of(history.logged, "loss"):
        lines.append(Line("training", losses, 1))
    if eval_losses := points_of(history.evaluations, "eval_loss"):
        lines.append(Line("validation", eval_losses, 2, is_sparse=True))
    if lines:
        chart = LineChart(
            title="Loss over optimizer steps",
            x_label="step",
            y_label=f"loss ({unit})" if unit else "loss",
            lines=lines,
            may_be_log=True,
            x_range=_steps(history),
        )
        yield Figure("Loss", chart, note=_what_is_drawn(chart, len(losses)))


def _what_is_drawn(chart: LineChart, num_logged: int) -> str:
    """Say how the picture came about, since every plot hides something."""
    note = "Training loss: mean since the record before. Nothing is smoothed until you do."
    if chart.num_left_out:
        return (
            f"{note} Of {num_logged:,} records the lowest and the highest of each stretch are "
            f"drawn, so every spike is there."
        )
    return note


def _metric_figures(history: History) -> Iterator[Figure]:
    """The metrics measured during training; those of similar size share a chart."""
    for names in _alike(history):
        lines = [
            Line(
                training_metric(name), points_of(history.evaluations, name), colour, is_sparse=True
            )
            for colour, name in enumerate(names, start=2)
        ]
        chart = LineChart(
            title=f"{', '.join(map(training_metric, names))} over optimizer steps",
            x_label="step",
            y_label="score" if len(names) > 1 else training_metric(names[0]),
            lines=lines,
            height=300,
            x_range=_steps(history),
        )
        note = "Measured during training, on the stage's validation rows."
        yield Figure("Validation metrics", chart, note=note)


def _measure_figures(history: History) -> Iterator[Figure]:
    """Charts of the loss function's other measures, each on its own scale."""
    for name in history.measures:
        title = f"{name[:1].upper()}{name[1:]}".replace("_", " ")
        note = "Measured with the training loss: mean since the record before."
        yield from _small_figure(history, name, title, name, may_be_log=True, note=note)


def _alike(history: History) -> list[list[str]]:
    """Metrics in groups whose largest values are within a factor of 10."""
    sizes = {
        name: max(abs(value) for _, value in points_of(history.evaluations, name))
        for name in history.evaluation_metrics
    }
    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        fits = groups and sizes[groups[-1][0]] <= _SIMILAR_RATIO * sizes[name]
        if fits and len(groups[-1]) < _MAX_LINES:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _small_figure(
    history: History,
    key: str,
    title: str,
    y_label: str,
    *,
    from_zero: bool = False,
    may_be_log: bool = False,
    note: str = "",
) -> Iterator[Figure]:
    points = points_of(history.logged, key)
    if points:
        chart = LineChart(
            title=f"{title} over optimizer steps",
            x_label="step",
            y_label=y_label,
            lines=[Line("", points, 1)],
            height=_HALF_HEIGHT,
            from_zero=from_zero,
            may_be_log=may_be_log,
            x_range=_steps(history),
        )
        yield Figure(title, chart, is_wide=False, note=note)


def _steps(history: History) -> tuple[float, float]:
    """The same stretch for all charts of a training, so that they can be read below each other."""
    steps = [record["step"] for record in (*history.logged, *history.evaluations)]
    return min(steps), max(steps)


def _tables(history: History, units: Units) -> Iterator[ValueTable]:
    if history.evaluations:
        names = ["eval_loss", *history.evaluation_metrics]
        named = [
            {**one, **{training_metric(n): one.get(n) for n in names}}
            for one in history.evaluations
        ]
        yield _table("Validation", list(map(training_metric, names)), named, units)
    if history.logged:
        names = ["loss", *history.measures, *_TABLED]
        known = [name for name in names if points_of(history.logged, name)]
        yield _table("Training", known, history.logged, units)


def _table(
    title: str, names: Sequence[str], records: Sequence[dict[str, object]], units: Units
) -> ValueTable:
    """Every record, or every n-th and the last."""
    every = -(-len(records) // _MAX_TABLE_ROWS)
    shown = [record for index, record in enumerate(records[::-1]) if index % every == 0][::-1]
    note = f"{len(shown)} of {plural(len(records), 'record')}." if every > 1 else ""
    rows = tuple(
        (number(record["step"]), *(score(record.get(name)) for name in names)) for record in shown
    )
    header = ("step", *(name if "/" in name else units.name(name) for name in names))
    return ValueTable(title, header, rows, note)


def _not_finite(history: History) -> Iterator[str]:
    for key, records in (("loss", history.logged), ("eval_loss", history.evaluations)):
        if count := num_not_finite(records, key):
            name = training_metric(key)
            yield f"{plural(count, 'record')} of {name} not finite; the line leaves them out."
