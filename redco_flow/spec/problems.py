"""Mistakes of the user's: worded, placed in the file, raised all at once, without any secret."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from redco_flow.errors import ConfigError, Problem
from redco_flow.spec.document import Document, KeyPath, is_inside
from redco_flow.spec.model import NAME_PATTERN, StrictModel, known_keys
from redco_flow.spec.names import dotted, listed, nearest, quoted, shown
from redco_flow.spec.other_names import own_name, own_value
from redco_flow.spec.secrets import hide_secrets, looks_secret_name


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise the problems as one error, if there are any.

    Raises:
        ConfigError: all of them.
    """
    if problems:
        raise ConfigError(
            replace(problem, message=hide_secrets(problem.message)) for problem in problems
        )


_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "none_required": "null",
    "path_type": "a path",
}
_COMPARED = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}

_FIRST_NAME = re.compile(r"'([A-Za-z_][A-Za-z0-9_.-]*)'")

_NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', of which the first is a letter or digit"

M = TypeVar("M", bound=StrictModel)
FullPath = Callable[[KeyPath], KeyPath]
"""Maps a path of the validated document to its path in the pipeline."""


def validated(
    model: type[M],
    document: Document,
    *,
    root: str = "the pipeline",
    full_path: FullPath = lambda path: path,
    extra_keys: Mapping[KeyPath, set[str]] | None = None,
) -> tuple[M | None, list[Problem]]:
    """Return the document as the model, or None with what is wrong with it.

    Args:
        root, full_path, extra_keys: as of `problems_of`.
    """
    try:
        return model.from_json(document.values), []
    except ValidationError as error:
        more = {"root": root, "full_path": full_path, "extra_keys": extra_keys}
        return None, problems_of(error, document, model, **more)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 (a check that takes a value's type for granted)
        path = _culprit(model, document.values)
        value = document.get(path) if path else None
        name = f"'{dotted(full_path(path))}'" if path else root
        given = f" is {_shown_value(value)}, which" if path else ""
        message = f"{name}{given} cannot be checked: {type(error).__name__}: {error}"
        return None, [document.origin(path).problem(message)]


def _culprit(model: type[StrictModel], values: Any) -> KeyPath:
    """Return the path of the value without which the model's checks do not crash."""
    path: KeyPath = ()
    value = values
    while isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        part = next((key for key in keys if not _crashes(model, _less(values, (*path, key)))), None)
        if part is None:
            break
        path, value = (*path, part), value[part]
    return path


def _crashes(model: type[StrictModel], values: Any) -> bool:
    try:
        model.from_json(values)
    except ValidationError:
        return False
    except Exception:  # noqa: BLE001 (the question is whether there is one)
        return True
    return False


def _less(value: Any, path: KeyPath) -> Any:
    """The value without what stands at the path."""
    first, *rest = path
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key != first}
        return {**value, first: _less(value[first], tuple(rest))} if rest else kept
    kept_list = [one for index, one in enumerate(value) if index != first]
    changed = [
        _less(one, tuple(rest)) if index == first and rest else one
        for index, one in enumerate(value)
    ]
    return changed if rest else kept_list


