"""A profile's file and the profiles that it extends, each laid over the next, as one document.

Mappings merge, all else is replaced; every value keeps the line that it was written in. Knows
files and layers; refuses to know what the keys mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from redco_flow.errors import ConfigError, Problem, UsageError
from redco_flow.spec.document import Document
from redco_flow.spec.find import find_file
from redco_flow.spec.problems import raise_if_any
from redco_flow.spec.strict_yaml import parse_file

_EXTENDS = "extends"


def read_layers(path: Path) -> tuple[Document, list[Problem]]:
    """Read a profile whole.

    Raises:
        ConfigError: a file that is no mapping or no YAML, and mistakes of `extends`.
    """
    document, problems = _parse(path)
    chain = [path]
    while (extended := document.get((_EXTENDS,))) is not None:
        base = _base_of(document, extended, chain)
        lower, more = _parse(base)
        problems += more
        chain.append(base)
        # Each is named after its own file, and extends for itself.
        document = lower.without(("name",)).merged(document.without((_EXTENDS,)))
    return document.without((_EXTENDS,)), problems


def _parse(path: Path) -> tuple[Document, list[Problem]]:
    document, problems = parse_file(path)
    if document.values is None:
        raise_if_any(problems)
        return Document({}, document.origins), problems
    if not isinstance(document.values, dict):
        raise ConfigError([document.origin(()).problem("a profile must be a mapping of keys")])
    return document, problems


def _base_of(document: Document, extended: object, chain: Sequence[Path]) -> Path:
    """Find the file that is meant: not one of those that extend it.

    So a profile may have the name of the one that comes with the project, and extend it.
    """
    origin = document.origin((_EXTENDS,))
    if not isinstance(extended, str):
        message = f"extends must be one profile's name or path, not {type(extended).__name__}"
        raise ConfigError([origin.problem(message)])
    try:
        return find_file("cluster_profiles", extended, beside=chain[-1].parent, left_out=chain)
    except UsageError as error:
        extending = ", which extends ".join(str(path) for path in chain)
        raise ConfigError([origin.problem(f"extends: {error} (It may not be {extending}.)")]) from (
            error
        )
