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

TYPE_CHECKING = False  # typing is not imported yet
if TYPE_CHECKING:
    from typing import Any

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
    _keep_from_installed(last)


def append_current_directory() -> None:
    """Let modules of the current directory be imported by their names, unless one is installed."""
    here = _absolute("")
    if here not in map(_absolute, sys.path):
        sys.path.append(here)
        _keep_from_installed([here])


def first_folders() -> list[str]:
    """Return where this process looks before it looks where Python's own modules are."""
    return _own(sys.path[: _start_of_installed()])


def last_folders() -> list[str]:
    """Return where this process looks at last, apart from what is installed."""
    return _own(sys.path[_start_of_installed() :])


def variables() -> dict[str, str]:
    """Return the variables with which `python -P -m redco_flow.…` imports what this process does.

    An interpreter that is not this one may need the location of this package.
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


class _InstalledImports:
    """Keeps files of the last folders from what they are not meant for: imports of installed code.

    Installed modules try to import what may not be there: `subprocess` looks for `msvcrt` on Linux
    too, httpx for `brotli`. A file of that name in the current directory would be executed. So it
    is found for modules of the user, and where a name is looked up as text.
    """

    def __init__(self, path_finder: Any, last: list[str]) -> None:
        self._path_finder = path_finder
        self.last = last

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return None, which leaves the name to the finders that follow.

        Raises:
            ModuleNotFoundError: only the last folders have it, and it is not meant.
        """
        if path is not None or self._path_finder.find_spec(name, self.last, target) is None:
            return None
        if name not in sys.stdlib_module_names and not _is_imported_by_installed(name):
            return None
        first = [folder for folder in sys.path if _absolute(folder) not in self.last]
        found = self._path_finder.find_spec(name, first, target)
        others = iter(sys.meta_path)
        for finder in others:
            if finder is self._path_finder:
                break
        for finder in others:
            found = found or finder.find_spec(name, None, target)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


def _is_imported_by_installed(name: str) -> bool:
    """Whether an import statement of an installed module, or of this package, is executed."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if name not in {word.partition(".")[0] for word in frame.f_code.co_names}:
        return False  # a name that was looked up as text, as importlib and pickle do
    folders = [os.path.join(_PARENT, _PACKAGE), *filter(_is_installed, sys.path)]
    return frame.f_code.co_filename.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def _keep_from_installed(last: list[str]) -> None:
    """Keep files of the last folders from what installed modules import."""
    for place, finder in enumerate(sys.meta_path):
        if isinstance(finder, _InstalledImports):
            finder.last += last
            return
        if getattr(finder, "__name__", "") == "PathFinder":
            # typeshed's protocol of finders has more than Python asks for.
            sys.meta_path.insert(place, _InstalledImports(finder, last))
            return


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
