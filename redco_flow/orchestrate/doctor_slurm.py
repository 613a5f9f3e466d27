"""Check a Slurm cluster by one short job on two nodes: what it sees of the workspace and Python.

Asks for nodes at once and gives up in seconds: nothing is left in the queue.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.package_versions import package_versions
from redco_flow.launch.slurm.probe import list_partitions, probe_nodes
from redco_flow.orchestrate.finding import Finding
from redco_flow.spec.profile import Profile
from redco_flow.tracking.workspace import Workspace

_MAX_SECONDS_OF_CLOCK_DIFFERENCE = 5.0


def examine_slurm(profile: Profile) -> Iterator[Finding]:
    """Yield one finding per check; without answering nodes, why there are none."""
    settings = profile.slurm
    try:
        partitions = list_partitions(os.environ)
    except RedcoFlowError as error:
        remedy = "run it where sbatch and squeue work, with SLURM_CONF set if the site needs it"
        yield Finding("slurm", False, str(error), remedy)
        return
    known = ", ".join(sorted(partitions))
    is_there = settings.partition is None or settings.partition in partitions
    detail = settings.partition or f"the default of {known}"
    yield Finding("partition", is_there, detail, f"slurm.partition: one of {known}")
    if not is_there:
        return
    mark = secrets.token_hex(8)
    folder = Workspace.open(profile.workspace).root / f".doctor-{mark}"
    folder.mkdir()
    (folder / "mark").write_text(mark)
    num_nodes = min(2, partitions[settings.partition] if settings.partition else 2)
    try:
        started_at = time.time()
        answers = probe_nodes(settings, folder, os.environ, num_nodes)
        yield from _findings(answers, mark, started_at)
    except RedcoFlowError as error:
        remedy = "check slurm.account, qos and constraint; or all nodes are busy: try again later"
        yield Finding("nodes", False, str(error), remedy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _findings(
    answers: Sequence[Mapping[str, Any]], mark: str, started_at: float
) -> Iterator[Finding]:
    hosts = ", ".join(f"{one['node']}" for one in answers)
    yield Finding("nodes", True, hosts)
    blind = [one["node"] for one in answers if one["read"] != mark or one["problem"]]
    yield Finding(
        "shared workspace",
        not blind,
        f"not seen, or not writable, on {', '.join(blind)}" if blind else f"the same on {hosts}",
        "put `workspace` on a file system that all nodes mount under the same path",
    )
    here = package_versions()
    differing = sorted(
        f"{name} {one['versions'].get(name)} on {one['node']}, {version} here"
        for one in answers
        for name, version in here.items()
        if one["versions"].get(name) != version
    )
    shown = "; ".join(differing) or ", ".join(f"{name} {version}" for name, version in here.items())
    yield Finding("packages on the nodes", not differing, shown, "set slurm.python or slurm.setup")
    skews = {one["node"]: one["time"] - started_at for one in answers}
    late = [
        f"{node} by {skew:.0f} s"
        for node, skew in skews.items()
        if not -_MAX_SECONDS_OF_CLOCK_DIFFERENCE <= skew <= 60 + _MAX_SECONDS_OF_CLOCK_DIFFERENCE
    ]
    yield Finding(
        "clock", not late, ", ".join(late) or "agrees", "have the nodes run an NTP client"
    )
    deaf = [f"{one['node']}: {one['unreached']}" for one in answers if one["unreached"]]
    yield Finding(
        "ports between nodes",
        not deaf,
        "; ".join(deaf) or "reachable",
        "let compute nodes reach each other at any TCP port, by the names that Slurm has for them",
    )
