"""Verbs about the disk space of a workspace: du, rm, gc."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from redco_flow.cli.arguments import Verbs, add_json, add_workspace, workspace_of
from redco_flow.cli.text import columns, size
from redco_flow.errors import UsageError, WorkspaceError
from redco_flow.orchestrate.run.cancel import has_ended
from redco_flow.orchestrate.run.launcher import launcher_status
from redco_flow.tracking.deletions import new_deletion
from redco_flow.tracking.disk_usage import DiskSize, disk_usage
from redco_flow.tracking.garbage_collection import Selection, Survey, delete, survey
from redco_flow.tracking.lock_mechanism import RECORD
from redco_flow.tracking.locks import acquire
from redco_flow.tracking.run_directory import RunDirectory, find_run
from redco_flow.tracking.sweep_directory import find_sweep
from redco_flow.tracking.workspace import Workspace


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    usage = verbs.add("du", _du)
    remove = verbs.add("rm", _remove)
    remove.add_argument(
        "runs", nargs="+", metavar="RUN", help="run or sweep: its id or a prefix of it, or last"
    )
    collect = verbs.add("gc", _collect)
    collect.add_argument(
        "--keep-last", type=int, metavar="N", help="all completed runs of a pipeline but the last N"
    )
    collect.add_argument(
        "--older-than",
        metavar="TIME",
        help="completed runs that ended longer ago, such as 30d; cache files not used since",
    )
    collect.add_argument(
        "--unreferenced", action="store_true", help="also what no run, alias or schedule needs"
    )
    for parser in (remove, collect):
        parser.add_argument("--dry-run", action="store_true", help="only list it, with sizes")
    for parser in (usage, remove, collect):
        add_json(parser)
        add_workspace(parser)


def _workspace(options: argparse.Namespace) -> Workspace:
    workspace = workspace_of(options)
    if not any((workspace.root / name).is_file() for name in (RECORD, "sequence")):
        raise UsageError(f"{workspace.root} is not a workspace; name its directory: -w DIRECTORY.")
    return workspace


def _du(options: argparse.Namespace) -> int:
    rows = disk_usage(_workspace(options))
    total = sum((row.size for row in rows), DiskSize())
    if options.json:
        found = [{key: one for key, one in asdict(row).items() if key != "size"} for row in rows]
        sizes = [_size_record(row.size) for row in rows]
        listed = [{**one, **of} for one, of in zip(found, sizes, strict=True)]
        print(json.dumps({**_size_record(total), "rows": listed}))
        return 0
    rows.sort(key=lambda row: row.size.num_bytes, reverse=True)
    cells = [[row.what, row.stage, str(row.num_items), *_size_cells(row.size)] for row in rows]
    cells.append(["total", "", "", *_size_cells(total)])
    print(columns(cells, ["WHAT", "STAGE", "NUMBER", "SIZE", "FILES"]))
    return 0


def _size_record(found: DiskSize) -> dict[str, int]:
    return {"bytes": found.num_bytes, "files": found.num_files}


def _size_cells(found: DiskSize) -> list[str]:
    return [size(found.num_bytes), f"{found.num_files:,}"]


def _remove(options: argparse.Namespace) -> int:
    workspace = _workspace(options)
    runs = [run for text in options.runs for run in _named(workspace, text)]
    with ExitStack() as leases:
        for run in () if options.dry_run else {run.path: run for run in runs}.values():
            leases.enter_context(acquire(run))  # it cannot be resumed meanwhile
            _refuse_live_jobs(run)
        return _delete(options, Selection(frozenset(run.id for run in runs)))


def _named(workspace: Workspace, text: str) -> list[RunDirectory]:
    """The run, or the runs of the sweep, that a word names."""
    if (sweep := find_sweep(workspace, text)) is not None:
        return [run for run in sweep.runs if run.path.is_dir()]
    run = find_run(workspace, text)
    if not run.path.parent.samefile(workspace.runs):
        raise UsageError(f"{run.path} is a run of another workspace than {workspace.root}.")
    return [run]


def _refuse_live_jobs(run: RunDirectory) -> None:
    """Raise where a job of a run that no process drives has not ended."""
    from redco_flow.launch.executor import reattach

    launcher = None if has_ended(run) else launcher_status(run)
    if launcher is not None and not launcher.has_ended:
        raise UsageError(
            f"the launcher of run {run.id}, {launcher.name}, {launcher.message}. Nothing was "
            f"changed; `redco-flow cancel {run.id}` ends it."
        )
    for stage in run.read_state()["stages"]:
        attempt = run.latest_attempt(stage)
        record = attempt.read_job() if attempt is not None else None
        if attempt is None or record is None or attempt.read_exit() is not None:
            continue
        if not reattach(record).done():
            raise UsageError(
                f"job {record['job_id']} of run {run.id} (stage '{stage}') has not ended. Nothing "
                f"was changed; `redco-flow cancel {run.id}` ends it."
            )


def _collect(options: argparse.Namespace) -> int:
    from redco_flow.spec.schedule import interval_of

    try:
        older_than = interval_of(options.older_than) if options.older_than is not None else None
    except ValueError as error:
        raise UsageError(f"--older-than: {error}.") from error
    if options.keep_last is not None and options.keep_last < 0:
        raise UsageError(f"--keep-last {options.keep_last}: it must be 0 or more.")
    selection = Selection(frozenset(), options.keep_last, older_than, options.unreferenced)
    return _preview(options) if selection == Selection() else _delete(options, selection)


_EXAMPLES = {
    "--unreferenced": Selection(unreferenced=True),
    "--older-than 30d": Selection(older_than=timedelta(days=30)),
    "--keep-last 3": Selection(keep_last=3),
}


def _preview(options: argparse.Namespace) -> int:
    """Print what each option would delete: without one, nothing is deleted."""
    found = {words: survey(_workspace(options), one) for words, one in _EXAMPLES.items()}
    if options.json:
        print(json.dumps({words: _record(one, one.size()) for words, one in found.items()}))
        return 0
    rows = [
        [words, *_size_cells(one.size()), _counts(one) or "nothing"] for words, one in found.items()
    ]
    print(columns(rows, ["OPTION", "FREES", "FILES", "DELETES"]))
    print("nothing was deleted: give one or several of the options, with --dry-run for a list")
    return 0


def _delete(options: argparse.Namespace, selection: Selection) -> int:
    workspace, problems = _workspace(options), list[str]()
    if options.dry_run:
        found = survey(workspace, selection)
        freed = found.size()
    else:
        command = shlex.join(["redco-flow", *sys.argv[1:]])
        deleted = delete(workspace, selection, new_deletion(command))
        found, freed, problems = deleted.survey, deleted.size, deleted.problems
    if options.json:
        print(json.dumps({**_record(found, freed), "problems": problems}))
    else:
        print(_text(found, freed, with_list=options.dry_run))
        sys.stderr.writelines(f"not deleted: {problem}\n" for problem in problems)
    return WorkspaceError.exit_code if problems else 0


def _record(found: Survey, freed: DiskSize) -> dict[str, Any]:
    items = [
        {"what": one.what, "path": str(one.path), "id": one.artifact.id if one.artifact else None}
        for one in found.garbage
    ]
    runs = [one.run.id for one in found.released]
    return {**_size_record(freed), "runs": runs, "items": items, "kept": dict(found.kept)}


def _text(found: Survey, freed: DiskSize, *, with_list: bool) -> str:
    size_text, num_files = _size_cells(freed)
    verb = "would be deleted" if with_list else "deleted"
    lines = [f"{one.what}  {one.path}" for one in found.garbage] if with_list else []
    lines += [f"kept: {one[:12]}, needed by {why}" for one, why in found.kept.items()]
    num_runs = len(found.released)
    runs = f" ({_counted(num_runs, 'run')}; records are kept)" if num_runs else ""
    counts = _counts(found) or "nothing"
    return "\n".join([*lines, f"{verb}: {counts}{runs}; {size_text} in {num_files} files"])


def _counts(found: Survey) -> str:
    counts = Counter(one.what for one in found.garbage)
    return ", ".join(_counted(number, what) for what, number in sorted(counts.items()))


def _counted(number: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
