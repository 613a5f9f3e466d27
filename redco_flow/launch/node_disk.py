"""The directory on a node's own disk that a profile's `staging.directory` names."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.host_facts import Finding

KEY = "staging.directory"


class NoNodeDisk(RedcoFlowError):
    """The node does not have the directory that the profile names; nothing has run."""


def node_directory(named: str, environ: Mapping[str, str]) -> Path:
    """Return the directory of this node.

    Args:
        named: as in the profile; $NAME is a variable.
        environ: of the job's processes.

    Raises:
        NoNodeDisk: a variable is not set, or the directory does not exist or cannot be written.
    """
    here = os.uname().nodename
    unset = [name for name in re.findall(r"\$(\w+)", named) if not environ.get(name)]
    if unset:
        raise NoNodeDisk(
            f"{KEY} is {named}, and {' and '.join(f'${name}' for name in unset)} is not set on "
            f"{here}: the site sets it for jobs that ask for such a disk (see its documentation), "
            f"or name another directory in the profile."
        )
    directory = Path(re.sub(r"\$(\w+)", lambda name: environ[name[1]], named))
    if not directory.is_absolute() or not directory.is_dir():
        raise NoNodeDisk(
            f"{KEY} is {named}, and there is no directory {directory} on {here}: name one that "
            f"every node has."
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise NoNodeDisk(f"{KEY} is {named}, and {directory} on {here} cannot be written.")
    return directory


class NodeDisk(TypedDict):
    """A node's report on the directory.

    Args:
        problem: "" where it can be used.
        found: its path and free space.
    """

    problem: str
    found: str


def look_at_node_disk(named: str | None, environ: Mapping[str, str]) -> NodeDisk | None:
    """Return what this node has, for `redco-flow doctor`; None where no directory is named."""
    if named is None:
        return None
    try:
        directory = node_directory(named, environ)
        _try_directory(directory)
        free_gib = shutil.disk_usage(directory).free / 2**30
    except NoNodeDisk as error:
        return {"problem": str(error), "found": ""}
    except OSError as error:
        node = os.uname().nodename
        problem = f"{KEY} is {named}, and stages on {node} cannot use it: {error}."
        return {"problem": problem, "found": ""}
    return {"problem": "", "found": f"{directory}, {free_gib:.1f} GiB free"}


def _try_directory(directory: Path) -> None:
    """Write there and lock there, as stages do.

    Raises:
        OSError: that is not possible.
    """
    with tempfile.TemporaryDirectory(prefix="redco-flow-doctor-", dir=directory) as made:
        Path(made, "trial").write_bytes(bytes(4096))
        descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


def node_disk_finding(disks: Mapping[str, NodeDisk]) -> Finding:
    """Return the finding on what nodes have, by their names."""
    problems = [disk["problem"] for disk in disks.values() if disk["problem"]]
    found = "; ".join(f"{node}: {disk['found']}" for node, disk in disks.items())
    return Finding(
        "disks of the nodes",
        not problems,
        " ".join(problems) or found,
        "stages would fail there, or use the workspace instead: correct `staging` in the profile, "
        "or remove it",
    )