def problems_of(
    error: ValidationError,
    document: Document,
    model: type[BaseModel],
    *,
    root: str = "the pipeline",
    full_path: FullPath = lambda path: path,
    extra_keys: Mapping[KeyPath, set[str]] | None = None,
) -> list[Problem]:
    """Return one problem for each place that Pydantic found fault with.

    Args:
        error: from validating `document.values` by `model`.
        root: what messages call the document itself.
        full_path: the path in the pipeline of a path in the document.
        extra_keys: keys that are allowed besides the model's fields, by path.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=True):
        by_path.setdefault(_written_path(document, detail), []).append(detail)
    problems = []
    for path, details in by_path.items():
        full = full_path(path)
        kind = details[0]["type"]
        if kind == "extra_forbidden":
            known = (known_keys(model, path[:-1]) or set()) | (extra_keys or {}).get(
                path[:-1], set()
            )
            inner = {key: known_keys(model, (*path[:-1], key)) or set() for key in known}
            problem = document.origin(path).problem(
                unknown_key(full[:-1], str(path[-1]), known, document.get(path), root, inner)
            )
        elif kind == "missing":
            message = f"{subject(full[:-1], root)} needs the key '{path[-1]}'"
            if full != (*full_path(path[:-1]), path[-1]):
                message += "; give it at the top level or in the stage"
            problem = document.origin(path[:-1]).problem(message)
        else:
            place = _place_of(document, path, details)
            problem = document.origin(place).problem(_wrong_value(full, details))
        problems.append(problem)
    return problems


def _place_of(document: Document, path: KeyPath, details: list[ErrorDetails]) -> KeyPath:
    """Return the path of the key that a section's check names, else `path`.

    `'data.dataset': there is no file` is a problem of that line, and not of the section's first; so
    is a message with a quoted word that only one key of the section is, or one value, where `path`
    is not empty.
    """
    message = _check_message(details)
    found = _FIRST_NAME.match(message)
    words = tuple(found[1].split(".")) if found else ()
    for start in (path, ()):
        for length in range(len(words), 0, -1):
            place = (*start, *words[:length])
            if place[: len(path)] == path and document.has(place):
                return place
    below = [key for key in document.origins if key[: len(path)] == path != key]
    for word in re.findall(r"'([^']+)'", message):
        named = [key for key in below if key[-1] == word]
        if path and not named:  # of the whole document, a value may be named only as the reason
            named = [key for key in below if document.get(key) == word]
        if len(named) == 1:
            return named[0]
    return path


def _check_message(details: list[ErrorDetails]) -> str:
    """Return what a check of ours says; empty where Pydantic itself refuses the value."""
    if len(details) == 1 and details[0]["type"] in ("value_error", "assertion_error"):
        return details[0]["msg"].removeprefix("Value error, ")
    return ""


_MAX_LISTED = 12
_MAX_SIMILAR = 6


def unknown_key(
    owner: KeyPath,
    key: str,
    known: Collection[str],
    value: Any = None,
    root: str = "the pipeline",
    inner: Mapping[str, Collection[str]] | None = None,
) -> str:
    """Return the message for a key that the section at `owner` does not have.

    Args:
        known: the keys that it has.
        value: what was given.
        root: what messages call the document itself.
        inner: the keys of each of its sections, in one of which the key may belong.
    """
    message = f"{subject(owner, root)} has no key {shown(key)}"
    if own := own_name(key, owner, known, value):
        return f"{message}: {own}."
    if sections := sorted(name for name, keys in (inner or {}).items() if key in keys):
        return f"{message}: it is a key of {quoted(sections)}{nearest(key, known)}"
    return f"{message}{nearest(key, known)} {similar_keys(key, known)}"


def similar_keys(key: str, known: Collection[str]) -> str:
    """Return a sentence with the known keys: all where they are few, else those like `key`."""
    if len(known) <= _MAX_LISTED:
        return f"Known keys: {listed(sorted(known))}."
    similar = difflib.get_close_matches(key, sorted(known), n=_MAX_SIMILAR, cutoff=0.4)
    some = f"Similar keys: {listed(similar)}; all" if similar else "All"
    printed = "`redco-flow schema` (for a profile, `redco-flow profile`)"
    return f"{some} {len(known)} are in the reference and {printed}."


def subject(path: KeyPath, root: str = "the pipeline") -> str:
    """Return what messages call the section at `path`."""
    if not path:
        return root
    if len(path) == 2 and path[0] == "stages":
        return f"stage '{path[1]}'"
    return f"'{dotted(path)}'"


def _written_path(document: Document, detail: ErrorDetails) -> KeyPath:
    """Return the path of an error, without the marks that Pydantic adds for unions and keys."""
    value = document.values
    path: KeyPath = ()
    location = detail["loc"]
    for part in location:
        if not is_inside(value, part):
            break
        path, value = (*path, part), value[part]
    if detail["type"] == "missing":
        return (*path, location[-1])
    return path


def _wrong_value(path: KeyPath, details: list[ErrorDetails]) -> str:
    name = f"'{dotted(path)}'" if path else "the file"
    detail = details[0]
    if message := _check_message(details):
        if message.startswith((name, f"{name[:-1]}.")):
            return message
        return f"{name} {message}" if message.startswith("must ") else f"{name}: {message}"
    if detail["loc"] and detail["loc"][-1] == "[key]":
        pattern = detail.get("ctx", {}).get("pattern")
        rule = _NAME_RULE if pattern == NAME_PATTERN else f"must match {pattern}"
        return f"{name}: {shown(path[-1])} is no name ({rule})"
    if detail["type"] in ("too_short", "string_too_short"):
        return f"{name} must not be empty"
    wanted = " or ".join(dict.fromkeys(_wanted(one) for one in details))
    given = detail["input"]
    if any(isinstance(part, str) and looks_secret_name(part) for part in path):
        return f"{name} must be {wanted}"
    hint = _hint(detail, given) or _sweep_hint(path, detail, given)
    return f"{name} must be {wanted}, not {_shown_value(given)}{hint}"


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _WANTED:
        return _WANTED[kind]
    if kind in _COMPARED:
        name, words = _COMPARED[kind]
        return f"{words} {context[name]}"
    if kind in ("literal_error", "enum"):
        return f"one of {context['expected']}"
    if kind == "string_pattern_mismatch" and context["pattern"] == NAME_PATTERN:
        return f"a name ({_NAME_RULE})"
    if kind in ("too_long", "string_too_long"):
        return f"at most {context['max_length']} long"
    return detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _shown_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    return shown(value)


_OF_ONE_VALUE = ("int_type", "float_type", "bool_type", "string_type", "literal_error")


def _sweep_hint(path: KeyPath, detail: ErrorDetails, given: Any) -> str:
    """Say how several values are tried, where a list of them was given for one."""
    if detail["type"] not in _OF_ONE_VALUE or not isinstance(given, list) or len(given) < 2:
        return ""
    if not all(isinstance(one, int | float | str) for one in given):
        return ""
    values = ",".join(one if isinstance(one, str) else json.dumps(one) for one in given)
    return f"; a run with each of them: --sweep {dotted(path)}={values}"


def _hint(detail: ErrorDetails, given: Any) -> str:
    kind = detail["type"]
    if kind == "literal_error" and (own := own_value(given, detail["ctx"]["expected"])):
        return f"; here it is '{own}'"
    if kind == "string_type" and isinstance(given, int | float):
        return "; put it in quotes"
    if kind == "bool_type" and isinstance(given, str):
        lowered = given.lower()
        if lowered in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if lowered in ('yes', 'on', 'y') else 'false'}"
    if kind in ("int_type", "int_from_float") and isinstance(given, float) and given.is_integer():
        return f"; write {int(given)}"
    if isinstance(given, str) and "_" in given and given.replace("_", "").isdigit():
        return f"; write {given.replace('_', '')}"
    return ""
