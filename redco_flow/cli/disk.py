"""Verbs about the disk space of a workspace: du."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from redco_flow.cli.arguments import Verbs, add_json, add_workspace, workspace_path
from redco_flow.cli.text import columns, size
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.tracking.disk_usage import DiskSize


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    usage = verbs.add("du", _du)
    for parser in (usage,):
        add_json(parser)
        add_workspace(parser)


def _workspace(options: argparse.Namespace) -> Workspace:
    return Workspace(workspace_path(options).absolute())


def _du(options: argparse.Namespace) -> int:
    from redco_flow.tracking.disk_usage import DiskSize, disk_usage

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
