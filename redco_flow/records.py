"""Small JSON records: written by atomic rename, read back strictly, digested canonically.

A reader sees the old record or the new one, never half of one. Nothing but the standard library
and, for files, BLAKE3, so that login nodes, supervisors and the engine can all use it. Files may
be checkpoints of gigabytes: on a processor without SHA instructions BLAKE3 is ten times faster.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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
    existing = Path(path)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        status = existing.stat()
    except OSError:
        return f"{existing} cannot be looked at"
    owner, group = _user_name(status.st_uid), _group_name(status.st_gid)
    return (
        f"{existing} belongs to {owner} (group {group}, mode {stat.S_IMODE(status.st_mode):04o}), "
        f"and you are {_user_name(os.geteuid())}. To share a workspace, its owner gives it a group "
        f"(`chgrp -R GROUP`, `chmod -R g+w`, and `chmod g+s` on its directories), and everybody "
        f"in it works with `umask 002`"
    )


def explain_no_space(error: OSError) -> str:
    """Say which file system ran out of what, of a disk or quota that is full; "" of other errors.

    Args:
        error: names the path that could not be written.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not error.filename:
        return ""
    path = existing_parent(Path(error.filename).absolute())
    try:
        usage = os.statvfs(path)
    except OSError:
        return ""
    mount = mount_of(path)
    user, num_bytes = _user_name(os.geteuid()), usage.f_bavail * usage.f_frsize
    if usage.f_files and not usage.f_favail:
        return (
            f"The file system at {mount} has no inode left, that is room for another file or "
            f"directory, whatever its size: delete files there, or choose another workspace."
        )
    if num_bytes < _FEW_BYTES:
        return (
            f"The file system at {mount} is full: {num_bytes:,} bytes and {usage.f_favail:,} "
            f"inodes are free. Free space there, or choose another workspace."
        )
    return (
        f"The file system at {mount} has {num_bytes:,} bytes and {usage.f_favail:,} inodes free: "
        f"a quota of user {user}, group or project is used up, of bytes or of inodes: `quota -s` "
        f"or `lfs quota -h -u {user} {mount}` shows which. Delete files there, have the quota "
        f"raised, or choose another workspace."
    )


_FEW_BYTES = 1 << 16


def existing_parent(path: Path) -> Path:
    """Return an absolute path, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def mount_of(path: Path) -> Path:
    """Return where the file system of an existing path is mounted."""
    mount = path.resolve()
    while not mount.is_mount():
        mount = mount.parent
    return mount


def create_beside(path: Path) -> tuple[int, Path]:
    """Make a new file beside `path`, to be renamed to it; return its descriptor and its path.

    Raises:
        OSError: as `open_no_link`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            return open_no_link(temporary, flags), temporary
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


_CHUNK_BYTES = 1 << 24


def canonical_json(value: Any) -> bytes:
    """Encode `value` as UTF-8 JSON with sorted keys and no spaces: equal values, equal bytes.

    Raises:
        ValueError: NaN or infinity, which JSON cannot carry.
        TypeError: a value that is not JSON.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def digest_json(value: Any) -> str:
    """Return the SHA-256 of `canonical_json(value)`, 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_file(path: Path) -> str:
    """Return the BLAKE3 of a file's bytes, 64 hex digits (what `b3sum` prints).

    Raises:
        OSError: the file cannot be read; names it.
    """
    return _digest_chunks(path, lambda chunk: None)


def readable_digest(path: Path) -> str:
    """Return a file's BLAKE3; "" where it cannot be read."""
    try:
        return digest_file(path)
    except OSError:
        return ""


