"""The versions of the packages that results depend on, read without importing them."""

from __future__ import annotations

import sys

_DISTRIBUTIONS = (
    *("redco-flow", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"),
    *("transformers", "tokenizers", "datasets"),
)


def package_versions() -> dict[str, str]:
    """Return name to version, of Python and of what is installed here."""
    from importlib import metadata  # 15 ms, which no worker's first line waits for

    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
