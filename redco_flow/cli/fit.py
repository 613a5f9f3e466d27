"""Looks of `plan` into a stage: `--fit`, whether trainings fit their devices; `--show-examples`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.text import columns, duration, number
from redco_flow.errors import DoesNotFit, UsageError
from redco_flow.records import moment
from redco_flow.terminal_text import plain, visible
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.planned_fits import errors_text, expected_text, like, recent_comparisons
from redco_flow.tracking.results import find_result

if TYPE_CHECKING:
    from redco_flow.cli.loading import Loaded
    from redco_flow.orchestrate.run.fit import Planned
    from redco_flow.orchestrate.run.objectives import ExpectedStarts
    from redco_flow.spec.load import ResolvedStage


_LEARNT, _READ = "bold green", "dim"

_PARTS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "batch": "batch",
    "temporaries": "temporaries",
    "other": "other",
}


def print_examples(loaded: Loaded, number: int) -> None:
    """Print the first conversations of each stage that makes a dataset of some.

    Without colours, trained tokens are between «».

    Raises:
        UsageError: there is no such stage, or its tokenizer is not there before it has run.
    """
    from redco_flow.spec.stage_kind import find_stage_kind

    has_shown = False
    for stage in loaded.pipeline.stages.values():
        kind = find_stage_kind(stage.kind)
        try:
            shown = kind.show_examples(stage.config, _dataset_of(loaded, stage), number)
        except ValueError as error:
            raise UsageError(f"stage '{stage.name}': {error}") from error
        if shown is not None:
            _print(stage.name, shown.notes, shown.examples)
            has_shown = True
    if not has_shown:
        raise UsageError("--show-examples shows conversations, and no stage is of recipe chat.")


def _dataset_of(loaded: Loaded, stage: ResolvedStage) -> Path | None:
    fingerprint = loaded.plan.stages[stage.name].fingerprint
    result = find_result(loaded.workspace, fingerprint) if fingerprint else None
    if result is None or "dataset" not in result.outputs:
        return None
    artifact = ArtifactStore(loaded.workspace).find(result.outputs["dataset"])
    return artifact.path if artifact else None


def _print(stage: str, notes: Sequence[str], examples: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=plain(sys.stdout), soft_wrap=True, highlight=False)
    console.print(f"\n--- what {stage} lets a model learn", markup=False)
    for note in notes:
        console.print(note, markup=False)
    for pieces in examples:
        line = Text()
        for text, is_learnt in pieces:
            marked = f"«{visible(text)}»" if is_learnt and not console.color_system else text
            line.append(visible(marked), style=_LEARNT if is_learnt else _READ)
        console.print()
        console.print(line)


@dataclass(frozen=True)
class Chosen:
    """A run with the settings that were left to a search.

    Args:
        fits: the searches' figures, by stage; none of stages that are only reused.
        notes: what was chosen, or why nothing was, for people.
    """

    loaded: Loaded
    fits: dict[str, dict[str, Any]]
    notes: tuple[str, ...]

    def say(self) -> Loaded:
        """Write the notes to standard error; return the run."""
        sys.stderr.writelines(f"note: {note}\n" for note in self.notes)
        return self.loaded


def choose_settings(
    loaded: Loaded,
    *,
    compiles: bool,
    target: str | None = None,
    to_run: bool = True,
    starts: ExpectedStarts | None = None,
) -> Chosen:
    """Decide what trainings leave to a search (`mesh: auto`).

    Args:
        compiles: else only what was searched before is decided.
        target: the devices; None: those of the stages' profiles.
        to_run: search only for stages that will run, and raise where a search fails; else its
            figures are the error.
        starts: for jobs that are to be submitted, or compared; None: no cluster is asked, and
            what depends on its answer is left for the start of the run.

    Raises:
        ConfigError: a profile does not name the devices.
        DoesNotFit: the devices cannot have what was chosen.
        UsageError: a search failed.
    """
    from redco_flow.orchestrate.run import fit as fitting

    searching = fitting.searching_stages(loaded.pipeline, loaded.plan)
    if not searching:
        return Chosen(loaded, {}, ())
    pipeline, notes = loaded.pipeline, dict[str, str]()
    words = {stage.name: f"mesh: {fitting.search_word(stage)}" for stage in searching}
    for stage in searching if target is None else ():
        profile = pipeline.profile_of(stage.name, loaded.profile)
        if why := fitting.why_nothing_to_search(stage, profile, os.environ):
            origin = f"{words[stage.name]}, {why}"
            pipeline = fitting.with_settings(pipeline, stage.name, None, origin)
            notes[stage.name] = f": {why}"
    undecided = [stage for stage in searching if stage.name not in notes]
    running = fitting.trainings_of(loaded.pipeline, loaded.plan, to_run=to_run)
    required = [stage for stage in undecided if stage in running]
    if target is None:
        fitting.refuse_unnamed_devices(required, pipeline, loaded.profile)
    fits = _search(required, loaded, target, starts, compiles=compiles)
    errors = [fit["error"] for fit in fits.values() if "error" in fit]
    if errors and to_run:
        raise UsageError("\n".join(errors))
    # The result of another stage may be deleted before the run needs it.
    reused = [stage for stage in undecided if stage not in required]
    known = fits | _search(reused, loaded, target, None, compiles=False)
    for stage in undecided:
        if (fit := known.get(stage.name)) is None:
            if stage in required:
                notes[stage.name] = " is searched when the run starts; `plan --fit` searches now"
        elif "error" not in fit:
            why = f"{words[stage.name]}, for {fit['target']}"
            pipeline = fitting.with_settings(pipeline, stage.name, fit["chosen"], why)
            decided = _planned(replace(loaded, pipeline=pipeline), target)
            fitting.keep_fit(pipeline.stages[stage.name], decided, fit)
            notes[stage.name] = _chosen_text(fit)
    if target is None:
        from redco_flow.orchestrate.run.device_checks import check_devices

        check_devices(pipeline, loaded.profile, loaded.plan, os.environ)
    lines = tuple(f"stage '{name}': {words[name]}{note}" for name, note in notes.items())
    return Chosen(replace(loaded, pipeline=pipeline), fits, lines)


def _search(
    stages: Sequence[ResolvedStage],
    loaded: Loaded,
    target: str | None,
    starts: ExpectedStarts | None,
    *,
    compiles: bool,
) -> dict[str, dict[str, Any]]:
    """Return the figures of each stage's search, on the best of the devices that it may request."""
    from redco_flow.orchestrate.run.objectives import choose_devices

    def find(stage: ResolvedStage) -> dict[str, Any] | None:
        found = _find_fits([stage], loaded, target, compiles=compiles, searches=True)
        return found.get(stage.name)

    planned = _planned(loaded, target)
    fits = {one.name: choose_devices(one, planned, find, starts) for one in stages}
    return {name: fit for name, fit in fits.items() if fit is not None}


