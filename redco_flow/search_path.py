"""The order of sys.path in our programs: installed modules first, the current directory last.

Done when the package is imported, before any module that a file of the same name in the current
directory could take the place of; so nothing is imported here that Python has not imported itself.
A user's own program that imports this package keeps its order.
"""

# pathlib is not imported yet.
# ruff: noqa: PTH100, PTH119, PTH120
from __future__ import annotations

import os
import sys

LAST_VARIABLE = "REDCO_FLOW_PYTHONPATH_LAST"
"""Folders that come after Python's own in our processes; PYTHONPATH's come before them."""

_COMMAND = "redco-flow"
_PACKAGE = "redco_flow"
_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def arrange() -> None:
    """In a program of ours, move what belongs last to the end of sys.path.

    That is what the variable names, and the current directory unless PYTHONPATH names it in full:
    `python -m` and an empty entry of PYTHONPATH put it first without being asked to.
    """
    if not _is_program_of_ours():
        return
    last = _folders(os.environ.get(LAST_VARIABLE, ""))
    here = _absolute("")
    if here not in _folders(os.environ.get("PYTHONPATH", "")) and here in map(_absolute, sys.path):
        last.append(here)
    first = [path for path in sys.path if _absolute(path) not in last]
    sys.path[:] = [*first, *dict.fromkeys(last)]


def append_current_directory() -> None:
    """Let modules of the current directory be imported by their names, unless one is installed."""
    here = _absolute("")
    if here not in map(_absolute, sys.path):
        sys.path.append(here)


def first_folders() -> list[str]:
    """Return where this process looks before it looks where Python's own modules are."""
    return _own(sys.path[: _start_of_installed()])


def last_folders() -> list[str]:
    """Return where this process looks at last, apart from what is installed."""
    return _own(sys.path[_start_of_installed() :])


def variables() -> dict[str, str]:
    """Return the variables with which `python -P -m redco_flow.…` imports what this process does.

    An interpreter that is not this one may have to be told where this package is.
    """
    first, last = first_folders(), last_folders()
    own = [] if _is_installed(_PARENT) or _PARENT in first else [_PARENT]
    return {
        "PYTHONPATH": os.pathsep.join([*first, *own]),
        LAST_VARIABLE: os.pathsep.join(last),
    }


def library_environment() -> dict[str, str]:
    """Return the environment for `python -P` that needs libraries and no module of a user's."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(first_folders()), LAST_VARIABLE: ""}


def _is_program_of_ours() -> bool:
    program: str = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # Python is still looking for the module that it is to run
        return any(word.partition(".")[0].endswith(_PACKAGE) for word in sys.orig_argv[1:])
    return os.path.basename(program) == _COMMAND


def _start_of_installed() -> int:
    library = os.path.dirname(os.__file__)
    absolute = list(map(_absolute, sys.path))
    return absolute.index(library) if library in absolute else 0


def _own(paths: list[str]) -> list[str]:
    return [path for path in dict.fromkeys(map(_absolute, paths)) if not _is_installed(path)]


def _is_installed(path: str) -> bool:
    prefixes = tuple({f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}"})
    user_site = getattr(sys.modules.get("site"), "USER_SITE", None)
    return f"{path}{os.sep}".startswith(prefixes) or path == user_site


def _folders(text: str) -> list[str]:
    return [os.path.abspath(path) for path in text.split(os.pathsep) if path]


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError:  # the current directory was removed
        return path
