"""The state of the user's repository: which commit, and how the code differs from it.

Asks the git command and changes nothing in the repository. No git, or no commit, is no error:
a run without one is tracked by its modules' digests alone.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 30
_MAX_NEW_FILE_BYTES = 1 << 20  # source is small; data that git does not ignore is not


def git_state(directory: Path) -> dict[str, Any]:
    """Return `{"commit", "dirty", "patch"}` of the repository around `directory`, or `{}`.

    The patch holds the changes of tracked files since the commit, and new, not ignored Python
    files of at most 1 MiB; `git apply` on the commit gives the code that ran.
    """
    commit = _git(directory, "rev-parse", "--verify", "HEAD").strip()
    if not commit:
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=normal")
    if not changed:
        return {"commit": commit.decode(), "dirty": False, "patch": ""}
    root = Path(os.fsdecode(_git(directory, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    patch = _git(root, "diff", *_PLAIN, "HEAD") + b"".join(_new_files(root))
    return {"commit": commit.decode(), "dirty": True, "patch": patch.decode("utf-8", "replace")}


def code_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `git_state`'s answer with the patch's SHA-256 in its place, for records."""
    if not state:
        return {}
    patch = str(state["patch"])
    digest = hashlib.sha256(patch.encode()).hexdigest() if patch else None
    return {"commit": state["commit"], "dirty": state["dirty"], "patch_digest": digest}


# A patch that can be applied, whatever the user's configuration makes of `git diff`.
_PLAIN = (
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--full-index",
)


def _new_files(root: Path) -> list[bytes]:
    names = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    small = [
        name
        for name in os.fsdecode(names).split("\0")
        if name and (root / name).lstat().st_size <= _MAX_NEW_FILE_BYTES
    ]
    return [_git(root, "diff", *_PLAIN, "--no-index", "--", os.devnull, name) for name in small]


def _git(directory: Path, *arguments: str) -> bytes:
    """The command's output; empty where it fails. A difference (status 1) is no failure."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode in (0, 1) else b""