def _chosen_text(fit: dict[str, Any]) -> str:
    resources = fit["chosen"].get("resources", {})
    values = {**fit["chosen"], "resources": None}
    values |= {f"resources.{key}": value for key, value in resources.items()}
    chosen = " ".join(f"{key}={value}" for key, value in values.items() if value is not None)
    time = fit["step_time"]
    step = f"{_seconds(time['seconds'])} a step, " if time else ""
    gib = f"{_gib(fit['used_bytes'])} of {_gib(fit['limit_bytes'])} GiB a device"
    verdict = "" if fit["fits"] else ", nothing fits"
    notes = "".join(f"; {note}" for note in fit["search_notes"])
    expected = expected_text(fit["choice"]) if "choice" in fit else ""
    return f" for {fit['target']}: {chosen} ({step}{gib}{verdict}){expected}{notes}"


def find_fits(
    loaded: Loaded, target: str | None, starts: ExpectedStarts | None, *, searches: bool = False
) -> dict[str, dict[str, Any]]:
    """Return each training's figures, as of `fits_of`; shows the progress on a terminal.

    `recent_runs` says how far off the predictions for recent runs on such devices were, or is "".

    Raises:
        UsageError: no stage trains, or a search failed.
    """
    from redco_flow.orchestrate.run.fit import trainings_of

    stages = trainings_of(loaded.pipeline, loaded.plan)
    if not stages:
        raise UsageError("--fit is for stages of kind train, and the plan has none.")
    chosen = choose_settings(loaded, compiles=True, target=target, to_run=False, starts=starts)
    loaded = chosen.say()
    if searches:
        for name in chosen.fits:
            said = "--search has no effect, because its `mesh` is left to a search"
            sys.stderr.write(f"note: stage '{name}': {said}\n")
    written = [loaded.pipeline.stages[one.name] for one in stages if one.name not in chosen.fits]
    found = {**_find_fits(written, loaded, target, searches=searches), **chosen.fits}
    fits = {stage.name: found[stage.name] for stage in stages}
    recent = recent_comparisons(loaded.workspace)
    for fit in fits.values():
        fit["recent_runs"] = errors_text(like(recent, fit))
    return fits


