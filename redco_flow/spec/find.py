"""Find a pipeline, profile, flow or example by what the user typed.

Looked for in this order: the given path, `./<folder>/`, the copy bundled in the wheel, the
checkout that this package was imported from. Only the process that the user started reads any
of these files; compute nodes never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from redco_flow.errors import UsageError
from redco_flow.local_paths import expanded, is_file
from redco_flow.spec.names import listed, nearest
from redco_flow.spec.secrets import hide_secrets

Folder = Literal["pipelines", "cluster_profiles", "flows", "examples"]

FLOW_FILE = "flows/pipeline.py"

_PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = {
    "pipelines": (".yaml", ".yml"),
    "cluster_profiles": (".yaml", ".yml"),
    "flows": (".py",),
    "examples": (".py",),
}


def find_file(
    folder: Folder,
    given: str | Path,
    *,
    beside: Path | None = None,
    left_out: Iterable[Path] = (),
    directory: Path = Path(),
) -> Path:
    """Return the file that `given` means: a path, or a name with or without its suffix.

    Args:
        beside: a directory to look into first.
        left_out: files that are not meant.
        directory: in which a relative path is looked up; the current one.

    Raises:
        UsageError: there is none; the message lists where it was looked for and what is there.
    """
    candidates = [directory / expanded(given)]
    if beside is not None:
        candidates.insert(0, beside / candidates[0])
    name = Path(given)
    if name.parts[:1] == (folder,):
        name = name.relative_to(folder)
    if not name.is_absolute() and ".." not in name.parts:
        candidates += [place / name for place in _directories(folder, directory)]
    for candidate in candidates:
        for path in _with_suffixes(candidate, folder):
            if is_file(path) and not any(path.samefile(one) for one in left_out):
                return path
    known = available(folder)
    where = ", ".join(map(str, _directories(folder, directory)))
    raise UsageError(
        f"{hide_secrets(repr(str(given)))}: no such file, and none of that name in {where}"
        f"{nearest(name.stem, known)} Known: {listed(known)}."
    )


def bundled_behind(
    folder: Folder, given: str | Path, directory: Path = Path()
) -> tuple[Path, Path] | None:
    """Return the file that `given` means and the bundled one that it replaces.

    None where it takes none: there is no bundled one of that name, or they are the same.

    Args:
        directory: as of `find_file`.
    """
    found, name = find_file(folder, given, directory=directory), Path(given)
    if name.parts[:1] == (folder,):
        name = name.relative_to(folder)
    if name.is_absolute():
        return None
    for place in list(_directories(folder))[1:]:
        for path in filter(is_file, _with_suffixes(place / name, folder)):
            same = path.samefile(found) or path.read_bytes() == found.read_bytes()
            return None if same else (found, path)
    return None


def available(folder: Folder) -> list[str]:
    """Return the names of the files of a folder's places, without suffix, sorted.

    Those of its folder `sites` are `sites/NAME`.
    """
    return sorted(
        {
            path.relative_to(directory).with_suffix("").as_posix()
            for directory in _directories(folder)
            for pattern in ("*", "sites/*")
            for path in directory.glob(pattern)
            if path.suffix in _SUFFIXES[folder] and not path.name.startswith("_")
        }
    )


def _directories(folder: Folder, start: Path = Path()) -> Iterator[Path]:
    yield start / folder
    yield _PACKAGE / "bundled" / folder
    # A checkout has its project file beside the package; an installed copy does not.
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        yield _PACKAGE.parent / folder


def _with_suffixes(path: Path, folder: Folder) -> Iterator[Path]:
    yield path
    if path.name and path.suffix not in _SUFFIXES[folder]:
        for suffix in _SUFFIXES[folder]:
            yield path.with_name(path.name + suffix)
