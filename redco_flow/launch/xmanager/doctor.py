"""Check that jobs can be submitted through XManager: the library, and the place of its database."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from redco_flow.errors import UsageError
from redco_flow.launch.host_facts import Finding
from redco_flow.launch.xmanager.config import INSTALL, require_xmanager, xmanager_versions
from redco_flow.search_path import library_environment

_TIMEOUT_SECONDS = 60
_IMPORT = (
    "from xmanager import xm, xm_local; xm.binary, xm_local.Local(), xm_local.create_experiment"
)


def examine_xmanager() -> Iterator[Finding]:
    """Yield one finding per check; without the library, only that it is missing."""
    try:
        require_xmanager()
    except UsageError as error:
        yield Finding("xmanager", False, str(error), "see above")
        return
    yield _check_library()
    yield _check_database()


def _check_library() -> Finding:
    """It is imported in a process of its own: it brings packages that this one does not want."""
    remedy = f"install it again: {INSTALL}"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT],
            env=library_environment(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("xmanager", False, f"not imported in {_TIMEOUT_SECONDS} s", remedy)
    if done.returncode != 0:
        return Finding("xmanager", False, (done.stderr.strip().splitlines() or [""])[-1], remedy)
    versions = (f"{name} {version}" for name, version in xmanager_versions().items())
    return Finding("xmanager", True, ", ".join(versions))


def _check_database() -> Finding:
    folder = Path("~/.xmanager").expanduser()
    place = folder if folder.exists() else folder.parent
    can_write = os.access(place, os.W_OK | os.X_OK)
    detail = f"{folder} can be written" if can_write else f"{place} cannot be written"
    return Finding("xmanager's database", can_write, detail, f"make {folder} yours to write")
