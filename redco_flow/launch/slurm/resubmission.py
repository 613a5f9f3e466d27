"""Retry an sbatch that was refused for a reason that passes: when, how often, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable

from redco_flow.errors import StageFailed
from redco_flow.launch.slurm.queue import Clock, TryLater, back_off

_BUDGET_SECONDS = 1800.0


class Resubmission:
    """The retries of one job's submission, in the process that submits it.

    A limit of submitted jobs is waited for without end, any other refusal for half an hour.

    Args:
        submit: runs sbatch; returns the job's id.
        refusal: what sbatch said at the first try.
    """

    def __init__(
        self, submit: Callable[[], str], refusal: TryLater, clock: Clock = time.monotonic
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._num_tries = 0
        self._transient_since: float | None = None
        self._note(refusal)

    @property
    def limit(self) -> str:
        """The limit that the last try met; "" if it failed for another reason."""
        return self._refusal.limit

    @property
    def reason(self) -> str:
        """The reason why the job waits to be submitted."""
        return self._refusal.limit or str(self._refusal)

    @property
    def seconds_left(self) -> float:
        """Seconds until the next try is due."""
        return self._next_at - self._clock()

    def try_again(self) -> str:
        """Submit once more; return the job's id, or "" if it is refused for a while again.

        Call it only when Slurm has no job of this name.

        Raises:
            StageFailed: it is refused for good, or has been refused for too long.
        """
        try:
            return self._submit()
        except TryLater as refusal:
            self._note(refusal)
        since = self._transient_since
        if since is not None and self._clock() - since >= _BUDGET_SECONDS:
            raise StageFailed(
                f"{self._refusal} sbatch was tried {self._num_tries} times in "
                f"{(self._clock() - since) / 60:.0f} minutes, and squeue showed no job of this "
                f"name. Once `sinfo` answers, `redco-flow resume` submits it again."
            )
        return ""

    def _note(self, refusal: TryLater) -> None:
        """Wait longer after each refusal; a limit shows that Slurm answers."""
        now = self._clock()
        self._refusal = refusal
        if refusal.limit:
            self._transient_since = None
        elif self._transient_since is None:
            self._transient_since = now
        self._num_tries += 1
        self._next_at = now + back_off(self._num_tries)
