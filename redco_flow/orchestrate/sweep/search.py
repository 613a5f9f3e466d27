"""Make the points of a sweep one by one, each chosen from those that have ended (ask and tell).

Used by the sweep's process. What it knows is in files: sweep.json has all that reading a point
takes, points.jsonl the points so far, and their runs how they ended. A point is recorded before its
run is written, so the next process after a `kill -9` makes the same point.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from redco_flow.errors import ConfigError, DoesNotFit, RedcoFlowError, UsageError
from redco_flow.orchestrate.pins.aliases import AliasPins
from redco_flow.orchestrate.pins.hub import HubPins
from redco_flow.orchestrate.run.cancel import Log, has_ended
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.ingredients import CodeState
from redco_flow.orchestrate.run.plan import Plan, make_plan
from redco_flow.orchestrate.run.start import check_run, remove_half_written, write_run
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.orchestrate.sweep.logged_metric import LoggedMetric
from redco_flow.orchestrate.sweep.successive_halving import Mode
from redco_flow.spec.load import PipelineFile, ResolvedPipeline, load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.spec.sweep_points import Trial, ends_of, read_space
from redco_flow.spec.yaml import parse_yaml
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.results import differences
from redco_flow.tracking.run_directory import RunDirectory, new_run_id
from redco_flow.tracking.sweep_directory import SampledPoint, SweepDirectory
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_SECONDS_BETWEEN_TRIES = (5.0, 15.0, 60.0, 300.0, 900.0)
_OF_A_POINT = (ConfigError, DoesNotFit, UsageError)
"""Errors that settings can cause; a file or a hub that is away for a while, too."""


def require_optuna() -> None:
    """Raise where Optuna is not installed.

    Raises:
        UsageError: says what to do.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "--sampler tpe needs the package optuna, which is not installed: "
            "pip install 'redco-flow[optuna]'."
        )


@dataclass(frozen=True)
class Search:
    """Settings of the sampler that chooses a sweep's points: `search` in sweep.json.

    Args:
        number: of points.
        settings: the texts of `--sweep`.
        stage, metric, mode: what is minimized or maximized.
        path, text: the pipeline's file, as it was at the start.
        overrides, profile_name, from_stage, until_stage, force: as the user gave them.
        documents: the pipeline at each of `ends_of` the settings, as it was at the start.
    """

    sampler: Literal["tpe"]
    seed: int
    number: int
    settings: Sequence[str]
    stage: str
    metric: str
    mode: Mode
    path: str
    text: str
    overrides: Sequence[str]
    profile_name: str
    from_stage: str | None
    until_stage: str | None
    force: Sequence[str]
    documents: Sequence[dict[str, Any]]

    def describe(self, max_parallel: int) -> str:
        """For people."""
        what = f"{'lowest' if self.mode == 'min' else 'highest'} {self.stage}/{self.metric}"
        head = f"{self.number} points, at most {max_parallel} at a time, by {self.sampler} for the"
        return "\n".join([f"{head} {what}:", *(f"  {text}" for text in self.settings)])


