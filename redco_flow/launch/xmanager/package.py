"""Whether jobs can be submitted through XManager from here, found out without importing it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from redco_flow.errors import UsageError

INSTALL = "uv pip install 'redco-flow[xmanager]'"
"""Not pip: its resolver does not come to an end with what XManager needs."""

_NEEDED = ("xmanager", "kubernetes", "protobuf")


def require_xmanager() -> None:
    """Raise unless jobs can be submitted.

    Raises:
        UsageError: the library is not installed; says what to do.
    """
    if find_spec("xmanager") is None:
        raise UsageError(
            f"executor 'xmanager' needs the library xmanager, which is not installed here; "
            f"install it with: {INSTALL}"
        )


def xmanager_versions() -> dict[str, str]:
    """Return name to version of the library and of what it is particular about."""
    versions = {}
    for name in _NEEDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
