"""The code of this process as one archive that another host can check and import.

Takes the folders that modules are imported from, Python's own installation left out: of a
repository its tracked files and new Python files, of any other folder its Python files; and this
package wherever it is installed. The digest covers every file's path and content.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from redco_flow import search_path
from redco_flow.errors import UsageError
from redco_flow.git import run_git
from redco_flow.records import canonical_json

MANIFEST = "manifest.json"
MAX_FILE_BYTES = 1 << 20
"""Of a file that is taken: source is small; data that git does not ignore is not."""

_MAX_FILES = 20_000
_PACKAGE = Path(__file__).parents[2]
LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
"""Folders that are not taken."""


Source = Path | bytes


@dataclass(frozen=True)
class CodeSnapshot:
    """The files of a snapshot, and their digest.

    Args:
        files: path in the archive to the file here, or to its content; the first folder numbers the
            search path.
        digests: path in the archive to SHA-256.
        first: the roots, by number, that modules are looked for in before Python's own.
        last: the roots after those.
    """

    files: dict[str, Source]
    digests: dict[str, str]
    first: list[int]
    last: list[int]

    @property
    def manifest(self) -> bytes:
        """The content of the archive's manifest.json."""
        return canonical_json(self.digests)

    @property
    def digest(self) -> str:
        """64 hex digits: equal code, equal digest."""
        return hashlib.sha256(self.manifest).hexdigest()

    def variables(self, folder: str) -> dict[str, str]:
        """Return how Python looks for modules in the archive, unpacked in `folder`."""
        return {
            "PYTHONPATH": os.pathsep.join(f"{folder}/{index}" for index in self.first),
            search_path.LAST_VARIABLE: os.pathsep.join(f"{folder}/{index}" for index in self.last),
        }

    def write(self, target: BinaryIO) -> None:
        """Write the archive: a tar file, compressed by gzip.

        Raises:
            OSError: the disk is full or read-only.
            UsageError: a file changed since the snapshot was taken.
        """
        with gzip.open(target, "wb", compresslevel=3) as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                _add(archive, MANIFEST, self.manifest)
                for name, source in self.files.items():
                    content = _content(source)
                    if hashlib.sha256(content).hexdigest() != self.digests[name]:
                        raise UsageError(f"{name} changed while it was copied; try again.")
                    _add(archive, name, content)


def take_snapshot() -> CodeSnapshot:
    """Return this process's code as it stands on the disk now.

    Raises:
        UsageError: a folder of the search path holds too many files to be source.
    """
    first, last = _search_path()
    package = _PACKAGE.parent
    files, _ = _files_of(roots := list(dict.fromkeys([*first, *last])))
    if package not in roots:
        for path in _python_files(_PACKAGE):
            files[f"{len(roots)}/{path.relative_to(package).as_posix()}"] = path
        roots.append(package)
    if package not in first:  # the first module must be found before it moves the others
        first.append(package)
    return _snapshot(files, roots, first, last)


def take_user_snapshot(
    more: Mapping[str, Source], is_secret: Callable[[str], bool]
) -> tuple[CodeSnapshot, str, list[Path], list[Path]]:
    """Return this process's code without this package.

    Profiles of the current directory are in it, whether git tracks them or not.

    Args:
        more: further files, by their path below the current directory.
        is_secret: says of a file's name whether it is left out, unless it is in `more`.

    Returns:
        The code, the current directory's folder in it, the secret files that were left out, and
        those of git's files that were, as they are too large for code.

    Raises:
        UsageError: as of `take_snapshot`.
    """
    here = Path.cwd()
    first, last = ([one for one in folders if one != _PACKAGE.parent] for folders in _search_path())
    if here not in [*first, *last]:
        last.append(here)
    roots = list(dict.fromkeys([*first, *last]))
    found, large = _files_of(roots)
    paths = {name: path for name, path in found.items() if not path.is_relative_to(_PACKAGE)}
    own = str(roots.index(here))
    left_out = [path for path in paths.values() if is_secret(path.name)]
    files: dict[str, Source] = {name: path for name, path in paths.items() if path not in left_out}
    profiles = filter(_is_source, here.glob("cluster_profiles/**/*.y*ml"))
    added = {path.relative_to(here).as_posix(): path for path in profiles}
    files |= {f"{own}/{name}": source for name, source in (added | dict(more)).items()}
    left_out = [path for path in left_out if path not in more.values()]
    large = large.difference(more.values())
    return _snapshot(files, roots, first, last), own, left_out, sorted(large)


def _search_path() -> tuple[list[Path], list[Path]]:
    """Return the folders that modules are looked for in before Python's own, and after those."""
    before, after = (
        [Path(path) for path in folders if Path(path).is_dir()]
        for folders in (search_path.first_folders(), search_path.last_folders())
    )
    return before, after


def _files_of(roots: Sequence[Path]) -> tuple[dict[str, Path], set[Path]]:
    """Return the files to take, by path in the archive, and those of git that are too large."""
    files: dict[str, Path] = {}
    large: set[Path] = set()
    for index, root in enumerate(roots):
        tracked = _tracked(root)
        sources = _python_files(root) if tracked is None else filter(_is_source, tracked)
        for count, path in enumerate(sources):
            if count >= _MAX_FILES:
                raise UsageError(
                    f"{root} is on Python's search path and holds more than {_MAX_FILES} files: it "
                    f"cannot be copied to the hosts as code. Start from the folder of the project."
                )
            files[f"{index}/{path.relative_to(root).as_posix()}"] = path
        large.update(path for path in tracked or () if not _is_source(path))
    return files, large


def _snapshot(
    files: Mapping[str, Source], roots: Sequence[Path], first: list[Path], last: list[Path]
) -> CodeSnapshot:
    files = dict(sorted(files.items()))
    digests = {name: hashlib.sha256(_content(one)).hexdigest() for name, one in files.items()}
    numbers = {root: index for index, root in enumerate(roots)}
    return CodeSnapshot(
        files, digests, [numbers[root] for root in first], [numbers[root] for root in last]
    )


def _content(source: Source) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def _tracked(root: Path) -> list[Path] | None:
    """A repository's files below `root`, and its new Python files; None where it has none.

    Follows no links out of it.
    """
    listed = [_git_files(root), _git_files(root, "--others", "--exclude-standard", "--", "*.py")]
    if listed[0] is None or listed[1] is None:
        return None
    names = sorted({*listed[0], *listed[1]})
    if not names:
        return None  # the repository around it ignores the folder
    return [path for name in names if _is_plain(path := root / name)]


def _git_files(root: Path, *options: str) -> list[str] | None:
    try:
        done = run_git(root, "ls-files", "-z", *options)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [name for name in os.fsdecode(done.stdout).split("\0") if name]


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in LEFT_OUT and not name.startswith(".")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and _is_source(path):
                yield path


def _is_source(path: Path) -> bool:
    return _is_plain(path) and path.stat().st_size <= MAX_FILE_BYTES


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o644
    archive.addfile(member, io.BytesIO(content))


@functools.cache
def bootstrap_program() -> bytes:
    """Return the program that a host runs before it has any of our code."""
    return Path(__file__).with_name("bootstrap.py").read_bytes()