class PointMaker:
    """Makes the points of one sweep.

    Args:
        sweep: its lease is held by this process.
        log: takes a line on each point that becomes no run.

    Attributes:
        is_open: whether this process is to make further points.
    """

    def __init__(self, sweep: SweepDirectory, log: Log) -> None:
        assert sweep.search is not None
        self._sweep = sweep
        self._log = log
        self._search = Search(**sweep.search)
        self._space = read_space(self._search.settings)
        self._launch = LaunchRecord.read(sweep)
        self._workspace = Workspace(Path(self._launch.workspace))
        own = self._launch.stage_profiles.items()
        self._own_profiles = {stage: Profile.from_record(one) for stage, one in own}
        self._hub, self._aliases = HubPins(), AliasPins()
        self._failed: set[str] = set()
        self._is_checked = False
        self._num_errors, self._not_before = 0, 0.0
        self.is_open = sweep.num_open > 0

    @property
    def is_due(self) -> bool:
        """Whether a point is to be made now; after an error, later."""
        return self.is_open and time.monotonic() >= self._not_before

    def make(self) -> RunDirectory | None:
        """Choose the next point and write its run; None where it becomes no run.

        What stops it is recorded in the sweep, and tried again a few times unless only the user can
        change it.
        """
        try:
            made = self._make()
        except (RedcoFlowError, OSError) as error:
            self._put_off(error)
            return None
        self._num_errors = 0
        with suppress(OSError):  # the point is made; the record is removed after the next one
            self._sweep.clear_problem()
        self.is_open = self._sweep.num_open > 0
        return made

    def record_scores(self) -> None:
        """Record the scores of the points that have ended since the last one was made."""
        try:
            for point in self._sweep.read_sampled_points():
                self._trial(point)
        except (RedcoFlowError, OSError) as error:
            self._log(f"scores are not recorded: {error}")

    def _put_off(self, error: RedcoFlowError | OSError) -> None:
        pauses = () if isinstance(error, UsageError) else _SECONDS_BETWEEN_TRIES
        if self._num_errors < len(pauses):
            self._not_before = time.monotonic() + pauses[self._num_errors]
            self._num_errors += 1
            self._log(f"the next point cannot be made, trying again: {error}")
        else:
            self.is_open = False
            self._log(f"no further points until the sweep is resumed: {error}")
        with suppress(OSError):  # a full disk
            self._sweep.write_problem(str(error))

    def _make(self) -> RunDirectory | None:
        if not self._is_checked:
            self._check_ends()
            self._is_checked = True
        points = self._sweep.read_sampled_points()
        if points and points[-1].state == "asked":
            return self._write(points[-1])
        overrides = self._ask(points)
        if any(one.overrides == overrides for one in points):
            self._sweep.add_sampled_point(SampledPoint(len(points), "", overrides, "repeated"))
            self._log(f"point {len(points)} repeats an earlier one: {'  '.join(overrides)}")
            return None
        run_id = new_run_id(self._search.documents[0]["name"])
        point = SampledPoint(len(points), run_id, overrides, "asked")
        self._sweep.add_sampled_point(point)
        return self._write(point)

    def _ask(self, points: Sequence[SampledPoint]) -> list[str]:
        # Imported here: a process that only ends a sweep's runs needs no Optuna.
        from redco_flow.orchestrate.sweep.optuna_sampler import suggest

        trials = list(map(self._trial, points))
        return list(suggest(self._space, trials, seed=self._search.seed, mode=self._search.mode))

    def _trial(self, point: SampledPoint) -> Trial:
        """Return a point as it is now; the score of one that has ended is recorded."""
        if point.state != "made" or point.run in self._failed:  # Optuna leaves failed ones out
            return Trial(point.overrides, "fail")
        if point.outcome:
            return Trial(point.overrides, point.outcome, point.score, point.step)
        run = RunDirectory(self._workspace.runs / point.run)
        if not has_ended(run):
            return Trial(point.overrides, "running")
        state = (unless_damaged(run.read_state) or {}).get("state")
        logged = LoggedMetric(self._search.stage, self._search.metric, self._log)
        found = sorted(logged.read_new(run), key=lambda one: (one.step, one.attempt))
        value, step = (found[-1].value, found[-1].step) if found else (None, 0)
        if state == State.STOPPED_EARLY:
            point = replace(point, outcome="pruned", score=value, step=step)
        elif state == State.COMPLETED and value is not None:
            point = replace(point, outcome="complete", score=value, step=step)
        else:
            if state == State.COMPLETED:
                self._log(f"{run.id} counts as failed: it has no {self._search.metric}")
            self._failed.add(point.run)
        if point.outcome:
            self._sweep.add_sampled_point(point)
        return self._trial(point)

    def _write(self, point: SampledPoint) -> RunDirectory | None:
        run = RunDirectory(self._workspace.runs / point.run)
        if run.path.exists():  # a process was killed while it wrote the run, or after that
            launch = unless_damaged(lambda: LaunchRecord.read(run))
            if launch is not None or find_holder(run) is not None:
                self._sweep.add_sampled_point(replace(point, state="made"))
                return run
            remove_half_written(run)
        try:
            made = self._write_run(point)
        except _OF_A_POINT:
            self._check_ends()  # raises where it is no fault of the point's
            try:
                made = self._write_run(point)
            except _OF_A_POINT as error:
                refused = replace(point, state="refused", message=str(error))
                self._sweep.add_sampled_point(refused)
                self._log(f"point {point.number} is refused: {error}")
                return None
        self._sweep.add_sampled_point(replace(point, state="made"))
        return made

    def _write_run(self, point: SampledPoint) -> RunDirectory:
        pipeline, plan = self._load(point.overrides)
        return write_run(
            pipeline,
            self._profile,
            self._workspace,
            plan,
            profile_name=self._search.profile_name,
            overrides=[*self._search.overrides, *point.overrides],
            argv=self._sweep.record["argv"],
            sweep=self._sweep.id,
            run_id=point.run,
            code=CodeState.read(Path.cwd()),
            like=next(iter(self._sweep.runs), None),
        )

    @cached_property
    def _file(self) -> PipelineFile:
        path = self._search.path
        document, problems = parse_yaml(self._search.text, path)
        return PipelineFile(Path(path), document, tuple(problems))

    @cached_property
    def _profile(self) -> Profile:
        workspace = str(self._workspace.root)
        return Profile.from_record({**self._launch.profile, "workspace": workspace})

    def _load(self, overrides: Sequence[str]) -> tuple[ResolvedPipeline, Plan]:
        search = self._search
        everything = [*search.overrides, *overrides]
        pipeline = load_pipeline(self._file, everything, self._profile, looks_into_data=True)
        pipeline = replace(pipeline, profiles=self._own_profiles)  # their files may have changed
        pipeline, hub = self._hub.pinned(pipeline, self._workspace)
        pipeline, aliases = self._aliases.pinned(pipeline, self._workspace)
        plan = make_plan(
            pipeline,
            self._workspace,
            from_stage=search.from_stage,
            until_stage=search.until_stage,
            force=search.force,
        )
        check_devices(pipeline, self._profile, plan, os.environ)
        return pipeline, replace(plan, hub=hub, aliases=aliases)

    def _check_ends(self) -> None:
        """Raise where an end cannot be a run now, or means another one than at the start."""
        self._hub, self._aliases = HubPins(), AliasPins()  # errors of the hub are remembered
        for end, before in zip(ends_of(self._space), self._search.documents, strict=True):
            pipeline, plan = self._load(end)
            check_run(pipeline, self._profile, plan)
            for one in differences(before, pipeline.document):
                raise UsageError(
                    f"{self._sweep.id} gets no further points, which would differ from those "
                    f"before: '{one.key}' was {one.old!r} and is {one.new!r}. A variable of the "
                    f"environment, an alias, a revision on the hub or redco-flow has changed. "
                    f"Restore it and `redco-flow resume {self._sweep.id}`, or start another sweep."
                )
