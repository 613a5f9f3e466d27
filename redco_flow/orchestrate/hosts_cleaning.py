"""Clean a profile's hosts, as far as the profile has any."""

from __future__ import annotations

import math

from redco_flow.errors import UsageError
from redco_flow.launch.hosts.host_clean_up import CleanedHost, clean_hosts
from redco_flow.spec.profile import Profile
from redco_flow.tracking.workspace import Workspace


def clean_profile_hosts(
    profile: Profile, older_than_days: float | None, *, dry_run: bool
) -> list[CleanedHost]:
    """Have every host of the profile remove what is old, or only say what is there.

    Args:
        older_than_days: None takes the profile's `hosts.keep_days`.

    Raises:
        UsageError: the profile has no hosts; or nothing is old by its settings.
        WorkspaceError: the workspace cannot be written.
    """
    if profile.executor != "hosts":
        raise UsageError(
            f"profile '{profile.name}' runs on no hosts (its executor is {profile.executor}); "
            f"name one that does: redco-flow clean -p PROFILE."
        )
    keep_days = older_than_days
    if keep_days is None:
        keep_days = profile.hosts.keep_days or math.inf
    if math.isinf(keep_days) and not dry_run:
        raise UsageError(
            f"hosts.keep_days of profile '{profile.name}' is 0, so nothing is ever old; say how "
            f"old with --older-than DAYS."
        )
    workspace = Workspace.open(profile.workspace)
    return clean_hosts(profile.hosts, workspace, keep_days, dry_run=dry_run)
