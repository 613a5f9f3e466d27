"""A short critical section between processes, by `flock` on a file beside what it guards.

The kernel drops the lock when its holder dies, so nothing is ever left locked. Knows no run
and no artifact; what must be held for long is a lease (`lease.py`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redco_flow.writing import open_no_link


@contextmanager
def exclusive(path: Path) -> Iterator[int]:
    """Hold the lock on `path` (made if missing) inside the `with`; yield its open descriptor.

    Raises:
        OSError: `path` is a link, cannot be written, or its file system has no locks; names it.
    """
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            error.filename = str(path)
            raise
        yield descriptor
    finally:
        os.close(descriptor)
