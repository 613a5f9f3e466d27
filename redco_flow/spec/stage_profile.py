"""A stage's own profile: `stages.NAME.runs_on`, for a stage that runs elsewhere than the run.

It is the name of a profile, or a mapping of profile keys that replace those of the run's profile:
`{slurm: {partition: cpu}}`, `{executor: local}`. Like the run's profile it does not enter
fingerprints.
"""

from __future__ import annotations

from redco_flow.errors import ConfigError, Problem, UsageError
from redco_flow.spec.document import Document, KeyPath, Origin, written_at
from redco_flow.spec.names import dotted
from redco_flow.spec.profile import Profile, load_profile, validated_profile

OF_THE_RUN = frozenset(
    ("name", "workspace", "max_parallel_stages", "prefect_api_url", "start_prefect_server")
) | {"ssh", "defaults"}
"""Keys of a profile that are of a run as a whole."""


def read_stage_profile(
    stage: str, own: Document, profile: Profile
) -> tuple[Profile | None, list[Problem]]:
    """Return the profile of a stage, or None with what is wrong with it.

    Args:
        own: the value of the stage's key `runs_on`, a name or a mapping.
        profile: the run's.
    """
    path: KeyPath = ("stages", stage, "runs_on")
    if isinstance(own.values, str):
        try:
            return _of_the_same_run(load_profile(own.values), profile), []
        except (UsageError, ConfigError) as error:
            return None, [own.origin(()).problem(f"'{dotted(path)}': {error}")]
    if problems := [
        own.origin((key,)).problem(
            f"'{dotted((*path, key))}': {key} is of a whole run; set profile.{key}"
        )
        for key in own.values
        if key in OF_THE_RUN
    ]:
        return None, problems
    base = written_at(profile.model_dump(mode="json"), Origin(f"profile {profile.name}"))
    found, problems = validated_profile(base.merged(own), lambda inner: (*path, *inner))
    return found and _of_the_same_run(found, profile), problems


def _of_the_same_run(own: Profile, profile: Profile) -> Profile:
    of_run = {key: getattr(profile, key) for key in OF_THE_RUN - {"name"}}
    return own.model_copy(update=of_run)
