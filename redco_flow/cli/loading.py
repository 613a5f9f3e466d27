"""Read and plan what the command line names: one run, or the points of a sweep.

Every mistake of the user's is found here, before anything starts. What all points have in common
(the files as written, code, raw data, the hub's commits) is looked at once, so they all are of one
state of it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.hub_pins import HubPins
    from redco_flow.orchestrate.ingredients import Sources
    from redco_flow.orchestrate.planning import Plan
    from redco_flow.spec.load import PipelineFile, ResolvedPipeline
    from redco_flow.spec.profile import Profile
    from redco_flow.spec.sweep import Point


@dataclass(frozen=True)
class Loaded:
    """One run to be, read and planned."""

    pipeline: ResolvedPipeline
    profile: Profile
    workspace: Workspace
    plan: Plan


class Loader:
    """Reads the pipeline and the profile that one command names."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Take the options of `arguments.add_pipeline`."""
        self._options = options
        self._profiles: dict[tuple[str, ...], Profile] = {}
        # Recipes, stage kinds and corpora of the user's are importable from where the command runs.
        if "" not in sys.path:
            sys.path.insert(0, "")

    def load(self, point: Point = ()) -> Loaded:
        """Read and plan.

        Args:
            point: overrides beyond the command's own.

        Raises:
            ConfigError: every mistake in the files and the overrides.
            UsageError: there is no such file, or the plan cannot be as it is asked for.
            WorkspaceError: the workspace cannot be written, or a data file cannot be read.
        """
        from redco_flow.orchestrate.planning import make_plan
        from redco_flow.spec.load import load_pipeline

        overrides = [*self._options.overrides, *point]
        profile = self._profile(overrides)
        pipeline = load_pipeline(self._file, overrides, profile)
        workspace = Workspace.open(profile.workspace)
        pipeline, pins = self._hub.pinned(pipeline, workspace)
        plan = make_plan(
            pipeline,
            workspace,
            from_stage=self._options.from_stage,
            until_stage=self._options.until_stage,
            force=self._options.force,
            sources=self._sources,
        )
        return Loaded(pipeline, profile, workspace, replace(plan, hub=pins))

    def _profile(self, overrides: list[str]) -> Profile:
        from redco_flow.spec.overrides import for_profile
        from redco_flow.spec.profile import load_profile

        changes = tuple(for_profile(overrides))
        if changes not in self._profiles:
            self._profiles[changes] = load_profile(self._options.profile, overrides)
        return self._profiles[changes]

    @cached_property
    def _file(self) -> PipelineFile:
        from redco_flow.spec.find import find_file
        from redco_flow.spec.load import PipelineFile

        return PipelineFile.read(find_file("pipelines", self._options.file))

    @cached_property
    def _sources(self) -> Sources:
        from redco_flow.orchestrate.ingredients import Sources

        return Sources()

    @cached_property
    def _hub(self) -> HubPins:
        from redco_flow.orchestrate.hub_pins import HubPins

        return HubPins()
