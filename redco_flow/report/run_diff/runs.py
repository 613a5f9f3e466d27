"""Differences of two runs by their files: settings, data, code, packages, scores, placement.

Reads only. Records that cannot be read are named in `remarks` and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redco_flow.errors import RedcoFlowError
from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.run_diff.code import CodePatch, code_patch
from redco_flow.report.run_diff.measures import (
    MetricChange,
    Resampling,
    metric_changes,
    training_changes,
)
from redco_flow.report.run_diff.settings import (
    Change,
    SettingChanges,
    changed_keys,
    changes_by_stage,
    collect,
    flatten,
    setting_changes,
)
from redco_flow.report.stage_facts import DAMAGED, StageFacts
from redco_flow.tracking.damage import LaunchFile
from redco_flow.tracking.results import ABSENT, StageResult
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record, unless_damaged

_Found = TypeVar("_Found")

HIDDEN = "(not shown)"
_PROFILE = "profile."


@dataclass(frozen=True)
class RunDiff:
    """The differences of two runs by group.

    Args:
        stages: states, and stages that only one of the runs has.
        settings: those that determine results.
        data: raw data files by name, and datasets made of them.
        code: commit, uncommitted changes, and the modules whose sources differ.
        patch: from the first run's code to the second's.
        packages: versions that the stages computed with.
        metrics: scores, with the intervals of their differences.
        training: the last records of trainings.
        placement: parts that are not in a result's identity: profile, executor, hosts, devices,
            and settings of that kind.
        remarks: records that could not be read.
    """

    first: ComparedRun
    second: ComparedRun
    stages: tuple[Change, ...] = ()
    settings: tuple[Change, ...] = ()
    data: tuple[Change, ...] = ()
    code: tuple[Change, ...] = ()
    patch: CodePatch = field(default_factory=CodePatch)
    packages: tuple[Change, ...] = ()
    metrics: tuple[MetricChange, ...] = ()
    training: tuple[Change, ...] = ()
    placement: tuple[Change, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def changes(self) -> dict[str, tuple[Change, ...]]:
        """Every group but the metrics by its name."""
        return {
            "stages": self.stages,
            "settings": self.settings,
            "data": self.data,
            "code": self.code,
            "packages": self.packages,
            "training": self.training,
            "placement": self.placement,
        }

    @property
    def equal(self) -> list[str]:
        """The groups in which nothing differs."""
        groups = {**self.changes, "metrics": self.metrics}
        return [name for name, changes in groups.items() if not changes]

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON value."""
        sides = {"first": self.first, "second": self.second}
        return {
            **{name: {"run": one.run.id, "state": one.state} for name, one in sides.items()},
            **{name: [one.to_json() for one in found] for name, found in self.changes.items()},
            "metrics": [one.to_json() for one in self.metrics],
            "patch": {"text": self.patch.text, "remark": self.patch.remark},
            "equal": self.equal,
            "remarks": list(self.remarks),
        }


def diff_runs(first: RunDirectory, second: RunDirectory, resampling: Resampling) -> RunDiff:
    """Return the differences of two runs, which may be of two workspaces.

    Args:
        resampling: of the metrics' intervals.

    Raises:
        DamagedRecord: the run.json of one is damaged.
    """
    old, new, remarks = ComparedRun(first), ComparedRun(second), list[str]()
    settings = _or_remark(lambda: _settings(old, new), SettingChanges(), remarks.append)
    return RunDiff(
        old,
        new,
        stages=tuple(_stages(old, new)),
        settings=settings.determining,
        data=tuple(_data(old, new)),
        code=tuple(_code(old, new)),
        patch=_or_remark(lambda: code_patch(first, second), CodePatch(), remarks.append),
        packages=tuple(_by_stage(old, new, lambda result: result.versions)),
        metrics=tuple(metric_changes(old, new, resampling)),
        training=tuple(training_changes(old.stages, new.stages)),
        placement=(*_placement(old, new), *settings.placing),
        remarks=tuple(dict.fromkeys((*old.remarks, *new.remarks, *remarks))),
    )


