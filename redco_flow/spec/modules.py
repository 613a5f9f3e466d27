"""Find the module that a name in YAML means, without running it: recipes, stage kinds, metrics.

A plain name is a module of one of our packages; a dotted name is any importable module.
Only the parents of a dotted name are imported, as Python's own search needs it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from importlib.machinery import ModuleSpec
from pathlib import Path

from redco_flow.spec.wording import listed, nearest

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")


def find_module(package: str, name: str) -> str | None:
    """Return the dotted module that `name` means, or None where there is no such module.

    Raises:
        ValueError: a parent package of a dotted name fails to import; the message says how.
    """
    if _PLAIN_NAME.fullmatch(name):
        dotted = f"{package}.{name}"
    elif _DOTTED_NAME.fullmatch(name):
        dotted = name
    else:
        return None
    return dotted if _find_spec(dotted) else None


def known_modules(package: str, *, defines: str) -> tuple[str, ...]:
    """Return the names of a package's modules whose source defines `defines` at its top level."""
    spec = _find_spec(package)
    locations = (spec.submodule_search_locations if spec else None) or []
    pattern = re.compile(rf"^(?:class|def|async def) {re.escape(defines)}\b", re.MULTILINE)
    return tuple(
        sorted(
            info.name
            for info in pkgutil.iter_modules(locations)
            if pattern.search(_source(f"{package}.{info.name}"))
        )
    )


def module_problem(package: str, name: str, *, what: str, defines: str) -> str | None:
    """Say why `name` is no usable module of this sort, or None where it is one.

    Args:
        what: the sort's name in messages: "recipe".
        defines: the function or class that makes a module one of this sort: "build".
    """
    try:
        if find_module(package, name):
            return None
    except ValueError as error:
        return f"{what} '{name}': {error}"
    known = known_modules(package, defines=defines)
    return (
        f"there is no {what} '{name}'{nearest(name, known)} "
        f"Known: {listed(known)}; or the dotted name of an importable module."
    )


def _find_spec(dotted: str) -> ModuleSpec | None:
    parent = dotted.rpartition(".")[0]
    try:
        return importlib.util.find_spec(dotted)
    except ModuleNotFoundError as error:
        if error.name and f"{dotted}.".startswith(f"{error.name}."):
            return None
        raise ValueError(f"importing {parent} failed: {error}") from error
    except Exception as error:
        raise ValueError(f"importing {parent} failed: {type(error).__name__}: {error}") from error


def _source(dotted: str) -> str:
    spec = _find_spec(dotted)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text(encoding="utf-8", errors="replace")
