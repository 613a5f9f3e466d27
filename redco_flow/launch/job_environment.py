"""The environment that a job starts with: it imports the modules that its submitter does.

Knows variables and Python's search path; knows no executor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from redco_flow.launch.process_tree import ATTEMPT_VARIABLE
from redco_flow.tracking.attempt import AttemptDirectory


def job_environment(environment: Mapping[str, str], attempt: AttemptDirectory) -> dict[str, str]:
    """Return a job's environment: it imports the same modules as the submitting process."""
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    search = dict.fromkeys(path for path in [*given, *own_search_path()] if path)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(search),
        ATTEMPT_VARIABLE: str(attempt.path),
    }


def own_search_path() -> Iterable[str]:
    """Yield where this process looks for modules, apart from Python's own installation."""
    installed = tuple({f"{sys.prefix}/", f"{sys.base_prefix}/"})
    for path in sys.path:
        absolute = str(Path(path).absolute())  # "" is the current directory
        if not f"{absolute}/".startswith(installed):
            yield absolute
