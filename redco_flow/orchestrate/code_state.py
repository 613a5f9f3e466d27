"""The user's code as a start finds it: commit and patch, free of secrets, ready for the records."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.launch.redaction import redact_text
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.git_state import code_record, git_state

_FILE_BEGINS = re.compile(r"^(?=diff --git )", re.MULTILINE)
_SECRET_FILE = re.compile(
    r"\.env(?:\..*|rc)?|.*\.env|\.netrc|\.pgpass|\.my\.cnf|\.npmrc|\.pypirc|\.htpasswd|credentials"
    r"|.*\.(?:pem|key|p12|pfx|jks|keystore)|id_(?:rsa|dsa|ecdsa|ed25519)|secrets?\.[a-z]+"
)
# A changed or an unchanged line of a hunk: a name and "=" or ":" stay, what follows goes.
_VALUE = re.compile(
    r"^(?P<kept>[ +-](?:[ \t]*(?:export[ \t]+)?[A-Za-z_][\w.-]*[ \t]*[=:])?)(?![ \t]*#)[ \t]*\S.*$",
    re.MULTILINE,
)


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
        patch = _without_secrets(code.get("patch", ""))
        return cls(code_record(code | {"patch": patch} if code else {}), patch)

    def write_patch(self, path: Path) -> None:
        """Write a run's code.patch, for its owner's eyes alone; nothing where there is none.

        Raises:
            OSError: names the path.
        """
        if not self.patch:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(self.patch)
            file.flush()
            os.fsync(file.fileno())


def _without_secrets(patch: str) -> str:
    """The patch without known secrets, what looks like one, and the values of `.env` files."""
    files = _FILE_BEGINS.split(patch)  # what stands before the first, then one each
    hidden = (_without_values(file) if _holds_secrets(file) else file for file in files)
    return redact_text("".join(hidden), secret_values(os.environ))


def _holds_secrets(file: str) -> bool:
    """Whether a file's part of a patch is of a kind of file whose every value may be a secret."""
    return any(map(_SECRET_FILE.fullmatch, _names(file)))


def _names(file: str) -> list[str]:
    header = file.partition("\n@@")[0].splitlines()
    paths = [line[4:] for line in header if line.startswith(("--- ", "+++ "))]
    return [path.strip('"\t').rpartition("/")[2] for path in paths]


def _without_values(file: str) -> str:
    hunks = file.find("\n@@") + 1
    # Behind its numbers a hunk's first line repeats a line of the file.
    shown = re.sub(r"^(@@ [^@\n]* @@).*$", r"\1", file[hunks:], flags=re.MULTILINE)
    return file[:hunks] + _VALUE.sub(r"\g<kept>[redacted]", shown) if hunks else file
