"""Open files for writing in folders that several people share: by the umask, never through a link.

A planted link would have us truncate or extend a file elsewhere, with our rights.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

_REFUSED = (errno.EACCES, errno.EPERM)


def open_no_link(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file as `os.open` does, with no link followed at the end of its path.

    Fits `open(..., opener=open_no_link)`. A new file's mode is `mode` less the umask.

    Raises:
        OSError: it is a link (ELOOP), it is another user's and closed to this one (names the owner
            and what to do), or whatever `os.open` raises; names the path.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise link_refused(path) from error
        if error.errno in _REFUSED:
            error.strerror = f"{error.strerror}: {who_may_write(path)}"
        raise


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Raise where a directory of ours is a link to another place.

    Raises:
        OSError: it is a link; names it and where it leads.
    """
    if Path(path).is_symlink():
        raise link_refused(path)


def link_refused(path: str | os.PathLike[str]) -> OSError:
    """The error about a link in the place of a file or directory of ours."""
    return OSError(
        errno.ELOOP,
        f"it is a link to {Path(path).readlink()}, and nothing is written through a link here. "
        f"Find out who made it, and remove it",
        os.fspath(path),
    )


def who_may_write(path: str | os.PathLike[str]) -> str:
    """Say whose a file or directory is that this user may not write, and how to share it.

    Args:
        path: what could not be written; where it does not exist, its directory is meant.
    """
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        status = place.stat()
    except OSError:
        return f"{place} cannot be looked at"
    owner, group = _user_name(status.st_uid), _group_name(status.st_gid)
    return (
        f"{place} belongs to {owner} (group {group}, mode {stat.S_IMODE(status.st_mode):04o}), and "
        f"you are {_user_name(os.geteuid())}. To share a workspace, its owner gives it a group "
        f"(`chgrp -R GROUP`, `chmod -R g+w`, and `chmod g+s` on its directories), and everybody "
        f"in it works with `umask 002`"
    )


def create_beside(path: Path, mode: int = 0o666) -> tuple[int, Path]:
    """Make a new file beside `path`, to be renamed to it; return its descriptor and its path.

    Raises:
        OSError: as `open_no_link`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            return open_no_link(temporary, flags, mode), temporary
        except FileExistsError:
            continue


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