def copy_file(path: Path, target: Path, on_chunk: Callable[[], None] = lambda: None) -> str:
    """Copy a file to a new one; return the BLAKE3 of the bytes that were copied.

    Args:
        on_chunk: called after each chunk of some megabytes.

    Raises:
        OSError: a file cannot be read or written, or `target` exists; names it.
    """
    try:
        with target.open("xb") as writer:

            def write(chunk: memoryview) -> None:
                writer.write(chunk)
                on_chunk()

            return _digest_chunks(path, write)
    except OSError as error:
        error.filename = error.filename or str(target)  # a full disk is reported without one
        raise


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk.

    Raises:
        OSError: names the path.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _digest_chunks(path: Path, use: Callable[[memoryview], object]) -> str:
    """Digest a file while each chunk of it is handed on."""
    from blake3 import blake3

    digest = blake3(max_threads=blake3.AUTO)
    for chunk in _chunks(path):
        digest.update(chunk)
        use(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[memoryview]:
    """Yield a file's bytes, all in one buffer."""
    try:
        with path.open("rb", buffering=0) as reader:
            # A whole chunk's memory costs more than a small file's digest.
            num_bytes = max(1, min(_CHUNK_BYTES, os.fstat(reader.fileno()).st_size))
            buffer = memoryview(bytearray(num_bytes))
            while count := reader.readinto(buffer):
                yield buffer[:count]
    except OSError as error:
        error.filename = str(path)
        raise


def write_text(
    path: Path,
    text: str,
    *,
    private: bool = False,
    place: Callable[[Path, Path], None] = os.replace,
) -> None:
    """Replace `path` by `text` atomically and durably; its directory must exist.

    The new file's mode is what the umask leaves of 0666. A link in its place is replaced.

    Args:
        private: this user alone may read it.
        place: gives the written file its name.

    Raises:
        OSError: the disk is full or read-only; names the path; the old content is untouched.
    """
    temporary = None
    try:
        handle, temporary = create_beside(path)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk is reported without one
        raise


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Replace `path` by `value` as indented JSON, atomically and durably.

    Args:
        private: this user alone may read it.

    Raises:
        OSError: the disk is full or read-only; the old record is untouched.
        ValueError, TypeError: `value` is not JSON; nothing is written.
    """
    write_text(path, _json_text(value), private=private)


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_new_json(path: Path, value: Any) -> bool:
    """Create `path` with `value` as `write_json` does; return False where it exists already.

    Of several processes that create it at once, on any host, one gets True.

    Raises:
        OSError, ValueError, TypeError: as `write_json`.
    """
    try:
        write_text(path, _json_text(value), place=place_new)
    except FileExistsError:
        return False
    return True


def place_new(temporary: Path, path: Path) -> None:
    """Give a temporary file its name.

    Raises:
        FileExistsError: the name is taken; the temporary file stays.
        OSError: names the path.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.replace(temporary, path)
    else:
        temporary.unlink()


CANNOT_LINK = {
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
}
"""Errors of a file system, or between two, on which a file cannot have another name."""

SECONDS_TO_SEE_RECORDS = 90.0
"""How long NFS may hide another host's file: its clients remember names for up to 60 s."""

_NUM_STALE_READS = 5
_SECONDS_BETWEEN_STALE_READS = 0.1


def list_directory(path: Path) -> None:
    """List a directory if it exists, so that NFS asks its server for the names in it."""
    with contextlib.suppress(OSError):
        os.listdir(path)


def read_bytes(path: str | os.PathLike[str], begin: int = 0) -> bytes:
    """Read a file from a byte on; again where NFS says ESTALE: it was replaced meanwhile.

    Raises:
        OSError: it cannot be read; names it.
    """
    for num_reads_left in reversed(range(_NUM_STALE_READS)):
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                return file.read()
        except OSError as error:
            if error.errno != errno.ESTALE or not num_reads_left:
                raise
            list_directory(Path(path).parent)
            time.sleep(_SECONDS_BETWEEN_STALE_READS)
    raise AssertionError("unreachable")


def moment(time: str) -> str:
    """Shorten a record's time: 2026-11-24T07:12:20.500+00:00 → 2026-11-24 07:12 UTC."""
    return f"{time[:16].replace('T', ' ')} UTC"


def change_mark(path: Path) -> tuple[int, int]:
    """Return what differs after each write of a record; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_ino)


def read_json(path: Path) -> Any:
    """Read one JSON record.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON; the message names the path.
    """
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ValueError(f"{path}: not a JSON record: {error}") from error


def read_json_if_present(path: Path) -> Any | None:
    """Read one JSON record, or None where there is no such file."""
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def append_json_line(path: Path, value: Any) -> None:
    """Append `value` as one line in a single write, so that lines of several writers never mix.

    Raises:
        OSError: the disk is full or read-only; names the path.
    """
    line = (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()
    handle = open_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        # A nearly full disk takes part of the line and reports no error.
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(handle)


def write_json_lines(
    path: Path, values: Iterable[Any], *, default: Callable[[Any], Any] | None = None
) -> None:
    """Write a file with one JSON value a line; `default` as of `json.dumps`."""
    # Half a surrogate pair has no UTF-8; written with a backslash it is JSON's own escape of it.
    errors = "backslashreplace"
    with open(path, "w", encoding="utf-8", errors=errors, opener=open_no_link) as file:
        for value in values:
            file.write(json.dumps(value, ensure_ascii=False, default=default) + "\n")


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield each whole line's value; a torn last line (a writer was killed) ends the file."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)
