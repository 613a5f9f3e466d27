"""Raise all mistakes at once, without any secret in their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from redco_flow.errors import ConfigError, Problem
from redco_flow.spec.secrets import hide_secrets


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise the problems as one error, if there are any.

    Raises:
        ConfigError: all of them.
    """
    if problems:
        raise ConfigError(
            replace(problem, message=hide_secrets(problem.message)) for problem in problems
        )
