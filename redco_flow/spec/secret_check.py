"""Refuse secrets in a document: by the name of a key, or by the looks of a value.

The messages name the place, never the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redco_flow.errors import Problem
from redco_flow.spec.document import Document, KeyPath
from redco_flow.spec.names import dotted
from redco_flow.spec.secrets import hide_secrets, looks_secret_name, looks_secret_value

_CURE = "name the environment variable in a key that ends in _env instead"
_CURE_OF_ENVIRONMENT = (
    "set it in the shell that starts the run instead (for hosts, name it in "
    "hosts.forward_environment)"
)
_CURE_OF_ENV = "write the name of the environment variable that holds it"


def secret_problems(document: Document) -> Iterator[Problem]:
    """Yield one problem for each secret in the document."""
    yield from _problems(document, document.values, ())


def _problems(document: Document, value: Any, path: KeyPath) -> Iterator[Problem]:
    if path and _is_secret_key(path, value):
        name = hide_secrets(dotted(path))
        cure = _CURE_OF_ENVIRONMENT if "environment" in path[:-1] else _CURE
        message = f"'{name}' looks like a secret, which is never stored; {cure}"
        yield document.origin(path).problem(message)
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _problems(document, child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _problems(document, child, (*path, index))
    elif isinstance(value, str) and looks_secret_value(value):
        name = hide_secrets(dotted(path))
        cure = _CURE_OF_ENV if str(path[-1]).lower().endswith("_env") else _CURE
        message = f"the value of '{name}' looks like a secret, which is never stored; {cure}"
        yield document.origin(path).problem(message)


def _is_secret_key(path: KeyPath, value: Any) -> bool:
    key = path[-1]
    if not isinstance(key, str) or value is None or isinstance(value, bool):
        return False
    is_stage = len(path) == 2 and path[0] == "stages"
    return looks_secret_value(key) or (not is_stage and looks_secret_name(key))
