"""Looks of `plan` into a stage: `--fit`, whether trainings fit their devices; `--show-examples`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.text import table_text
from redco_flow.errors import DoesNotFit, UsageError
from redco_flow.report.numbers import gib, step_seconds
from redco_flow.terminal_text import plain, visible
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.planned_fits import (
    errors_text,
    expected_text,
    like,
    of_same_program,
    recent_comparisons,
)
from redco_flow.tracking.results import find_result

if TYPE_CHECKING:
    from redco_flow.cli.loading import Loaded
    from redco_flow.orchestrate.run.fit import Planned
    from redco_flow.orchestrate.run.objectives import ExpectedStarts
    from redco_flow.spec.load import ResolvedStage


_LEARNT, _READ = "bold green", "dim"


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
    step = f"{step_seconds(time['seconds'])} a step, " if time else ""
    memory = f"{gib(fit['used_bytes'])} of {gib(fit['limit_bytes'])} GiB a device"
    verdict = "" if fit["fits"] else ", nothing fits"
    notes = "".join(f"; {note}" for note in fit["search_notes"])
    expected = expected_text(fit["choice"]) if "choice" in fit else ""
    return f" for {fit['target']}: {chosen} ({step}{memory}{verdict}){expected}{notes}"


def find_fits(
    loaded: Loaded, target: str | None, starts: ExpectedStarts | None, *, searches: bool = False
) -> dict[str, dict[str, Any]]:
    """Return each training's figures, as of `fits_of`; shows the progress on a terminal.

    `recent_runs` says how far off the predictions for recent runs on such devices were, or is "";
    `measured` is the comparison of the newest run of an equal program with its figures, or None.

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
        measured = of_same_program(recent, fit)
        fit["measured"] = measured and {"stage": measured.stage, **measured.to_json()}
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
    used, limit = gib(fit["used_bytes"]), gib(fit["limit_bytes"])
    devices = f"{fit['num_devices']} x {fit['device']}"
    ways = "".join(
        f"\n  {' '.join(one['overrides'])} ({gib(one['used_bytes'])} GiB)"
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
    from redco_flow.report.plan_page import facts_of, tables_of, title_of, verdict_of

    if "error" in fit:
        sys.stderr.write(f"redco-flow: {fit['error']}\n")
        return
    print(f"\n--- {title_of(stage, fit)}: {verdict_of(fit)}")
    memory, *others = tables_of(fit)
    print(table_text(memory))
    print("\n".join(f"{name}: {value}" for name, value in facts_of(fit)))
    for table in others:
        print(table_text(table))
    fits_anything = fit["fits"] or any(one["fits"] for one in fit.get("candidates", ()))
    if not fits_anything and not fit["suggestions"]:
        print("No setting that was tried fits: take more devices, or ones with more memory.")


def compare_on_targets(
    fits: Mapping[str | None, dict[str, dict[str, Any]]], loaded: Loaded
) -> dict[str, list[dict[str, Any]]]:
    """Return each training's best mesh on each of several targets, with its time and its cost."""
    from redco_flow.orchestrate.run.fit import search_word
    from redco_flow.orchestrate.run.objectives import compare_targets

    compared = {}
    for stage in dict.fromkeys(stage for found in fits.values() for stage in found):
        on_each = {str(target): found[stage] for target, found in fits.items() if stage in found}
        objective = search_word(loaded.pipeline.stages[stage])
        compared[stage] = compare_targets(on_each, objective)
    return compared


def print_targets(compared: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print a table for each training: of `compare_on_targets`."""
    from redco_flow.report.plan_page import devices_table

    for stage, devices in compared.items():
        print(f"\n--- {stage} on each target")
        print(table_text(devices_table(devices)))
