"""The errors a person meets, and the exit code each one ends the command with.

Engine and models raise `ValueError` and its children instead: they know no files and no runs.
Exit codes: 0 ok, 1 the run failed, 2 usage or configuration, 3 does not fit, 4 cluster
unreachable, 5 cancelled, 130 detached.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

_MOST_SHOWN = 50  # a file of another kind has a mistake on every line


def some_of(things: Sequence[object], most: int) -> str:
    """Name the first things of a list, and how many more there are, for a message."""
    more = len(things) - most
    return ", ".join(map(str, things[:most])) + (f" and {more} more" if more > 0 else "")


class RedcoFlowError(Exception):
    """An error with a message for the user: what, where, what to do."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a user's file or on the command line.

    Args:
        source: the file's path, or "command line".
        line: 1-based; 0 where there is none.
        column: 1-based; 0 where there is none.
        message: what was given, what is allowed, what to do.
        is_of_machine: whether it may be none on another machine: a missing file, an unset variable.
    """

    source: str
    line: int
    column: int
    message: str
    is_of_machine: bool = False

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        return f"{place}: {self.message}"


class UnusableRow(ValueError):
    """A row of the data that cannot be used; who reads the file adds its name and the line.

    Args:
        reason: a few words, the same for all rows with this fault.
        detail: what is wrong with this one.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class ConfigError(RedcoFlowError):
    """Mistakes in what the user wrote: all of them, found before anything is submitted."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        lines = [str(problem) for problem in self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            lines.append(f"… and {len(self.problems) - _MOST_SHOWN:,} more mistakes.")
        super().__init__("\n".join(lines))


class UsageError(RedcoFlowError):
    """A verb was asked for something that does not exist or cannot be done now."""

    exit_code: ClassVar[int] = 2


class WorkspaceError(RedcoFlowError):
    """The workspace cannot be read or written; the message names the path."""

    exit_code: ClassVar[int] = 2


class DamagedRecord(WorkspaceError, ValueError):
    """A record is torn, has another shape, or may not be read; the message names its path.

    Args:
        path: of the record.
        problem: what is wrong with it.
        remedy: what to do.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str = "") -> None:
        self.path = os.fspath(path)
        self.problem = problem
        super().__init__(
            " ".join(filter(None, (f"{self.path}: damaged record: {problem}.", remedy)))
        )

    def __reduce__(self) -> tuple[type[DamagedRecord], tuple[str, str]]:
        return type(self), (self.path, self.problem)


class ArtifactError(RedcoFlowError):
    """An artifact is missing or its bytes are not what its manifest says."""


class StageFailed(RedcoFlowError):
    """A stage's job ended without a result; the message has job id, log path and last lines."""


class DoesNotFit(RedcoFlowError):
    """The job needs more than the profile's machines have."""

    exit_code: ClassVar[int] = 3


class ClusterUnreachable(RedcoFlowError):
    """The cluster's commands or hosts do not answer."""

    exit_code: ClassVar[int] = 4


class RunCancelled(RedcoFlowError):
    """The run was asked to stop."""

    exit_code: ClassVar[int] = 5


class StoppedEarly(RunCancelled):
    """A sweep stopped the training, which was not among the best; the message has the numbers."""

    exit_code: ClassVar[int] = 0
