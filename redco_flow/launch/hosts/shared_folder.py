"""Find out whether hosts see this machine's workspace, by a file that no other one can have."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from redco_flow.launch.hosts.session import HostSession
from redco_flow.records import write_text
from redco_flow.tracking.workspace import Workspace


async def is_shared(workspace: Workspace, sessions: Sequence[HostSession]) -> bool:
    """Say whether every host reads, under the same path, what is written here.

    Raises:
        HostUnreachable, HostRefused: a host does not answer.
        OSError: the workspace cannot be written; names the path.
    """
    content = secrets.token_hex(16)
    path = workspace.cache / f".seen-by-hosts-{content[:8]}"
    write_text(path, content)
    try:
        answers = await asyncio.gather(
            *(session.ask("see", path=str(path), content=content) for session in sessions)
        )
    finally:
        path.unlink()
    return all(answer["sees"] for answer in answers)
