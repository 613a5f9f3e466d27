"""The user's code as a start finds it: commit and patch, free of secrets, ready for the records."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.launch.redaction import Redactor
from redco_flow.spec.secrets import hide_secrets, secret_values
from redco_flow.tracking.git_state import code_record, git_state


@dataclass(frozen=True)
class CodeState:
    """The repository around a directory.

    Args:
        record: commit, dirty, patch_digest; empty where there is no commit.
        patch: what code.patch holds; empty where the code is the commit's.
    """

    record: dict[str, Any]
    patch: str

    @classmethod
    def read(cls, directory: Path) -> CodeState:
        """Ask git once, for all runs that one command starts."""
        code = git_state(directory)
        patch = _without_environment_secrets(code.get("patch", ""))
        return cls(code_record(code | {"patch": patch} if code else {}), hide_secrets(patch))


def _without_environment_secrets(patch: str) -> str:
    """Blot the environment's secrets out; somebody may have tried one in the code."""
    redactor = Redactor(secret_values(os.environ))
    shown = redactor.feed(patch.encode()) + redactor.flush()
    return shown.decode("utf-8", "replace")
