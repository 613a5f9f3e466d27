"""A pipeline's runs over time, each compared with the one before: records and page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.records import digest_json
from redco_flow.report.charts import Figure, Group, PointChart
from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.numbers import duration, moment, score, signed
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_DIGITS_OF_DATA = 8
_REASON = "not compared with the run before: "


@dataclass(frozen=True)
class HistoryEntry:
    """One run of a pipeline, compared with the one before it.

    Args:
        cause: why its first failed stage ended, such as "out_of_memory"; empty where none failed.
        message: the last message of that stage, or else of the run; empty of a completed run.
        metrics: by name, as `status` has them.
        differences: of each metric, to the last run before that has it, where the two scores can
            be compared.
        not_compared: why a metric has no difference to the last run before that has it.
        data: digest of what identifies the raw data; empty before a stage has a result.
        data_changed: whether raw data of stages that this run and the last before it with
            results both have differ; None where there is nothing to compare.
        code_changed: whether modules that such stages import differ.
        artifacts: the ids of the artifacts that its stages have made or reused.
    """

    run: str
    created_at: str
    state: str
    seconds: float | None
    sweep: str
    cause: str
    message: str
    metrics: dict[str, float]
    differences: dict[str, float]
    not_compared: dict[str, str]
    data: str
    data_changed: bool | None
    code_changed: bool | None
    artifacts: tuple[str, ...] = ()

    @property
    def failure(self) -> str:
        """Cause and message; empty of a run that completed."""
        cause = self.cause if self.cause != State.FAILED or not self.message else ""
        return ", ".join(filter(None, (cause, self.message)))

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON value."""
        return asdict(self)


def read_entries(runs: Sequence[ComparedRun], *, num_last: int) -> list[HistoryEntry]:
    """Return the last of a pipeline's runs, each compared with the one before it.

    Args:
        runs: oldest first; those before the last `num_last` are only compared with.
    """
    reader = _Reader()
    return [reader.read(run) for run in runs][-num_last:] if num_last > 0 else []


class _Reader:
    """Reads runs in turn and keeps the data that the next one is compared with."""

    def __init__(self) -> None:
        self._scored: dict[str, ComparedRun] = {}
        self._ingredients: dict[str, Mapping[str, Any]] = {}

    def read(self, run: ComparedRun) -> HistoryEntry:
        """Compare one run with those that were read before."""
        cause, message = _failure(run)
        metrics = dict(run.metrics)
        before = {key: self._scored[key] for key in metrics if key in self._scored}
        reasons = {
            key: why
            for key, other in before.items()
            if (why := other.identity(key).comparable_with(run.identity(key)))
        }
        entry = HistoryEntry(
            run=run.run.id,
            created_at=run.created_at,
            state=run.state,
            seconds=run.seconds,
            sweep=str(run.view.get("sweep") or ""),
            cause=cause,
            message=message,
            metrics=metrics,
            differences={
                key: metrics[key] - other.metrics[key]
                for key, other in before.items()
                if key not in reasons
            },
            not_compared=reasons,
            data=run.data,
            data_changed=self._has_changed("data", run.ingredients),
            code_changed=self._has_changed("code", run.ingredients),
            artifacts=tuple(
                id for one in run.entries.values() for id in (one.get("artifacts") or {}).values()
            ),
        )
        self._scored |= dict.fromkeys(metrics, run)
        self._ingredients |= run.ingredients
        return entry

    def _has_changed(
        self, section: str, ingredients: Mapping[str, Mapping[str, Any]]
    ) -> bool | None:
        """Whether a part of the ingredients of any stage differs from its last ones."""
        common = [stage for stage in ingredients if stage in self._ingredients]
        if not common:
            return None
        old, new = (
            [one[stage].get(section, {}) for stage in common]
            for one in (self._ingredients, ingredients)
        )
        return digest_json(old) != digest_json(new)


def _failure(run: ComparedRun) -> tuple[str, str]:
    """The cause and the message of a run's first failed stage; empty of a run that completed."""
    stages: Mapping[str, Any] = run.view.get("stages") or run.entries
    failed = (name for name, stage in stages.items() if stage["state"] == State.FAILED)
    if name := next(failed, ""):
        attempt = run.run.latest_attempt(name)
        cause = unless_damaged(lambda: attempt.cause) if attempt else None
        message = str(stages[name].get("message") or "").partition("\n")[0]
        return str(cause or State.FAILED), f"{name}: {message}" if message else name
    if run.state in (State.COMPLETED, State.PENDING, State.RUNNING):
        return "", ""
    return "", str(run.view.get("message") or "").partition("\n")[0]


def promotions(workspace: Workspace, entries: Sequence[HistoryEntry]) -> dict[str, list[str]]:
    """Return the aliases that were pointed to artifacts of the runs, with the time, by run.

    An artifact that several runs have, as one of them reused it, is the first one's.
    """
    made: dict[str, str] = {}
    for entry in entries:
        for id in entry.artifacts:
            made.setdefault(id, entry.run)
    found: dict[str, list[str]] = {}
    for alias in AliasStore(workspace).list():
        for event in alias.history:
            if event.event == "promoted" and event.checkpoint in made:
                time = f"{event.time[:16].replace('T', ' ')} UTC"
                found.setdefault(made[event.checkpoint], []).append(f"{alias.name}, {time}")
    return found


