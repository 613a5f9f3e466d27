"""Choose how many devices a training gets: fastest, cheapest, or with which it ends first.

`mesh: auto` takes the devices that `resources` requests. For `mesh: cheapest` and `mesh: first`
they are the most, and are compared with fewer. On each number of devices the fastest mesh is also
the cheapest one and ends first, so each has one search, as of `mesh: auto`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from redco_flow.errors import ClusterUnreachable, RedcoFlowError
from redco_flow.launch.call import JobResources
from redco_flow.orchestrate.run.calls import job_resources
from redco_flow.orchestrate.run.fit import Planned, gpus_of_host, search_word
from redco_flow.spec.load import ResolvedStage
from redco_flow.spec.pipeline import Resources
from redco_flow.spec.profile import Profile
from redco_flow.spec.stage_kind import find_stage_kind

if TYPE_CHECKING:
    from redco_flow.launch.executor import CallExecutor, ExpectedStart

FASTEST, CHEAPEST, FIRST = "auto", "cheapest", "first"
"""Objectives, as the values of `mesh`."""

_AS_GOOD = 1.03


@dataclass(frozen=True)
class Option:
    """Devices, and the prediction for a training's best mesh on them.

    Args:
        target: the devices, as h100x8.
        mesh: for people.
        step_seconds: None: nothing fits, or the time is not known.
        num_steps: None: not known before preprocessing.
        start: when its job would start, in seconds since 1970; None: not known.
        start_source: by what, for people.
        refusal: why it cannot be chosen.
    """

    target: str
    mesh: str = ""
    num_devices: int = 0
    step_seconds: float | None = None
    num_steps: int | None = None
    start: float | None = None
    start_source: str = ""
    refusal: str = ""

    @classmethod
    def of_fit(cls, target: str, fit: Mapping[str, Any]) -> Option:
        """Return what a plan says: of its best candidate or, without a search, of its settings."""
        if "error" in fit:
            return cls(target, refusal=f"not planned: {fit['error']}")
        mesh = " x ".join(f"{axis} {size}" for axis, size in fit["mesh"].items())
        fits, step_time = fit["fits"], fit["step_time"]
        seconds = step_time["seconds"] if step_time else None
        if best := next(iter(fit.get("candidates", ())), None):
            mesh = " ".join(best["overrides"]) or mesh
            fits, seconds = best["fits"], best["step_seconds"]
        found = cls(target, mesh, fit["num_devices"], seconds, fit["num_steps"])
        if not fits:
            return replace(found, step_seconds=None, refusal="does not fit")
        return found if seconds else replace(found, refusal="step time not known")

    @property
    def seconds(self) -> float | None:
        """The time of all steps."""
        return self.num_steps and self.step_seconds and self.num_steps * self.step_seconds

    @property
    def device_hours(self) -> float | None:
        """The time of all steps on all devices."""
        return self.seconds and self.seconds * self.num_devices / 3600

    @property
    def end(self) -> float | None:
        """When all steps would be done, in seconds since 1970."""
        return self.start and self.seconds and self.start + self.seconds


def ranked(options: Sequence[Option], objective: str, now: float = 0) -> list[tuple[Option, str]]:
    """Return the options, the best first, each with the reason why it is not the best.

    Of those that are as fast or end as early, within 3 %, the one with the fewest devices is the
    best; of those that are as cheap, the fastest.

    Args:
        now: in seconds since 1970; ends are compared by the time until then.
    """

    def cost(option: Option) -> float:
        if objective == FIRST:
            return option.end - now if option.end else math.inf
        num_devices = option.num_devices if objective == CHEAPEST else 1
        return option.step_seconds * num_devices if option.step_seconds else math.inf

    def second(option: Option) -> float:
        return (option.step_seconds or 0) if objective == CHEAPEST else option.num_devices

    in_order = sorted(options, key=cost)
    least = min(map(cost, options))
    if least == math.inf:
        return [(one, one.refusal) for one in options]
    best = min((one for one in in_order if cost(one) <= _AS_GOOD * least), key=second)
    found = [(best, "")]
    for one in in_order:
        if one is not best:
            reason = one.refusal or _reason(cost(one), cost(best), objective)
            found.append((one, reason))
    return found


def _reason(cost: float, best: float, objective: str) -> str:
    """Say by how much an option is worse than the best one."""
    if cost <= _AS_GOOD * best:
        return {
            FASTEST: "as fast, within 3 %, with more devices",
            CHEAPEST: "as cheap, within 3 %, but slower",
            FIRST: "ends as early, within 3 %, with more devices",
        }[objective]
    if objective == FIRST:
        return "ends later"
    what = "slower" if objective == FASTEST else "more GPU-hours"
    return f"{100 * (cost / best - 1):.0f} % {what}"


class ExpectedStarts:
    """When jobs would start, by their cluster, which is asked once for equal requests."""

    def __init__(self) -> None:
        self._executors: dict[str, CallExecutor] = {}
        self._answers: dict[tuple[str, JobResources], ExpectedStart | Exception] = {}

    def of(self, stage: ResolvedStage, planned: Planned) -> ExpectedStart:
        """Return when a stage's job would start; not before now.

        Raises:
            RedcoFlowError, OSError: as of `CallExecutor.expected_start`.
        """
        profile = planned.pipeline.profile_of(stage.name, planned.profile)
        section = profile.section.model_dump_json()
        key = (section, job_resources(stage, profile))
        if key not in self._answers:
            # Imported here: what only looks at plans never pays for the executors.
            from redco_flow.launch.executor import make_executor
            from redco_flow.orchestrate.run.rendering import stage_to_render

            run = planned.workspace.runs / f"{planned.pipeline.name}-RUN"
            if section not in self._executors:
                self._executors[section] = make_executor(profile, os.environ)
            try:
                to_render = stage_to_render(run, stage, profile)
                self._answers[key] = self._executors[section].expected_start(*to_render)
            except (RedcoFlowError, OSError) as error:
                self._answers[key] = error
        answer = self._answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer._replace(time=max(answer.time, time.time()))


def choose_devices(
    stage: ResolvedStage,
    planned: Planned,
    find: Callable[[ResolvedStage], dict[str, Any] | None],
    starts: ExpectedStarts | None,
) -> dict[str, Any] | None:
    """Return the figures of a stage's search on the best number of devices; None: not decided.

    `chosen` then has the `resources` that differ from the stage's. Where numbers were compared,
    `devices` has them all, the best first, and `choice` the objective and what was expected. An
    error of the requested number is the answer; other numbers with errors are left out.

    Args:
        find: returns the figures of a stage with other resources, or None.
        starts: None: no cluster is asked, and what depends on its answer is not decided.
    """
    word, (sizes, note) = search_word(stage), _sizes(stage, planned)
    if word == FIRST and len(sizes) > 1 and starts is None:
        return None
    fits, options, notes = [], [], [note] if note else []
    for sized in sizes:
        fit = find(sized)
        if fit is None or ("error" in fit and sized is stage):
            return fit
        request, changes = sized.resources, _changes(stage, sized.resources)
        texts = [f"stages.{stage.name}.resources.{key}={value}" for key, value in changes.items()]
        fits.append(fit := _with_request(fit, changes, texts))
        target = fit.get("target", f"{request.num_hosts} x {request.gpus_per_host} GPUs")
        options.append(Option.of_fit(target, fit))
    objective = word if len(options) > 1 else FASTEST
    now, no_start = time.time(), ""
    if objective == FIRST and starts is not None:
        options, why = _with_starts(options, sizes, planned, starts)
        if why:
            instead = "the fastest is chosen (within 3 %, the fewest devices)"
            objective, no_start = FASTEST, f"no expected start ({why.rstrip('.')}): {instead}"
            notes.append(no_start)
    order = ranked(options, objective, now)
    best, _ = order[0]
    fit = fits[options.index(best)]
    notes += [f"{one.target} is left out: {one.refusal}" for one, _ in order[1:] if one.refusal]
    if objective == FIRST:
        notes += _walltime_note(best, stage, planned)
    fit = {**fit, "search_notes": [*fit["search_notes"], *notes]}
    if len(options) > 1:
        fit["devices"] = [_row(one, reason) for one, reason in order]
        fit["choice"] = {
            "objective": word,
            "requested": options[0].target,
            "no_start": no_start,
            "expected_start": _iso(best.start),
            "expected_end": _iso(best.end),
        }
    return fit


def compare_targets(fits: Mapping[str, Mapping[str, Any]], objective: str) -> list[dict[str, Any]]:
    """Return the rows of `devices` for the figures of a training on several targets.

    Args:
        objective: of a stage that is to end first, the fastest is the best: no queue is asked.
    """
    options = [Option.of_fit(target, fit) for target, fit in fits.items()]
    order = ranked(options, CHEAPEST if objective == CHEAPEST else FASTEST)
    return [_row(one, reason) for one, reason in order]


def _sizes(stage: ResolvedStage, planned: Planned) -> tuple[list[ResolvedStage], str]:
    """Return the stage, and with each other request to compare; and why there are no others."""
    objective, sizes = search_word(stage), [stage]
    if objective == FASTEST:
        return sizes, ""
    if planned.target is not None:
        return sizes, "" if objective == CHEAPEST else "no queue is asked for --target"
    profile = planned.pipeline.profile_of(stage.name, planned.profile)
    if stage.config.group is not None and profile.section.runs_groups:
        return sizes, f"group '{stage.config.group}' shares one job, which keeps its devices"
    if objective == FIRST and not profile.section.tells_starts:
        why = f"executor '{profile.executor}' does not say when a job would start"
        return sizes, f"{why}: the fastest mesh is chosen"
    kind, request = find_stage_kind(stage.kind), stage.resources
    while (fewer := _fewer(request, profile)) is not None:
        request, sized = fewer, _with_resources(stage, fewer)
        gpus = gpus_of_host(sized, profile, os.environ) or request.gpus_per_host
        # Context shards, for example, have to divide the devices.
        if not any(kind.device_problems(sized.config, gpus * request.num_hosts)):
            sizes.append(sized)
    return sizes, "" if len(sizes) > 1 else "there is no smaller number of devices to compare"


def _fewer(resources: Resources, profile: Profile) -> Resources | None:
    """Return the next smaller request: of fewer hosts or, on one host, of fewer GPUs."""
    if resources.num_hosts > 1:
        return resources.model_copy(update={"num_hosts": _largest_divisor(resources.num_hosts)})
    section = profile.section
    gpus = _largest_divisor(resources.gpus_per_host, section.processes_per_host)
    if not section.gives_requested_gpus or not gpus:
        return None
    return resources.model_copy(update={"gpus_per_host": gpus})


def _largest_divisor(number: int, of: int = 1) -> int:
    """Return the largest divisor below a number that is a multiple of `of`; 0 for none."""
    return max((one for one in range(of, number, of) if number % one == 0), default=0)


def _with_resources(stage: ResolvedStage, resources: Resources) -> ResolvedStage:
    config = stage.config.model_copy(update={"resources": resources})
    return replace(stage, config=config, resources=resources)


def _changes(stage: ResolvedStage, request: Resources) -> dict[str, int]:
    return {
        key: value
        for key in ("num_hosts", "gpus_per_host")
        if (value := getattr(request, key)) != getattr(stage.resources, key)
    }


def _with_request(
    fit: Mapping[str, Any], changes: Mapping[str, int], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return figures whose settings and overrides are for the pipeline as it is written."""
    if not changes or "error" in fit:
        return dict(fit)
    rows = {
        name: [{**one, "overrides": [*overrides, *one["overrides"]]} for one in fit[name]]
        for name in ("candidates", "suggestions")
    }
    return {**fit, **rows, "chosen": {**fit["chosen"], "resources": dict(changes)}}


