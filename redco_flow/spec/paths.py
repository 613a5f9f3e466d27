"""Keep what is written inside the workspace: no `..`, no absolute paths, no links that lead out."""

from __future__ import annotations

from pathlib import Path


def inside(root: Path, relative: str) -> Path:
    """Return `root/relative`.

    Raises:
        ValueError: the path is absolute, climbs out by `..`, or passes a symbolic link that
            leads out of `root`.
    """
    path = Path(relative)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{relative!r} leads out of the workspace {root}; give a relative path without '..'"
        )
    if not (root / path).resolve().is_relative_to(root.resolve()):
        raise ValueError(
            f"{relative!r} passes a symbolic link that leads out of the workspace {root}; remove "
            f"the link or choose another path"
        )
    return root / path
