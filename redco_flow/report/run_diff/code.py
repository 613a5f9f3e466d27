"""The code of two runs as one unified patch, from their commits and their `code.patch`.

In a repository that has both commits the two trees are created in a temporary folder and compared;
nothing is written into the repository. Elsewhere the two `code.patch` are compared.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redco_flow.git import run_git
from redco_flow.tracking.damage import LaunchFile
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record, unless_damaged

_PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")


@dataclass(frozen=True)
class CodePatch:
    """From the first run's code to the second's.

    Args:
        text: a unified patch; empty where the code is the same or the patch cannot be made.
        remark: why there is none, or why it cannot be applied to the first run's code.
    """

    text: str = ""
    remark: str = ""


class _GitFailed(Exception):
    """A git command failed; the message has its last line."""


def code_patch(first: RunDirectory, second: RunDirectory) -> CodePatch:
    """Return the patch from the first run's code to the second's."""
    codes = first.record.get("code") or {}, second.record.get("code") or {}
    if codes[0] == codes[1]:
        return CodePatch()
    if not all(code.get("commit") for code in codes):
        return CodePatch(remark="not every run was started in a git repository")
    commits = [str(code["commit"]) for code in codes]
    missing = [
        run.id
        for run, code in zip((first, second), codes, strict=True)
        if code.get("patch_digest") and not run.patch_path.is_file()
    ]
    if missing:
        return CodePatch(remark=f"code.patch of {', '.join(missing)} is gone")
    problem = f"no repository here has {' and '.join(one[:12] for one in dict.fromkeys(commits))}"
    if (repository := _find_repository((first, second), commits)) is not None:
        try:
            return CodePatch(_between_trees(repository, (first, second), commits))
        except _GitFailed as error:
            problem = str(error)
    return _between_patches(first, second, problem, is_one_commit=commits[0] == commits[1])


def _find_repository(runs: tuple[RunDirectory, ...], commits: list[str]) -> Path | None:
    """The folder of a repository that has the commits: where a run was started, or this one."""
    for folder in dict.fromkeys([*map(_started_in, runs), Path.cwd()]):
        if folder is None or not folder.is_dir():
            continue
        try:
            top = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").rstrip(b"\n"))
            for commit in commits:
                _git(folder, "cat-file", "-e", f"{commit}^{{commit}}")
        except _GitFailed:
            continue
        return Path(top)
    return None


def _started_in(run: RunDirectory) -> Path | None:
    record = unless_damaged(lambda: find_record(run.path / "launch.json", LaunchFile))
    return Path(record["directory"]) if record else None


def _between_trees(
    repository: Path, runs: tuple[RunDirectory, RunDirectory], commits: list[str]
) -> str:
    """The difference of the two runs' trees, whose new objects go into a temporary folder."""
    objects = os.fsdecode(_git(repository, "rev-parse", "--git-path", "objects").rstrip(b"\n"))
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "GIT_OBJECT_DIRECTORY": folder,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str((repository / objects).absolute()),
            "GIT_INDEX_FILE": f"{folder}/index",
        }
        trees = [
            _tree(repository, commit, run.patch_path, variables)
            for run, commit in zip(runs, commits, strict=True)
        ]
        patch = _git(repository, "diff", *_PLAIN, *trees, variables=variables)
    return patch.decode("utf-8", "replace")


def _tree(repository: Path, commit: str, patch: Path, variables: Mapping[str, str]) -> str:
    _git(repository, "read-tree", commit, variables=variables)
    if patch.is_file():
        _git(
            repository,
            *("apply", "--cached", "--whitespace=nowarn", str(patch.absolute())),
            variables=variables,
        )
    return _git(repository, "write-tree", variables=variables).decode().strip()


def _git(folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> bytes:
    """The command's output."""
    try:
        done = run_git(folder, *arguments, variables=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitFailed(str(error)) from error
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise _GitFailed(f"git {arguments[0]}: {''.join(last)}")
    return done.stdout


def _between_patches(
    first: RunDirectory, second: RunDirectory, problem: str, *, is_one_commit: bool
) -> CodePatch:
    """The difference of the two code.patch, which is complete where the commit is the same."""
    old, new = _lines(first.patch_path), _lines(second.patch_path)
    names = (f"{first.id}/code.patch", f"{second.id}/code.patch")
    text = "".join(difflib.unified_diff(old, new, *names))
    if not is_one_commit:
        return CodePatch(text, f"of the uncommitted changes alone: {problem}")
    return CodePatch(text, f"of the two code.patch: {problem}" if text else problem)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.splitlines(keepends=True)
