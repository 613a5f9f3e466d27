"""Ask hosts over SSH what lies on them, and have them remove what is old.

What ended attempts of this workspace left there comes home first, so that it is no longer alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.hosts.code_snapshot import CodeSnapshot, take_snapshot
from redco_flow.launch.hosts.earlier_attempts import bring_home, ended_attempts
from redco_flow.launch.hosts.session import HostSession
from redco_flow.spec.executors import HostsSection
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_CLEAN = 3600.0


@dataclass(frozen=True)
class HostLeftover:
    """One thing on a host: fields as `leftovers.Leftover`, its size, and whether it was removed."""

    path: str
    kind: str
    age_days: float
    fate: str
    bytes: int
    is_removed: bool


@dataclass(frozen=True)
class CleanedHost:
    """What a host has, or had until now.

    Args:
        label: the host's name.
        problem: why it could not be asked; "" where it could.
        stuck: paths that could not be removed whole.
    """

    label: str
    problem: str = ""
    leftovers: list[HostLeftover] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON record."""
        return asdict(self)


def clean_hosts(
    settings: HostsSection, workspace: Workspace, keep_days: float, *, dry_run: bool
) -> list[CleanedHost]:
    """Have every host remove what is old, or only say what is there.

    Args:
        workspace: the launcher's.
        keep_days: infinity keeps everything.

    Raises:
        UsageError: this process's code cannot be copied.
    """

    async def clean_all(snapshot: CodeSnapshot) -> list[CleanedHost]:
        sessions = [HostSession(host, settings, snapshot) for host in settings.addresses]
        asked = {"keep_days": keep_days, "dry_run": dry_run}
        return await asyncio.gather(*(_clean(one, workspace, asked) for one in sessions))

    return asyncio.run(clean_all(take_snapshot()))


async def _clean(
    session: HostSession, workspace: Workspace, asked: Mapping[str, Any]
) -> CleanedHost:
    try:
        await session.open(workspace.cache / "code")
        if not asked["dry_run"]:
            await bring_home(session, ended_attempts(workspace), goes_on=False)
        answer = await session.ask(
            "clean_up", _SECONDS_TO_CLEAN, directory=session.directory, **asked
        )
    except (RedcoFlowError, OSError) as error:
        return CleanedHost(session.label, str(error))
    finally:
        session.close()
    leftovers = [
        HostLeftover(**one, is_removed=one["path"] in answer["removed"])
        for one in answer["leftovers"]
    ]
    return CleanedHost(session.label, "", leftovers, answer["stuck"])
