"""Write plain values as YAML that `strict_yaml` reads back as the same values."""

from __future__ import annotations

from typing import Any

import yaml

from redco_flow.spec.scalars import read_scalar


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else."""


def write_yaml(values: Any) -> str:
    """Return values as YAML text: keys in their order, no aliases, unicode as it is."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _is_read_as(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_read_as(text: str) -> bool:
    try:
        return read_scalar(text) == text
    except ValueError:
        return False


_Dumper.add_representer(str, _text)
_Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]
