"""Run git so that a repository's own configuration starts no command.

The author of a folder that was unpacked, rather than cloned, also wrote its `.git/config`. There
`core.fsmonitor`, hooks, filters of contents, and transports to fetch what a partial clone lacks,
are commands. What the user has configured for all repositories (Git LFS, say) stays. Needs
git 2.31.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TIMEOUT_SECONDS = 60.0
_SWITCHED_OFF = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.pager": "cat",
    "diff.external": "",
    "protocol.allow": "never",  # nothing is fetched, so no ssh command and no remote helper runs
    "submodule.recurse": "false",
}
_OF_REPOSITORY = ("local", "worktree")
_FILTERS = r"^(filter\..*\.(clean|smudge|process|required)|lfs\.extension\..*)$"


def run_git(
    folder: Path,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> subprocess.CompletedProcess[bytes]:
    """Run a git command in a folder; return its status and outputs.

    Args:
        variables: laid over the environment.

    Raises:
        OSError: there is no git.
        subprocess.TimeoutExpired: it takes longer.
    """
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", **(variables or {})}
    environment = _configured(environment, _SWITCHED_OFF)
    listed = _run(
        folder,
        ["config", "--includes", "--show-scope", "-z", "--get-regexp", _FILTERS],
        environment,
        timeout_seconds,
    )
    filters = dict(_without_filters(os.fsdecode(listed.stdout)))
    return _run(folder, arguments, _configured(environment, filters), timeout_seconds)


def _without_filters(listed: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that switch off the filters of a repository's own configuration."""
    words = listed.split("\0")
    for scope, setting in zip(words[::2], words[1::2], strict=False):
        key = setting.partition("\n")[0]
        if scope not in _OF_REPOSITORY:
            continue
        found = re.fullmatch(r"filter\.(.*)\.\w+", key, re.DOTALL)
        name = found[1] if found else "lfs"  # an extension of Git LFS is a command of its filter
        yield from {f"filter.{name}.{part}": "" for part in ("clean", "smudge", "process")}.items()
        yield f"filter.{name}.required", "false"


def _configured(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which settings win over every file's."""
    made = dict(environment)
    for key, value in settings.items():
        number = made.get("GIT_CONFIG_COUNT", "0")
        made[f"GIT_CONFIG_KEY_{number}"], made[f"GIT_CONFIG_VALUE_{number}"] = key, value
        made["GIT_CONFIG_COUNT"] = str(int(number) + 1)
    return made


def _run(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str], timeout_seconds: float
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_seconds,
        check=False,
    )
