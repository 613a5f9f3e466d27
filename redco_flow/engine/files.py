"""Small JSON files and digests of checkpoints and models: atomic and durable writes, BLAKE3.

Imports nothing of the package, so that engine and models need no other part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 24


class UnreadableFile(ValueError):
    """A data, model, tokenizer or configuration file is not what its name says; names it."""


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Add the file's name to any error that a library raises at a damaged file.

    Only around the library's calls: every error in here is taken for the file's.

    Args:
        what: what the file should be: "a Parquet file".

    Raises:
        UnreadableFile: for any error but those that name the file already.
    """
    try:
        yield
    except UnreadableFile:
        raise
    except BaseException as error:
        is_own = isinstance(error, OSError) and error.filename is not None
        # Rust's panics are no `Exception`s, so that none is caught by accident.
        is_panic = type(error).__name__ == "PanicException"
        if is_own or not (isinstance(error, Exception) or is_panic):
            raise
        said = str(error) or type(error).__name__
        if isinstance(error, KeyError | TypeError | AttributeError | MemoryError):
            said = f"{type(error).__name__}: {said}"
        if str(path) in said:
            raise UnreadableFile(said) from error
        raise UnreadableFile(f"{path}: not {what}, or a damaged one: {said}") from error


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


def copy_file(path: Path, target: Path) -> str:
    """Copy a file to a new one; return the BLAKE3 of the bytes that were copied.

    Raises:
        OSError: a file cannot be read or written, or `target` exists; names it.
    """
    try:
        with target.open("xb") as writer:
            return _digest_chunks(path, writer.write)
    except OSError as error:
        error.filename = error.filename or str(target)  # a full disk is reported without one
        raise


def _digest_chunks(path: Path, use: Callable[[memoryview], object]) -> str:
    """Digest a file while each chunk of it is handed on."""
    from blake3 import blake3

    digest = blake3(max_threads=blake3.AUTO)
    with path.open("rb", buffering=0) as file:
        # A whole chunk's memory costs more than a small file's digest.
        num_bytes = max(1, min(_CHUNK_BYTES, os.fstat(file.fileno()).st_size))
        buffer = memoryview(bytearray(num_bytes))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            use(buffer[:count])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk.

    Raises:
        OSError: names the path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Read one JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON; the message names the path.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ValueError(f"{path}: not a JSON record: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, atomically and durably.

    A link in the file's place is replaced, not followed.

    Raises:
        OSError: the disk is full or read-only; names the path; the old content is untouched.
        ValueError, TypeError: `value` is not JSON; nothing is written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk is reported without one
        raise
