"""The command that runs `main` of one of our light modules in a new process."""

from __future__ import annotations

import sys
from pathlib import Path

import redco_flow

PACKAGE_PARENT = str(Path(redco_flow.__file__).parents[1])
# Our package comes last, so that nothing next to it takes the place of a standard module.
_CODE = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "import importlib; importlib.import_module(sys.argv.pop(1)).main()"
)


def command(module: str, *, has_site_packages: bool) -> list[str]:
    """Return the words to start it with; its own arguments follow."""
    options = ["-B", "-P", "-s"] if has_site_packages else ["-B", "-P", "-s", "-S"]
    return [sys.executable, *options, "-c", _CODE, PACKAGE_PARENT, module]
