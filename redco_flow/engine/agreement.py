"""Broadcast decisions of process 0 to all processes of a training.

With one process nothing here costs anything. Every process must make the same calls in the same
order, from its main thread.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first_process() -> bool:
    """Whether this process is the one that writes what is written once."""
    return jax.process_index() == 0


def decide_first(decide: Callable[[], int]) -> int:
    """Return what `decide` returns on process 0, on all of them.

    Args:
        decide: run on process 0 only; gives a number of at least 0, or raises.

    Raises:
        Exception: process 0's own error there; a `RuntimeError` on the others, so none runs on.
    """
    decided, failure = -1, None
    if is_first_process():
        try:
            decided = decide()
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failure = error
    if jax.process_count() > 1:
        decided = int(multihost_utils.broadcast_one_to_all(decided))
    if failure is not None:
        raise failure
    if decided < 0:
        raise RuntimeError("process 0 failed where all processes wait for it; see its log.")
    return decided


def check_everywhere(check: Callable[[], None]) -> None:
    """Run a check of this host's files on every process; raise on all of them if one raises.

    Raises:
        Exception: this process's own error; a `RuntimeError` where another one's check failed.
    """
    failure = None
    try:
        check()
    except Exception as error:  # noqa: BLE001 - raised below, once the others know
        failure = error
    failed = np.array([failure is not None])
    if jax.process_count() > 1:
        failed = np.ravel(multihost_utils.process_allgather(failed))
    if failure is not None:
        raise failure
    if failed.any():
        raise RuntimeError(f"process {int(failed.argmax())} found its files damaged; see its log.")


def wait_for_all(purpose: str) -> None:
    """Return once every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(purpose)
