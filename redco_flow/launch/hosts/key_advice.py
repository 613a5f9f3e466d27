"""Say whether a refused host's key is new or has changed, and what a person should do.

Changes no file: which keys are trusted is that person's to decide.
"""

from __future__ import annotations

from pathlib import Path

from redco_flow.spec.hosts_section import Host


def about_key(host: Host, known: Path, reason: str) -> str:
    """Return what to tell.

    Args:
        known: the file of known keys.
        reason: SSH's own words.
    """
    address = host.address if host.port in (None, 22) else f"[{host.address}]:{host.port}"
    port = "" if host.port in (None, 22) else f"-p {host.port} "
    scan = f"ssh-keyscan {port}{host.address} >> {known}"
    if _is_listed(host, known):
        return (
            f"the host key of {host.label} has changed ({reason}): another machine may be in "
            f"between, or the machine was installed anew. If you know why, remove the old key with "
            f"`ssh-keygen -R '{address}' -f {known}`, add the new one with `{scan}` after "
            f"comparing it with what the machine itself shows, and try again."
        )
    return (
        f"the host key of {host.label} is not known ({reason}): add it with `{scan}` after "
        f"comparing it with what the machine itself shows (ssh-keygen -lf "
        f"/etc/ssh/ssh_host_ed25519_key.pub)."
    )


def _is_listed(host: Host, known_hosts: Path) -> bool:
    import asyncssh

    try:
        found = asyncssh.read_known_hosts(str(known_hosts)).match(host.address, "", host.port or 22)
    except (OSError, ValueError):
        return False
    return any(found[:3])