def _with_starts(
    options: Sequence[Option],
    stages: Sequence[ResolvedStage],
    planned: Planned,
    starts: ExpectedStarts,
) -> tuple[list[Option], str]:
    """Return the options with the expected starts of their jobs; and why none is known, if so."""
    if options[0].num_steps is None:
        return list(options), "the number of steps is not known before preprocessing"
    found, refusals = [], []
    for option, stage in zip(options, stages, strict=True):
        try:
            if option.seconds:
                expected = starts.of(stage, planned)
                option = replace(option, start=expected.time, start_source=expected.source)
            found.append(option)
        except ClusterUnreachable as error:  # the others alone would be half a comparison
            return list(options), str(error)
        except (RedcoFlowError, OSError) as error:
            refusals.append(str(error))
            found.append(replace(option, refusal=str(error)))
    if refusals and not any(one.start for one in found):
        return list(options), refusals[0]
    return found, ""


def _walltime_note(option: Option, stage: ResolvedStage, planned: Planned) -> list[str]:
    """Say where a training needs more jobs than the one whose start was asked for."""
    profile = planned.pipeline.profile_of(stage.name, planned.profile)
    minutes = job_resources(stage, profile).walltime_minutes
    if minutes is None or option.seconds is None or option.seconds <= 60 * minutes:
        return []
    return [f"all steps take longer than walltime_minutes={minutes:g}: later jobs may wait again"]


def _row(option: Option, reason: str) -> dict[str, Any]:
    """Return an option as JSON, with units in the names."""
    return {
        "target": option.target,
        "mesh": option.mesh,
        "num_devices": option.num_devices,
        "step_seconds": option.step_seconds,
        "all_steps_seconds": option.seconds,
        "device_hours": option.device_hours,
        "expected_start": _iso(option.start),
        "expected_end": _iso(option.end),
        "start_source": option.start_source,
        "reason": reason,
    }


def _iso(seconds: float | None) -> str | None:
    """Return seconds since 1970 as in records."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
