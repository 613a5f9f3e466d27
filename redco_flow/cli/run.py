"""Verbs that start and stop work: run, plan, resume, retry, cancel."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.arguments import (
    Verbs,
    add_json,
    add_pipeline,
    add_run,
    add_workspace,
    workspace_of,
)
from redco_flow.cli.fit import (
    choose_settings,
    compare_on_targets,
    exit_code_of_fits,
    find_fits,
    fits_of_run,
    print_examples,
    print_fit,
    print_targets,
)
from redco_flow.cli.loading import Loaded, Loader
from redco_flow.cli.status import follow_run, status_text
from redco_flow.cli.sweep import add_sweep, run_sweep
from redco_flow.cli.sweep_view import attend_sweep, follow_launchers, read_sweep_view
from redco_flow.cli.text import columns
from redco_flow.cli.view import read_run_view
from redco_flow.errors import UsageError
from redco_flow.orchestrate.run.launcher import launcher_status
from redco_flow.tracking.attempt import State
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, find_single_run, find_sweep

if TYPE_CHECKING:
    from redco_flow.orchestrate.sweep.planned_jobs import PlannedPoint


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    run, plan = _add_run(verbs), _add_plan(verbs)
    resume = verbs.add("resume", _resume)
    retry = verbs.add("retry", _retry)
    retry.add_argument(
        "--failed", action="store_true", help="retry failed stages only, not cancelled ones"
    )
    cancel = verbs.add("cancel", _cancel)
    for parser in (run, plan):
        add_pipeline(parser)
        parser.add_argument(
            "--ahead",
            action="store_true",
            help="submit all stages at once as dependent jobs, so that no launcher is needed",
        )
    for parser in (run, resume, retry):
        parser.add_argument(
            "--launcher",
            default="",
            metavar="WHERE",
            help="what drives the run: local (a process on this machine), or slurm (a small job)",
        )
    for parser in (resume, retry):
        parser.add_argument("--detach", action="store_true", help="do not follow the run")
    for parser in (resume, retry, cancel):
        add_run(parser)
        add_workspace(parser)
    for parser in (run, plan, resume, retry):
        add_json(parser)


def _add_run(verbs: Verbs) -> argparse.ArgumentParser:
    run = verbs.add("run", _run)
    run.add_argument("-n", "--dry-run", action="store_true", help="only print the plan")
    run.add_argument("--detach", action="store_true", help="start the run and return at once")
    run.add_argument(
        "--run-id",
        default="",
        metavar="ID",
        help="id of the run; a repeated command with the same id starts it only once",
    )
    run.add_argument(
        "--if-new",
        action="store_true",
        help="start no run if every stage has its result already, as from cron",
    )
    run.add_argument(
        "--fit",
        action=argparse.BooleanOptionalAction,
        help="first compile the trainings and refuse those that do not fit their devices; by "
        "default only those that `plan --fit` found so, and with --no-fit none",
    )
    run.add_argument("--since", default="", metavar="IDENTITY", help=argparse.SUPPRESS)
    add_sweep(run)
    return run


def _add_plan(verbs: Verbs) -> argparse.ArgumentParser:
    plan = verbs.add("plan", _plan)
    plan.add_argument("--render", action="store_true", help="also print what would be submitted")
    plan.add_argument(
        "--show-examples",
        type=int,
        default=0,
        metavar="N",
        help="also print the tokens in the loss of the first N conversations",
    )
    plan.add_argument(
        "--fit",
        action="store_true",
        help="also compile the trainings, without data, and print whether they fit their devices",
    )
    plan.add_argument(
        "--target",
        metavar="DEVICES",
        help="with --fit: other devices than the profile's, such as h100x8 or v5p:2x2x2; several "
        "to compare, as h100x2,h100x4,h100x8",
    )
    plan.add_argument(
        "--search",
        action="store_true",
        help="with --fit: also look for the mesh and remat with which a training is fastest",
    )
    plan.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="with --fit: also write the figures as an HTML page that opens offline",
    )
    return plan


def _plan(options: argparse.Namespace) -> int:
    for name in ("target", "search", "html"):
        if getattr(options, name) and not options.fit:
            raise UsageError(f"--{name} is for --fit: without it, nothing is compiled.")
    if options.html and (options.html.is_dir() or not options.html.absolute().parent.is_dir()):
        raise UsageError(f"--html {options.html}: name a file in a folder that exists.")
    from redco_flow.orchestrate.run.objectives import ExpectedStarts

    # Without these options a plan starts nothing, and shows nothing that depends on a queue.
    starts = ExpectedStarts() if options.fit or options.render else None
    loader = Loader(options, only_reads=True, is_for_other_devices=bool(options.target))
    loaded = loader.load()
    more: dict[str, Any] = {"identity": loaded.identity} if options.json else {}
    targets = options.target.split(",") if options.target else [None]
    fits: dict[str | None, dict[str, dict[str, Any]]] = {}
    if options.fit and options.json:
        searches = options.search
        fits = {one: find_fits(loaded, one, starts, searches=searches) for one in targets}
        more["fit"] = fits[targets[0]] if len(targets) == 1 else fits
    if not options.fit:
        loaded = choose_settings(loaded, compiles=False, starts=starts).say()
    chosen = loaded
    if options.fit and not options.target and (options.render or options.ahead):
        chosen = choose_settings(loaded, compiles=True, starts=starts).loaded
    _check_ahead(options, chosen)
    _print_plan(loaded, loader.replaced, as_json=options.json, **more)
    if options.render:
        from redco_flow.orchestrate.run.rendering import rendered_submissions

        given = (chosen.pipeline, chosen.profile, chosen.workspace, chosen.plan, os.environ)
        submissions = rendered_submissions(*given, ahead=options.ahead)
        for name, text in submissions:
            print(f"\n--- {name}\n{text or 'a process on this machine, nothing is submitted'}")
    if options.show_examples:
        print_examples(loaded, options.show_examples)
    if options.fit and not options.json:
        for target in targets:
            fits[target] = find_fits(loaded, target, starts, searches=options.search)
            for stage, fit in fits[target].items():
                print_fit(stage, fit)
    compared = compare_on_targets(fits, loaded) if len(targets) > 1 else {}
    if not options.json:
        print_targets(compared)
    if options.html:
        from redco_flow.report.plan_page import plan_page
        from redco_flow.report.runs_page import write_page

        page = plan_page(loaded.pipeline.name, fits, compared, utc_now())
        sys.stderr.write(f"page: {write_page(page, options.html)}\n")
    # Of several targets, some devices that do are enough.
    return min(map(exit_code_of_fits, fits.values()), default=0)


def _check_ahead(options: argparse.Namespace, loaded: Loaded) -> None:
    """Refuse a run ahead that cannot be one, as `run` does before it starts."""
    from redco_flow.orchestrate.run.rendering import rendered_submissions

    if options.ahead:
        given = (loaded.pipeline, loaded.profile, loaded.workspace, loaded.plan, os.environ)
        dict(rendered_submissions(*given, ahead=True))


def _print_plan(
    planned: Loaded | PlannedPoint, replaced: list[str], *, as_json: bool, **more: Any
) -> None:
    from redco_flow.orchestrate.run.groups import jobs_of_groups

    resolved, plan = planned.pipeline, planned.plan
    jobs = list(jobs_of_groups(resolved, planned.profile, plan))
    if as_json:
        groups = [{"group": group, "stages": stages} for group, stages in jobs]
        record = {"pipeline": resolved.name, **plan.to_json(), "groups": groups}
        record |= {"replace_bundled": replaced, **more}
        print(json.dumps(record))
        return
    rows = [
        [name, stage.action, (stage.fingerprint or "")[:12], stage.reason]
        for name, stage in plan.stages.items()
    ]
    print(columns(rows, ["STAGE", "ACTION", "FINGERPRINT", "REASON"]))
    for group, stages in jobs:
        print(f"group {group}: one job for {', '.join(stages)}")
    for pin in plan.pins:
        print(pin)


def _run(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.run.objectives import ExpectedStarts
    from redco_flow.orchestrate.run.start import spawn, write_run
    from redco_flow.tracking.run_directory import check_run_id

    if options.launcher:
        options.overrides = [*options.overrides, f"profile.launcher={options.launcher}"]
    loader = Loader(options, only_reads=options.dry_run)
    if options.run_id:
        check_run_id(options.run_id)
    is_sweep = bool(options.sweep or options.points)
    only_one = (("--run-id", options.run_id), ("--if-new", options.if_new), ("--fit", options.fit))
    for name, value in only_one:
        if is_sweep and value:
            raise UsageError(f"{name} is for one run, and a sweep starts several; leave one out.")
    if is_sweep:
        return run_sweep(
            options,
            loader,
            lambda planned: _print_point(planned, loader.replaced, as_json=options.json),
        )
    for option in (
        "max_parallel",
        "points_per_job",
        "num_samples",
        "stop_early",
        "sampler",
        "metric",
    ):
        if getattr(options, option):
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} is for a sweep; give --sweep KEY=V1,V2, or leave it out.")
    if options.fit and options.dry_run:
        raise UsageError("--fit checks before a run is started; with --dry-run use `plan --fit`.")
    loaded = loader.load()
    if options.dry_run:
        loaded = choose_settings(loaded, compiles=False).say()
        _check_ahead(options, loaded)
        _print_plan(loaded, loader.replaced, as_json=options.json)
        return 0
    identity = loaded.identity if options.if_new else ""
    if options.if_new and (not loaded.plan.is_anything_new or identity == options.since):
        sys.stderr.write("no run is started: every stage has its result already\n")
        if options.json:
            print(json.dumps({"run": None, "identity": identity}))
        return 0
    is_there = bool(options.run_id) and (loaded.workspace.runs / options.run_id).exists()
    fits: dict[str, dict[str, Any]] = {}
    if not is_there:
        chosen = choose_settings(loaded, compiles=True, starts=ExpectedStarts())
        loaded = chosen.say()
        refuses = options.fit is not False
        fits = fits_of_run(loaded, compiles=bool(options.fit), refuses=refuses) | chosen.fits
    run = write_run(
        loaded.pipeline,
        loaded.profile,
        loaded.workspace,
        loaded.plan,
        profile_name=options.profile,
        overrides=options.overrides,
        argv=sys.argv,
        ahead=options.ahead,
        run_id=options.run_id,
        fits=fits,
    )
    spawn(run, forks=True)
    sys.stderr.writelines(f"{pin}\n" for pin in loaded.plan.pins)
    sys.stderr.write(f"{run.id} started; its files: {run.path}\n")
    return _attend(run, options, **({"identity": identity} if identity else {}))


def _print_point(planned: PlannedPoint, replaced: list[str], *, as_json: bool) -> None:
    if not as_json:
        print(f"\n--- {'  '.join(planned.overrides)}")
    _print_plan(planned, replaced, as_json=as_json)


def _attend(run: RunDirectory, options: argparse.Namespace, **more: str) -> int:
    """Follow the run unless it is detached, then print how it ended."""
    if options.detach:
        started = {"run": run.id, "path": str(run.path), "state": State.RUNNING, **more}
        print(json.dumps(started) if options.json else run.id)
        return 0
    code = follow_to_end(run)
    view = read_run_view(run)
    if options.json:
        print(json.dumps(summary(view, code)))
    elif view["state"] not in (State.PENDING, State.RUNNING):
        print(status_text(view))
        print(next_steps(view))
    return code


def follow_to_end(run: RunDirectory) -> int:
    """Follow the run; where its launcher is killed meanwhile, have another one continue it."""
    from redco_flow.orchestrate.run.start import resume_run

    def follow() -> tuple[int, bool]:
        while True:
            code = follow_run(run)
            is_interrupted = read_run_view(run)["state"] == State.INTERRUPTED
            job = launcher_status(run, confirms_end=True) if is_interrupted else None
            if job is None or job.has_ended:  # else it is being queued again
                return code, is_interrupted and not run.cancel_requested()

    return follow_launchers(run, follow, lambda: resume_run(run))


def summary(view: dict[str, Any], exit_code: int) -> dict[str, Any]:
    """Return the record that `run --json` prints: run, ending, stages, artifacts, metrics."""
    stages = {
        name: {key: stage[key] for key in ("state", "reused", "seconds", "artifacts")}
        for name, stage in view["stages"].items()
    }
    return {
        "run": view["run"],
        "state": view["state"],
        "exit_code": exit_code,
        "stages": stages,
        "metrics": view["metrics"],
    }


def next_steps(view: dict[str, Any]) -> str:
    if view["state"] == State.COMPLETED:
        return f"next: redco-flow why {_example_result(view)} · redco-flow logs {view['run']}"
    failed = [name for name, stage in view["stages"].items() if stage["state"] == State.FAILED]
    logs = "/".join([view["run"], *failed[:1]])
    verb = "resume" if view["state"] == State.STOPPED_EARLY else "retry"
    return f"next: redco-flow logs {logs} · redco-flow {verb} {view['run']}"


def _example_result(view: dict[str, Any]) -> str:
    """Return a metric or, of a run without one, its last stage with a result."""
    made = [name for name, stage in view["stages"].items() if stage["state"] == State.COMPLETED]
    return "/".join([view["run"], *[*view["metrics"], *reversed(made)][:1]])


def _find(options: argparse.Namespace) -> RunDirectory:
    return find_single_run(workspace_of(options), options.run)


def _find_sweep(options: argparse.Namespace) -> SweepDirectory | None:
    return find_sweep(workspace_of(options), options.run)


def _note_submitted_code(run: RunDirectory) -> None:
    """Say that a run from another machine continues with the code that was sent then."""
    from redco_flow.orchestrate.run.ingredients import SUBMITTED_CODE
    from redco_flow.orchestrate.run.state import LaunchRecord

    if Path(LaunchRecord.read(run).directory, SUBMITTED_CODE).exists():
        sys.stderr.write(
            f"{run.id} continues with the code of its submission; `redco-flow run` again for "
            f"changed code\n"
        )


def _resume(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.run.start import resume_run

    if (sweep := _find_sweep(options)) is not None:
        from redco_flow.orchestrate.sweep.control import resume_sweep

        if options.launcher:
            raise UsageError("--launcher is for one run; a process here drives a sweep: omit it.")
        resume_sweep(sweep)
        return attend_sweep(sweep, options)
    run = _find(options)
    resume_run(run, options.launcher)
    _note_submitted_code(run)
    return _attend(run, options)


def _retry(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.run.start import retry_run

    run = _find(options)
    retry_run(run, only_failed=options.failed, launcher=options.launcher)
    _note_submitted_code(run)
    return _attend(run, options)


def _cancel(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.run.cancel import cancel_run

    if (sweep := _find_sweep(options)) is not None:
        from redco_flow.orchestrate.sweep.control import cancel_sweep

        cancel_sweep(sweep, "redco-flow cancel")
        print(f"{sweep.id}: {read_sweep_view(sweep)['state']}")
        return 0
    run = _find(options)
    cancel_run(run, "redco-flow cancel")
    print(f"{run.id}: {run.read_state()['state']}")
    return 0
