"""One job on hosts: its state from its own files first, then from what its driver knows.

The driver is a thread of whatever process asks: it starts with the first question and ends with
the job or with the process, which ends nothing on the hosts.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.launch.hosts.driver import HostsDriver
from redco_flow.launch.hosts.record import HostsRecord
from redco_flow.launch.job import CallJob, JobStatus, status_from_files
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now


class HostsJob(CallJob):
    """A job on one host or several."""

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, job_id, tasks)
        self._record = dict(record or self.attempt.read_job() or {})

    def status(self) -> JobStatus:
        """Say what exit.json says, else what the driver last heard."""
        status = status_from_files(self.attempt)
        if status is not None:
            return status
        driver = driver_of(self.attempt.path)
        return driver.status if driver.is_alive else self._without_driver(driver)

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 (submitit's signature)
        """Have every host stop its ranks, and kill them when their grace is over.

        A second call kills at once. A host that does not answer is asked when it does.
        """
        if not self.done():
            again = self.attempt.cancel_path.exists()
            write_json(self.attempt.cancel_path, {"time": utc_now(), "at_once": again})
        if check:
            self.wait()

    def record(self) -> dict[str, Any]:
        """Return what stands in job.json."""
        return dict(self.attempt.read_job() or self._record)

    def _without_driver(self, driver: RunningDriver) -> JobStatus:
        """The driver's thread has ended: by the job's end, or by an error of ours."""
        status = status_from_files(self.attempt)
        if status is not None:
            return status
        raise driver.error or RuntimeError("the job's driver ended without a word")


class RunningDriver:
    """A driver in its thread."""

    def __init__(self, driver: HostsDriver) -> None:
        self.error: BaseException | None = None
        self._driver = driver
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def status(self) -> JobStatus:
        """What the driver knows now."""
        return self._driver.status

    @property
    def is_alive(self) -> bool:
        """Whether it still drives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._driver.run()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that asks)
            self.error = error


@functools.cache
def driver_of(attempt: Path) -> RunningDriver:
    """Return the one driver of this process for a job, started now if it is new."""
    directory = AttemptDirectory(attempt)
    record = HostsRecord.from_json(directory.read_job() or {})
    return RunningDriver(HostsDriver(directory, record, dict(os.environ)))