Promoted = Mapping[str, Sequence[str]]


def _time_of(promotion: str) -> str:
    return promotion.rpartition(", ")[2]


def history_page(
    pipeline: str,
    entries: Sequence[HistoryEntry],
    metrics: Sequence[str],
    promoted: Promoted,
    now: str,
    num_earlier: int = 0,
) -> RunsPage:
    """Return a pipeline's history.

    Args:
        entries: its runs, oldest first.
        metrics: names of those that are shown.
        promoted: by run, the aliases that its checkpoints got, with the time: "production, 2026-…".
        now: the time as `utc_now` gives it.
        num_earlier: runs of the pipeline before these.
    """
    done = sum(entry.state == State.COMPLETED for entry in entries)
    promotions = [name for entry in entries for name in promoted.get(entry.run, ())]
    facts = [
        ("runs", f"{done} of {len(entries)} completed"),
        ("last promotion", max(promotions, key=_time_of, default="none")),
    ]
    if num_earlier:
        facts.append(("earlier runs", f"{num_earlier} (-n {num_earlier + len(entries)} shows all)"))
    figures = [_figure(entries, name, promoted) for name in metrics]
    return RunsPage(
        of="history",
        title=pipeline,
        facts=facts,
        sections=[
            Section("Over time", figures=figures, note=_NOTE),
            Section("Runs", [_table(entries, metrics, promoted)]),
        ],
        built_at=now,
    )


_NOTE = (
    "A failed run has no score and is drawn at the score of the run before. val/… was measured by "
    "the training, on its validation rows."
)


def _figure(entries: Sequence[HistoryEntry], name: str, promoted: Promoted) -> Figure:
    chart = PointChart(
        title=f"{name} over time",
        x_label="created (UTC)",
        y_label=name,
        groups=[group for group in _groups(entries, name, promoted) if group.xs],
        x_kind="date",
    )
    return Figure(name, chart)


def _groups(entries: Sequence[HistoryEntry], name: str, promoted: Promoted) -> Iterator[Group]:
    scored = [one for one in entries if name in one.metrics]
    texts = {one.run: "\n".join(_hover_lines(one, name, promoted)) for one in scored}
    marked = (
        ("score", scored, 1, "circle", 8.0),
        ("new data", [one for one in scored if one.data_changed], 6, "diamond-open", 17.0),
        ("promoted", [one for one in scored if one.run in promoted], 3, "star", 17.0),
    )
    for label, ones, colour, symbol, thickness in marked:
        yield Group(
            label,
            [_time(one) for one in ones],
            [one.metrics[name] for one in ones],
            [texts[one.run] for one in ones],
            colour,
            symbol,
            has_line=label == "score",
            thickness=thickness,
        )
    failed = [(one, _score_before(entries, index, name)) for index, one in enumerate(entries)]
    placed = [(one, value) for one, value in failed if one.failure and value is not None]
    yield Group(
        "failed",
        [_time(one) for one, _ in placed],
        [value for _, value in placed],
        [f"{one.run}\n{one.failure}" for one, _ in placed],
        5,
        "x",
        thickness=12,
    )


def _hover_lines(entry: HistoryEntry, name: str, promoted: Promoted) -> Iterator[str]:
    difference = entry.differences.get(name)
    change = f" ({signed(difference)})" if difference else ""
    yield f"{name} {score(entry.metrics[name])}{change}"
    if name in entry.not_compared:
        yield f"{_REASON}{entry.not_compared[name]}"
    yield entry.run
    yield moment(entry.created_at)
    if entry.data:
        yield f"data {entry.data[:_DIGITS_OF_DATA]}{', new' if entry.data_changed else ''}"
    yield from (f"promoted: {text}" for text in promoted.get(entry.run, ()))


def _score_before(entries: Sequence[HistoryEntry], index: int, name: str) -> float | None:
    """The score of the last run before that has one; of the first after where none has."""
    around = [*entries[index::-1], *entries[index:]]
    return next((one.metrics[name] for one in around if name in one.metrics), None)


def _time(entry: HistoryEntry) -> str:
    """As Plotly reads dates: without a zone, so that UTC is shown unchanged."""
    return entry.created_at[:19].replace("T", " ")


def _table(entries: Sequence[HistoryEntry], metrics: Sequence[str], promoted: Promoted) -> Table:
    rows = [
        [
            Cell(one.run, note="; ".join(promoted.get(one.run, ()))),
            Cell(one.created_at[:16].replace("T", " "), is_number=True),
            Cell("", mark=one.state, footnote=one.failure),
            Cell(duration(one.seconds), is_number=True),
            *(_score(one, name) for name in metrics),
            Cell(one.data[:_DIGITS_OF_DATA], note=_CHANGED[one.data_changed]),
            Cell(_CHANGED[one.code_changed]),
        ]
        for one in entries
    ]
    header = ["run", "created (UTC)", "state", "time", *metrics, "data", "code"]
    return Table("Runs, oldest first", header, rows, metrics).compact()


_CHANGED = {True: "changed", False: "same", None: ""}


def _score(entry: HistoryEntry, name: str) -> Cell:
    difference, why = entry.differences.get(name), entry.not_compared.get(name)
    note = "" if difference is None else signed(difference) if difference else "="
    return Cell.of_score(
        entry.metrics.get(name), note=note, footnote=f"{_REASON}{why}" if why else ""
    )
