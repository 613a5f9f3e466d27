"""The interface of executors, and their lookup by the name in a profile.

An executor is a package with two modules, as `redco_flow.launch.<name>`: `config`, which is light,
for login nodes read it, and `executor`. Any importable dotted name will do, also of one module with
all of it:

    class Config(ExecutorConfig): ...   # optional: its section of the profile, and what fits
    def make(profile, environment): ... # Profile, variables that jobs inherit -> CallExecutor
    def reattach(record): ...           # what job.json holds -> CallJob

A built-in executor's section is named like it; that of a dotted one is `settings`. Imports
executors by name only: nothing here depends on any particular one.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from redco_flow.spec.names import (
    DOTTED_NAME,
    dotted_name_advice,
    find_module,
    import_named,
    known_packages,
    listed,
    nearest,
)

EXECUTORS_PACKAGE = "redco_flow.launch"
_FUNCTIONS = ("make", "reattach")


def known_executors() -> tuple[str, ...]:
    """Return the names of the built-in executors, sorted."""
    return known_packages(EXECUTORS_PACKAGE, having="executor")


def find_executor(name: str) -> ModuleType:
    """Import an executor's module: the one with `make` and `reattach`.

    Raises:
        ValueError: there is no such executor, it cannot be imported, or it is none.
    """
    module = _import(name, "executor")
    missing = [one for one in _FUNCTIONS if not callable(getattr(module, one, None))]
    if missing:
        raise ValueError(
            f"executor '{name}': {module.__file__} lacks {' and '.join(missing)}; an executor is a "
            f"module with make(profile, environment) and reattach(record)."
        )
    return module


def executor_config(name: str) -> Any:
    """Import the model of an executor's section: its `Config`, or what all executors share.

    Raises:
        ValueError: there is no such executor, or it cannot be imported.
    """
    shared = importlib.import_module(f"{EXECUTORS_PACKAGE}.config").ExecutorConfig
    config = getattr(_import(name, "config"), "Config", shared)
    if not (isinstance(config, type) and issubclass(config, shared)):
        raise ValueError(f"executor '{name}': its Config is no {shared.__name__}.")
    return config


def executor_problem(name: str) -> str | None:
    """Say why a profile cannot name this executor, or None where it can; a user's is imported."""
    if name in known_executors():
        return None
    try:
        find_executor(name)
        executor_config(name)
    except ValueError as error:
        return str(error)
    return None


def _import(name: str, part: str) -> ModuleType:
    """The package's module `part`, or the one module that is all of it."""
    known = known_executors()
    if name not in known and not DOTTED_NAME.fullmatch(name):
        raise ValueError(
            f"there is no executor '{name}'{nearest(name, known)} Known: {listed(known)}; "
            f"{dotted_name_advice(name)}"
        )
    module = f"{EXECUTORS_PACKAGE}.{name}" if name in known else name
    apart = f"{module}.{part}"
    try:
        return import_named(apart if find_module(EXECUTORS_PACKAGE, apart) else module)
    except ValueError as error:
        raise ValueError(f"executor '{name}': {error}") from error
