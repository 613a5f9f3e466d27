"""Explain a missing file or folder: the searched places, and the nearest existing name.

Reads names of one folder, and nothing of its files.
"""

from __future__ import annotations

import difflib
import glob
import os
from itertools import islice
from pathlib import Path

from redco_flow.local_paths import exists, expanded, is_folder
from redco_flow.spec.names import shown_path

_MAX_NAMES = 5000


def missing_file(file: str, what: str = "file") -> str:
    """Return that there is no such file, or none that a pattern matches, and what is near.

    Args:
        file: as the user wrote it; relative to the current directory.
        what: the noun: "file", "folder", "file or directory".
    """
    path = expanded(file).absolute()
    if is_folder(path):
        return f"{shown_path(file)} is a folder, not a {what}"
    if exists(path):
        return f"{shown_path(file)} is not a {what}"
    if glob.has_magic(file):
        return f"no file matches {shown_path(file)}"
    return f"there is no {what} {shown_path(file)}{_where(path)}"


def _where(path: Path) -> str:
    """Return the folder that was searched, and the name there that is nearest."""
    folder = next((one for one in path.parents if is_folder(one)), None)
    if folder is None or "\0" in str(path):
        return ""
    name = path.relative_to(folder).parts[0]
    searched = f" (searched in {shown_path(str(folder))})"
    if folder != path.parent:
        searched = f" ({shown_path(str(folder))} has no folder {shown_path(name)})"
    near = difflib.get_close_matches(name, _names_in(folder), n=1)
    return f"{searched}; did you mean {shown_path(near[0])}?" if near else searched


def _names_in(folder: Path) -> list[str]:
    """Return names in a folder: all, or the first thousands of them; none where it is locked."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MAX_NAMES)]
    except OSError:
        return []
