"""Make a host ready to run our code: check its directory, and unpack and verify what was shipped.

Runs there with the arguments ACTION DIRECTORY DIGEST, before anything of ours is there: it comes on
standard input, followed by the archive where ACTION is `unpack`, uses the standard library alone,
and answers with one line of JSON.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
REMOVAL_LOCK = "removal.lock"
_MIN_PYTHON = (3, 11)


def check(directory: Path, digest: str) -> dict[str, Any]:
    """Say whether the directory can be written and holds this code, unchanged."""
    for name in ("code", "incoming", "leases", "workspace"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    with tempfile.TemporaryFile(dir=directory) as trial:
        trial.write(b"trial")
        trial.flush()
    folder = directory / "code" / digest
    return {
        "directory": str(directory),
        "host": os.uname().nodename,
        "code": str(folder),
        "has_code": (has_code := _note_use(directory, folder)),
        "changed": changed_files(folder, digest) if has_code else [],
    }


def unpack(directory: Path, digest: str) -> dict[str, Any]:
    """Unpack the archive on standard input, under its digest, if it is what the digest says."""
    final = directory / "code" / digest
    temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=directory / "code"))
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as file:
            # Python below 3.11.4 has no extraction filters.
            file.extraction_filter = getattr(tarfile, "data_filter", None)
            file.extractall(temporary, filter(_is_within, file))  # noqa: S202
        changed = changed_files(temporary, digest)
        if not changed:
            _rename(temporary, final)
    except OSError as error:
        error.filename = error.filename or str(temporary)  # a full disk is reported without one
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"changed": changed}


def _is_within(member: tarfile.TarInfo) -> bool:
    """Say whether it is a file or folder below where it is unpacked; what is not is left out."""
    name = PurePosixPath(member.name)
    return (member.isfile() or member.isdir()) and not (name.is_absolute() or ".." in name.parts)


def _rename(temporary: Path, final: Path) -> None:
    try:
        temporary.rename(final)
    except OSError:
        if not final.is_dir():  # another launcher may have been faster
            raise


def changed_files(folder: Path, digest: str) -> list[str]:
    """Return the files that are not what the digest covers; the manifest is one of them."""
    try:
        manifest = (folder / MANIFEST).read_bytes()
    except OSError:
        return [MANIFEST]
    if hashlib.sha256(manifest).hexdigest() != digest:
        return [MANIFEST]
    return [name for name, known in json.loads(manifest).items() if _digest(folder / name) != known]


def _note_use(directory: Path, folder: Path) -> bool:
    """Say whether the code is here; if so, it is not removed as unused from now on."""
    with (directory / REMOVAL_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            os.utime(folder)
        return folder.is_dir()


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def main(arguments: list[str]) -> dict[str, Any]:
    """Do what the first argument says; an error is an answer too."""
    if sys.version_info < _MIN_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        return {"problem": f"{sys.executable} is Python {found}; 3.11 or newer is needed"}
    action, directory, digest = arguments
    try:
        return {"check": check, "unpack": unpack}[action](Path(directory).expanduser(), digest)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = ": free space there, or choose another directory" if full else ""
        return {"problem": f"{error.filename}: {error.strerror or error}{advice}"}
    except (EOFError, zlib.error, tarfile.TarError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
