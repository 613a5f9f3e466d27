"""Read and plan what the command line names: one run, or the points of a sweep.

Every mistake of the user's is found here, before anything starts. What all points have in common
(files as written, code, raw data, the hub's commits, aliases) is looked at once, so they all are of
one state of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from redco_flow.errors import ConfigError, Problem
from redco_flow.local_paths import expanded
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.pins.aliases import AliasPins
    from redco_flow.orchestrate.pins.hub import HubPins
    from redco_flow.orchestrate.run.ingredients import Sources
    from redco_flow.orchestrate.run.plan import Plan
    from redco_flow.spec.find import Folder
    from redco_flow.spec.load import PipelineFile, ResolvedPipeline
    from redco_flow.spec.profile import Profile
    from redco_flow.spec.sweep_points import Point


@dataclass(frozen=True)
class Loaded:
    """One run to be, read and planned."""

    pipeline: ResolvedPipeline
    profile: Profile
    workspace: Workspace
    plan: Plan
    sources: Sources

    @property
    def identity(self) -> str:
        """A digest of settings, data and code, by which a schedule knows that nothing is new."""
        from redco_flow.orchestrate.run.ingredients import identity_of

        return identity_of(self.pipeline, self.workspace, self.sources)


def note_replaced(**named: str) -> list[str]:
    """Say on standard error which files here take the place of a bundled one; return them.

    Args:
        named: what the command line names, by its folder.
    """
    from redco_flow.spec.find import bundled_behind

    replaced = []
    for folder, given in named.items():
        if (found := bundled_behind(cast("Folder", folder), given)) is not None:
            here, bundled = found
            sys.stderr.write(f"note: {here} takes the place of the bundled {bundled.name}\n")
            replaced.append(str(here))
    return replaced


class Loader:
    """Reads the pipeline and the profile that one command names."""

    def __init__(
        self,
        options: argparse.Namespace,
        *,
        only_reads: bool = False,
        is_for_other_devices: bool = False,
        file: PipelineFile | None = None,
    ) -> None:
        """Take the options of `arguments.add_pipeline`.

        Args:
            is_for_other_devices: not for the profile's, whose limits are then not checked.
            file: the pipeline, where the options name no file.
            only_reads: nothing will be started: the workspace need be neither there nor writable.
        """
        self._options = options
        self._only_reads = only_reads
        self._is_for_other_devices = is_for_other_devices
        self._given = file
        self._profiles: dict[tuple[str, ...], Profile] = {}
        self._notes_said: set[str] = set()

    def load(self, point: Point = ()) -> Loaded:
        """Read and plan.

        Args:
            point: overrides beyond the command's own.

        Raises:
            ConfigError: every mistake in the files and the overrides.
            UsageError: there is no such file, or the plan cannot be as it is asked for.
            DoesNotFit: every stage that can never have its resources under the profile.
            WorkspaceError: the workspace cannot be written, or a data file cannot be read.
        """
        from redco_flow.orchestrate.run.device_checks import check_devices
        from redco_flow.orchestrate.run.plan import make_plan
        from redco_flow.spec.load import load_pipeline

        _ = self.replaced
        overrides = [*self._options.overrides, *point]
        profile = self._profile(overrides)
        pipeline = load_pipeline(self._file, overrides, profile, looks_into_data=True)
        self._say(pipeline.notes)
        root = expanded(profile.workspace).absolute()
        workspace = Workspace(root) if self._only_reads else Workspace.open(root)
        pipeline, pins = self._hub.pinned(pipeline, workspace)
        self._say(pipeline.notes)
        pipeline, aliases = self._aliases.pinned(pipeline, workspace)
        plan = make_plan(
            pipeline,
            workspace,
            from_stage=self._options.from_stage,
            until_stage=self._options.until_stage,
            force=self._options.force,
            sources=self._sources,
        )
        if not self._is_for_other_devices:
            notes = check_devices(pipeline, profile, plan, os.environ)
            self._say([f"note: {note}" for note in notes])
        plan = replace(plan, hub=pins, aliases=aliases)
        return Loaded(pipeline, profile, workspace, plan, self._sources)

    def _say(self, notes: Sequence[str]) -> None:
        """Write each note once, whatever the number of points."""
        for note in notes:
            if note not in self._notes_said:
                self._notes_said.add(note)
                sys.stderr.write(f"{note}\n")

    def _profile(self, overrides: list[str]) -> Profile:
        from redco_flow.spec.overrides import for_profile
        from redco_flow.spec.profile import load_own_profile

        changes = tuple(for_profile(overrides))
        if changes not in self._profiles:
            try:
                self._profiles[changes] = load_own_profile(self._options.profile, overrides)
            except ConfigError as error:
                problems = [*error.problems, *self._problems_of_file(overrides)]
                raise ConfigError(problems) from error
        return self._profiles[changes]

    def _problems_of_file(self, overrides: list[str]) -> Sequence[Problem]:
        """Return the pipeline's mistakes where the profile has some, too.

        None if the profile has `defaults`: they may be what the pipeline lacks.
        """
        from redco_flow.spec.load import load_pipeline
        from redco_flow.spec.profile import merged_layers

        try:
            if merged_layers(self._options.profile).get(("defaults",)) is None:
                load_pipeline(self._file, overrides, looks_into_data=True)
        except ConfigError as error:
            return error.problems
        return ()

    @cached_property
    def replaced(self) -> list[str]:
        """The files here that take a bundled one's place; each is said once."""
        from redco_flow.spec.find import FLOW_FILE

        return note_replaced(
            pipelines=self._options.file,
            cluster_profiles=self._options.profile,
            flows=FLOW_FILE,
        )

    @cached_property
    def _file(self) -> PipelineFile:
        from redco_flow.spec.find import find_file
        from redco_flow.spec.load import PipelineFile

        if self._given is not None:
            return self._given
        return PipelineFile.read(find_file("pipelines", self._options.file))

    @cached_property
    def _sources(self) -> Sources:
        from redco_flow.orchestrate.run.ingredients import Sources

        return Sources()

    @cached_property
    def _aliases(self) -> AliasPins:
        from redco_flow.orchestrate.pins.aliases import AliasPins

        return AliasPins()

    @cached_property
    def _hub(self) -> HubPins:
        from redco_flow.orchestrate.pins.hub import HubPins

        return HubPins()