def _or_remark(find: Callable[[], _Found], empty: _Found, remark: Callable[[str], None]) -> _Found:
    """Return the result of `find`; where it cannot read a record, a remark and an empty result."""
    try:
        return find()
    except (RedcoFlowError, *DAMAGED) as error:
        remark(str(error))
        return empty


def _stages(old: ComparedRun, new: ComparedRun) -> Iterator[Change]:
    states = [{name: stage.state for name, stage in side.stages.items()} for side in (old, new)]
    yield from (Change(*one) for one in changed_keys(*states))


def _settings(old: ComparedRun, new: ComparedRun) -> SettingChanges:
    names = dict.fromkeys((*old.stages, *new.stages))
    found = {name: [s.stages[name] for s in (old, new) if name in s.stages] for name in names}
    results = {name: [s.result for s in stages if s.result] for name, stages in found.items()}
    return setting_changes(old.run, new.run, results)


def _by_stage(
    old: ComparedRun, new: ComparedRun, read: Callable[[StageResult], Mapping[str, Any]]
) -> list[Change]:
    def of_results(run: ComparedRun) -> dict[str, Mapping[str, Any]]:
        return collect(run.stages, lambda stage: read(stage.result) if stage.result else None)

    return changes_by_stage(of_results(old), of_results(new))


def _data(old: ComparedRun, new: ComparedRun) -> list[Change]:
    """Raw data by its digest or identity, then the datasets that stages made."""
    return [
        *_by_stage(old, new, lambda result: result.ingredients.get("data", {})),
        *_by_stage(old, new, _datasets),
    ]


def _datasets(result: StageResult) -> dict[str, str]:
    outputs = result.outputs.items()
    return {name: one for name, one in outputs if name.partition("/")[0] == "dataset"}


def _code(old: ComparedRun, new: ComparedRun) -> Iterator[Change]:
    records = [dict(side.run.record.get("code") or {}) for side in (old, new)]
    names = {"commit": "commit", "patch_digest": "uncommitted changes"}
    known = [{names[k]: v for k, v in one.items() if k in names and v} for one in records]
    yield from (Change(*one) for one in changed_keys(*known))
    yield from _by_stage(old, new, lambda result: result.ingredients.get("code", {}))


def _placement(old: ComparedRun, new: ComparedRun) -> Iterator[Change]:
    """Profile, host, executor, devices: parts that results do not depend on."""
    records = [_of_run(side.run) for side in (old, new)]
    yield from (_without_secrets(Change(*one)) for one in changed_keys(*records))
    jobs = changes_by_stage(*(collect(side.stages, _of_job) for side in (old, new)))
    # A stage that has not ended may have no record of these yet.
    yield from (one for one in jobs if ABSENT not in (one.first, one.second))


def _of_run(run: RunDirectory) -> dict[str, Any]:
    launch = unless_damaged(lambda: find_record(run.path / "launch.json", LaunchFile))
    settings = flatten(launch["profile"]) if launch else {}
    own = {key: run.record[key] for key in ("profile", "host", "version") if run.record.get(key)}
    return {**own, **{f"{_PROFILE}{key}": value for key, value in settings.items()}}


def _without_secrets(change: Change) -> Change:
    """Hide the values of variables that a profile sets: one may be a password."""
    if not change.key.startswith(f"{_PROFILE}environment."):
        return change
    first, second = (one if one == ABSENT else HIDDEN for one in (change.first, change.second))
    return Change(change.key, first, second)


def _of_job(stage: StageFacts) -> dict[str, Any] | None:
    """The executor, host and devices of the attempt that made what the stage has."""
    attempt = stage.maker.attempt if stage.maker else stage.last_attempt
    if attempt is None:
        return None
    job = unless_damaged(attempt.read_job) or {}
    progress = unless_damaged(attempt.read_progress) or {}
    host = stage.result.host if stage.result else ""
    found = {"executor": job.get("executor"), "host": host, "devices": progress.get("devices")}
    return {key: value for key, value in found.items() if value}
