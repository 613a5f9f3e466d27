"""Check groups: stages of one `stages.NAME.group` can share one job of a cluster.

The job runs them one after the other, so they are a chain in which each takes from the one before
it, all run on the same profile, and everything else that they take is there when the job begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from redco_flow.errors import Problem
from redco_flow.spec.document import Document
from redco_flow.spec.stage_kind import StageConfig, StageKind


def group_problems(
    order: Sequence[str],
    kinds: Mapping[str, StageKind],
    configs: Mapping[str, StageConfig],
    upstream: Mapping[str, set[str]],
    written: Mapping[str, Document],
) -> Iterator[Problem]:
    """Yield what is wrong with the groups of a pipeline, each at the `group` of a stage.

    Args:
        order: the stages in topological order.
        upstream: of each stage, the stages that it takes from.
        written: of each stage, the values of its Config with their places in the file.
    """
    groups: dict[str, list[str]] = {}
    for name in order:
        if (group := configs[name].group) is not None:
            groups.setdefault(group, []).append(name)
    for group, members in groups.items():
        found = _problems_of_chain(group, members, kinds, configs, upstream)
        for name, message in found:
            text = f"'stages.{name}.group': {message}"
            yield written[name].origin(("group",)).problem(text)


def _problems_of_chain(
    group: str,
    members: Sequence[str],
    kinds: Mapping[str, StageKind],
    configs: Mapping[str, StageConfig],
    upstream: Mapping[str, set[str]],
) -> Iterator[tuple[str, str]]:
    first = members[0]
    earlier = _ancestors(first, upstream)
    has_gpus = [name for name in members if configs[name].resources.gpus_per_host]
    for before, name in itertools.pairwise(members):
        if configs[name].runs_on != configs[first].runs_on:
            yield (
                name,
                f"'{name}' and '{first}' of group '{group}' differ in runs_on; one job runs both",
            )
        if before not in upstream[name]:
            yield name, _why_no_chain(group, before, name, upstream)
            continue
        for other in sorted(upstream[name] - set(members) - earlier):
            yield (
                name,
                f"'{name}' also takes from '{other}', which need not have ended when the job of "
                f"group '{group}' begins: make '{name}' a job of its own",
            )
    for name in members:
        computes = kinds[name].runs_on_several_processes
        if has_gpus and computes and not configs[name].resources.gpus_per_host:
            yield (
                name,
                f"'{name}' asks for no GPUs and '{has_gpus[0]}' of the same group '{group}' does: "
                f"set stages.{name}.resources.gpus_per_host, or make it a job of its own",
            )


def _why_no_chain(group: str, before: str, name: str, upstream: Mapping[str, set[str]]) -> str:
    """Say why a stage cannot follow the stage before it in a group, from which it takes nothing."""
    between = [one for one in sorted(_ancestors(name, upstream)) if before in upstream[one]]
    if between:
        return (
            f"'{between[0]}' runs between '{before}' and '{name}' of group '{group}' and is not "
            f"in it: put it into the group, or make '{name}' a job of its own"
        )
    return (
        f"'{name}' takes nothing from '{before}', the stage before it in group '{group}'; a group "
        f"is a chain: parallel stages are jobs of their own"
    )


def _ancestors(stage: str, upstream: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [stage]
    while left:
        new = upstream.get(left.pop(), set()) - found
        found |= new
        left += new
    return found
