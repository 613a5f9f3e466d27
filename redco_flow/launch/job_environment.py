"""The environment that a job starts with: it imports the modules that its submitter does.

Knows variables and Python's search path; knows no executor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from redco_flow import search_path
from redco_flow.launch.process_tree import ATTEMPT_VARIABLE
from redco_flow.tracking.attempt import AttemptDirectory


def job_environment(environment: Mapping[str, str], attempt: AttemptDirectory) -> dict[str, str]:
    """Return a job's environment: it imports the same modules as the submitting process."""
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = search_path.variables()
    first = dict.fromkeys(path for path in [*given, *own["PYTHONPATH"].split(os.pathsep)] if path)
    return {
        **environment,
        **own,
        "PYTHONPATH": os.pathsep.join(first),
        ATTEMPT_VARIABLE: str(attempt.path),
    }
