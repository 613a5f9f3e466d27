"""Remove from this host what may go: first out of everybody's sight, then for good.

`python -P -m redco_flow.launch.hosts.cleaning DIRECTORY DAYS` does so beside a job that has just
been started, with the time that is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.hosts.copies import Copies
from redco_flow.launch.hosts.leftovers import SET_ASIDE, Leftover, look, set_aside

_LEAST_PRIORITY = 19


def clean(
    directory: Path, keep_days: float, clock: Callable[[], float] = time.time
) -> list[Leftover]:
    """Remove what is old; return it. What refuses to go stays out of sight (`set_aside`).

    Args:
        directory: of this host.
        keep_days: what was used within them stays.

    Raises:
        WorkspaceError: a lease cannot be read, so that it is not known what is in use.
        OSError: the directory cannot be written; names the path.
    """
    copies = Copies(directory)
    removed = []
    # A job that starts notes under the same lock what it uses: it is seen here, or sees it gone.
    with copies.locked():
        for leftover in look(directory, keep_days, clock):
            if leftover.fate == "old":
                _set_aside(leftover.path)
                copies.revoke([leftover.path])
                removed.append(leftover)
    for path in set_aside(directory):
        _remove(path)
    return removed


def start_cleaning(directory: Path, keep_days: int) -> None:
    """Clean in a process of its own, which is not waited for; 0 days is never."""
    if keep_days:
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(directory), str(keep_days)],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Clean; what cannot be removed now is tried again beside the next job."""
    directory, keep_days = arguments
    os.nice(_LEAST_PRIORITY)
    with contextlib.suppress(RedcoFlowError, OSError):
        clean(Path(directory), float(keep_days))
    return 0


def _set_aside(path: Path) -> None:
    path.rename(path.parent / f"{SET_ASIDE}{secrets.token_hex(6)}")


def _remove(path: Path) -> None:
    """Remove it as far as possible; another process may be doing so too."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
