"""Names that people write: the nearest known one in a message, and the module that one means."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from redco_flow.spec.secrets import hide_secrets

_SHOWN_CHARACTERS = 60
_SHOWN_OF_A_PATH = 240


def shown(value: Any, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return a value as one short printable line, without any secret in it."""
    text = hide_secrets(repr(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown_path(path: str) -> str:
    """Return a path as `shown` does a value; one that a file could have is whole."""
    return shown(path, _SHOWN_OF_A_PATH)


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as a person types it: `stages.train.keep.best[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known name, or "."."""
    names = sorted(known)
    matches = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if not matches and len(given) >= 3:
        matches = [name for name in names if name.startswith(given)]  # `gpus` for `gpus_per_host`
    return f"; did you mean '{matches[0]}'?" if matches else "."


def quoted(names: Iterable[str]) -> str:
    """Return names in quotes, joined by commas."""
    return ", ".join(f"'{name}'" for name in names)


def listed(names: Iterable[str]) -> str:
    """Return names joined by commas, or "none"."""
    return ", ".join(names) or "none"


PYTHON_PREFIX = "python:"
"""Before the name of a module of the user's own, which then needs no dot."""

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = Path(__file__).resolve().parents[1]
DOTTED_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")


class NoSuchModuleError(ValueError):
    """No importable module has this name."""


def import_named(dotted: str) -> ModuleType:
    """Import a module that a user named.

    Raises:
        NoSuchModuleError: there is none of this name.
        ValueError: it fails while it is imported; the message says how, and at which file and line.
    """
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:
        if _is_absent(dotted, error):
            raise NoSuchModuleError(f"there is no module {dotted}") from error
        raise ValueError(f"importing {dotted} failed{failure(error)}") from error


def failure(error: BaseException) -> str:
    """Return ` at FILE:LINE: TYPE: MESSAGE` of what a module of the user's raised."""
    said = f": {type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = _frames_outside(error)
    own = user_line(error) or (f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")
    return f" at {own}{said}" if own else said


def user_line(error: BaseException) -> str:
    """Return FILE:LINE of the innermost call in the user's own code, or "" if there is none."""
    installed = (f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}", f"{_PACKAGE}{os.sep}", "<")
    own = [one for one in _frames_outside(error) if not one.filename.startswith(installed)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def find_module(package: str, name: str) -> str | None:
    """Return the dotted module that `name` means, or None where there is no such module.

    Raises:
        ValueError: a parent package of a dotted name fails to import; the message says how.
    """
    dotted = named_module(package, name)
    if not (_PLAIN_NAME.fullmatch(dotted) or DOTTED_NAME.fullmatch(dotted)):
        return None
    return dotted if _find_spec(dotted) else None


def named_module(package: str, name: str) -> str:
    """Return the dotted module that YAML means: a plain name is one of the package's own."""
    if name.startswith(PYTHON_PREFIX):
        return name.removeprefix(PYTHON_PREFIX)
    return name if "." in name else f"{package}.{name}"


@functools.cache
def known_modules(package: str, *, defines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a package's modules that define one of these names at their top level."""
    spec = _find_spec(package)
    locations = (spec.submodule_search_locations if spec else None) or []
    names = "|".join(map(re.escape, defines))
    pattern = re.compile(rf"^(?:class|def|async def) (?:{names})\b", re.MULTILINE)
    return tuple(
        sorted(
            info.name
            for info in pkgutil.iter_modules(locations)
            if pattern.search(_source(f"{package}.{info.name}"))
        )
    )


@functools.cache
def known_packages(package: str, *, having: str) -> tuple[str, ...]:
    """Return the names of a package's own packages that have a module called `having`."""
    spec = _find_spec(package)
    locations = (spec.submodule_search_locations if spec else None) or []
    found = (info.name for info in pkgutil.iter_modules(locations) if info.ispkg)
    return tuple(sorted(name for name in found if _find_spec(f"{package}.{name}.{having}")))


def module_problem(package: str, name: str, *, what: str, defines: tuple[str, ...]) -> str | None:
    """Say why `name` is no usable module of this sort, or None where it is one.

    Args:
        what: the sort's name in messages: "recipe".
        defines: the functions or classes of which a module of this package has one: "build".
    """
    known = known_modules(package, defines=defines)
    is_of_package = not name.startswith(PYTHON_PREFIX) and "." not in name
    try:
        if name in known if is_of_package else find_module(package, name):
            return None
    except ValueError as error:
        return f"{what} '{name}': {error}"
    return (
        f"there is no {what} '{name}'{nearest(name, known)} "
        f"Known: {listed(known)}; {dotted_name_advice(name)}"
    )


def dotted_name_advice(name: str) -> str:
    """Say how a module of the user's own is named, where `name` names none of this package."""
    # Unlike pathlib's, this is no error where the name is too long for a file.
    if _PLAIN_NAME.fullmatch(name) and os.path.isfile(f"{name}.py"):  # noqa: PTH113
        return f"{name}.py of your own is '{PYTHON_PREFIX}{name}'."
    return (
        "or the dotted name of an importable module: own.module is own/module.py, python:module is "
        "module.py."
    )


def _find_spec(dotted: str) -> ModuleSpec | None:
    parent = dotted.rpartition(".")[0]
    try:
        return importlib.util.find_spec(dotted)
    except (Exception, SystemExit) as error:
        if _is_absent(dotted, error):
            return None
        raise ValueError(f"importing {parent} failed{failure(error)}") from error


def _is_absent(dotted: str, error: BaseException) -> bool:
    """Whether the search itself found no such module: no module of the user's was at work."""
    return (
        isinstance(error, ModuleNotFoundError)
        and f"{dotted}.".startswith(f"{error.name}.")
        and not _frames_outside(error)
    )


def _frames_outside(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of what was imported: neither Python's import machinery nor this file."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen importlib")
        and Path(frame.filename).parent.name != "importlib"
        and frame.filename != __file__
    ]


def _source(dotted: str) -> str:
    spec = _find_spec(dotted)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text(encoding="utf-8", errors="replace")