def _find_fits(
    stages: Sequence[ResolvedStage],
    loaded: Loaded,
    target: str | None,
    *,
    compiles: bool = True,
    searches: bool = False,
) -> dict[str, dict[str, Any]]:
    from redco_flow.orchestrate.run.fit import fits_of

    planned = _planned(loaded, target)
    if not compiles:
        return dict(fits_of(stages, planned, None))

    from rich.console import Console

    with Console(file=plain(sys.stderr)).status("planning") as status:

        def show(doing: str, seconds: float) -> None:
            status.update(f"{visible(doing)} … {seconds:.0f} s")

        return dict(fits_of(stages, planned, show, searches=searches))


def _planned(loaded: Loaded, target: str | None) -> Planned:
    from redco_flow.orchestrate.run.fit import Planned

    return Planned(
        loaded.pipeline, loaded.profile, loaded.workspace, loaded.plan, loaded.sources, target
    )


def fits_of_run(
    loaded: Loaded, *, compiles: bool, refuses: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the figures of the trainings that will run, for the devices of their profiles.

    Args:
        compiles: else only what was planned before counts.
        refuses: whether one that does not fit is an error.

    Raises:
        DoesNotFit: every training that does not fit, and the overrides with which it fits.
        UsageError: whether one that is to be compiled fits is not known.
    """
    from redco_flow.orchestrate.run.fit import trainings_of

    stages = trainings_of(loaded.pipeline, loaded.plan, to_run=True)
    fits = _find_fits(stages, loaded, None, compiles=compiles)
    if not refuses:
        return fits
    errors = [fit["error"] for fit in fits.values() if "error" in fit]
    refuse_unfit(list(fits.items()), errors)
    if errors:
        raise UsageError("\n".join(errors))
    return fits


def refuse_unfit(fits: Sequence[tuple[str, Mapping[str, Any]]], errors: Sequence[str] = ()) -> None:
    """Raise where a training does not fit its devices.

    Args:
        fits: stages with their figures.
        errors: what else the message says.

    Raises:
        DoesNotFit: every such training, and the overrides with which it fits.
    """
    found = dict.fromkeys(_refusal(name, fit) for name, fit in fits if not fit.get("fits", True))
    if found:
        raise DoesNotFit("\n".join([*errors, *found, "`run --no-fit` submits it in any case."]))


def _refusal(stage: str, fit: Mapping[str, Any]) -> str:
    used, limit = _gib(fit["used_bytes"]), _gib(fit["limit_bytes"])
    devices = f"{fit['num_devices']} x {fit['device']}"
    ways = "".join(
        f"\n  {' '.join(one['overrides'])} ({_gib(one['used_bytes'])} GiB)"
        for one in fit["suggestions"]
    )
    fitting = f" It fits with:{ways}" if ways else ""
    assumed = "".join(f"\n  note: {note}" for note in fit["notes"])
    return (
        f"stage '{stage}' does not fit {devices}, by `plan --fit`: {used} of {limit} GiB a device."
        f"{fitting}{assumed}"
    )


def exit_code_of_fits(fits: dict[str, dict[str, Any]]) -> int:
    """Return 0 where all fit; else the exit code of the first that could not be planned, or 3."""
    failed = (fit["exit_code"] for fit in fits.values() if "error" in fit)
    all_fit = all(fit.get("fits") for fit in fits.values())
    return next(failed, 0 if all_fit else DoesNotFit.exit_code)


def print_fit(stage: str, fit: dict[str, Any]) -> None:
    """Print one training's figures, or why there are none."""
    if "error" in fit:
        sys.stderr.write(f"redco-flow: {fit['error']}\n")
        return
    mesh = " x ".join(f"{axis} {size}" for axis, size in fit["mesh"].items())
    verdict = "fits" if fit["fits"] else "does not fit"
    of = f"{_gib(fit['used_bytes'])} of {_gib(fit['limit_bytes'])} GiB a device"
    devices = f"{fit['num_devices']} x {fit['device']}{f' ({mesh})' if mesh else ''}"
    if fit["hosts_of_fabrics"]:
        numbers = fit["hosts_of_fabrics"]
        devices += f", {' + '.join(map(str, numbers))} hosts in {len(numbers)} fabrics"
    print(f"\n--- {stage} on {devices}: {verdict}, {of}")
    parts = {
        key: size for key, size in fit["parts_bytes"].items() if key != "other" or size >= 2**20
    }
    rows = [[name, _gib(parts[key])] for key, name in _PARTS.items() if key in parts]
    print(columns([*rows, *_beside(fit)], ["PART", "GiB"]))
    print("; ".join(_facts(fit)))
    print(f"step time {_step_time(fit)}")
    if fit["step_time"]:
        _print_traffic(fit["step_time"]["traffic"])
    figures = (f"{k} {v['value']:g} ({v['origin']})" for k, v in fit["device_facts"].items())
    print(f"figures of {fit['device']}: {', '.join(figures)}")
    if fit["recent_runs"]:
        print(fit["recent_runs"])
    for note in (*fit["notes"], *fit.get("search_notes", ())):
        print(f"note: {note}")
    if "candidates" in fit:
        _print_candidates(fit["candidates"])
    if "devices" in fit:
        _print_devices(fit["devices"])
    if not fit["fits"] and not any(one["fits"] for one in fit.get("candidates", ())):
        _print_suggestions(fit)


def _beside(fit: dict[str, Any]) -> list[list[str]]:
    """Return what is part of another part, or of another memory."""
    rows = [["gradients, among temporaries", _gib(fit["gradients_bytes"])]]
    if fit["host_bytes_per_device"]:
        rows.append(["offloaded to the host, a device", _gib(fit["host_bytes_per_device"])])
    return rows


def _facts(fit: dict[str, Any]) -> list[str]:
    trained = "all trained"
    if fit["num_trained"] < fit["num_parameters"]:
        trained = f"{fit['num_trained']:,} trained"
    facts = [f"{fit['num_parameters']:,} parameters, {trained}"]
    if fit["model_flops_per_step"] is not None:
        facts.append(f"{fit['model_flops_per_step']:.3g} model FLOPs a step")
    if fit["program_flops_per_device"] is not None:
        kernels = sum(fit["kernel_runs_per_device"].values())
        besides = f" and {kernels} runs of kernels" if kernels else ""
        facts.append(f"{fit['program_flops_per_device']:.3g} FLOPs{besides} compiled for a device")
    steps = fit["num_steps"]
    facts.append("steps not known before preprocessing" if steps is None else f"{steps:,} steps")
    facts.append(f"checkpoint {_gib(fit['checkpoint_bytes'])} GiB")
    facts.append(f"planned in {fit['planning_cpu_seconds']:.0f} s of CPU time")
    return facts


def _step_time(fit: dict[str, Any]) -> str:
    """Return the predicted time of a step and what follows from it, or why it is not known."""
    time = fit["step_time"]
    if time is None:
        return f"not known: {fit['step_time_unknown']}"
    least, most = (_seconds(time[key]) for key in ("least_seconds", "most_seconds"))
    longest = sorted(time["parts_seconds"].items(), key=lambda part: -part[1])
    parts = ", ".join(f"{part} {_seconds(seconds)}" for part, seconds in longest)
    facts = [f"{_seconds(time['seconds'])} ({least} to {most}): {parts}"]
    per_second = time["tokens_per_second"] or time["rows_per_second"]
    facts.append(f"{per_second:,.0f} {'tokens' if time['tokens_per_second'] else 'rows'}/s")
    if time["all_steps_seconds"] is not None:
        hours = f"{number(time['device_hours'])} GPU-hours"
        facts.append(f"all steps {duration(time['all_steps_seconds'])}, {hours}")
    return "; ".join(facts)


def _print_traffic(traffic: Sequence[dict[str, Any]]) -> None:
    """Print what is sent along each axis of the mesh, whether kernels hide its time or not."""
    rows = [
        [one["axes"], one["link"], _gib(one["bytes_per_device"]), _seconds(one["seconds"])]
        for one in traffic
    ]
    if rows:
        print(
            columns(rows, ["SENT ALONG", "SLOWEST LINK", "GiB A DEVICE SENDS", "TIME ON THE LINK"])
        )


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g} s"


def _print_suggestions(fit: dict[str, Any]) -> None:
    if not fit["suggestions"]:
        print("No setting that was tried fits: take more devices, or ones with more memory.")
        return
    rows = [
        [" ".join(one["overrides"]), _gib(one["used_bytes"]), _seconds(one["step_seconds"])]
        for one in fit["suggestions"]
    ]
    print(columns(rows, ["FITS WITH", "GiB", "STEP"]))


def _print_candidates(candidates: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            " ".join(one["overrides"]) or "as it is",
            "" if one["used_bytes"] is None else _gib(one["used_bytes"]),
            _seconds(one["step_seconds"]) if one["fits"] else "",
            one["reason"],
        ]
        for one in candidates
    ]
    print(columns(rows, ["BEST FIRST", "GiB", "STEP", "WHY NOT"]))


def print_targets(fits: Mapping[str | None, dict[str, dict[str, Any]]], loaded: Loaded) -> None:
    """Print each training's best mesh on each of several targets, with its time and its cost."""
    from redco_flow.orchestrate.run.fit import search_word
    from redco_flow.orchestrate.run.objectives import compare_targets

    for stage in dict.fromkeys(stage for found in fits.values() for stage in found):
        print(f"\n--- {stage} on each target")
        on_each = {str(target): found[stage] for target, found in fits.items() if stage in found}
        objective = search_word(loaded.pipeline.stages[stage])
        _print_devices(compare_targets(on_each, objective))


def _print_devices(devices: Sequence[dict[str, Any]]) -> None:
    """Print a training's best mesh on each of several devices, the best first."""
    header = ["DEVICES", "MESH", "STEP", "ALL STEPS", "GPU-HOURS", "START", "END", "WHY NOT"]
    rows = [
        [
            one["target"],
            one["mesh"],
            _seconds(one["step_seconds"]),
            duration(one["all_steps_seconds"]),
            number(one["device_hours"]),
            moment(one["expected_start"]) if one["expected_start"] else "",
            moment(one["expected_end"]) if one["expected_end"] else "",
            one["reason"],
        ]
        for one in devices
    ]
    shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
    print(columns([[row[i] for i in shown] for row in rows], [header[i] for i in shown]))


def _gib(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f}" if gib >= 1 else f"{gib:.3f}"
