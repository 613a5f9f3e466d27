"""Have XManager run one stage attempt, and say how it ended: a process of its own, detached.

`python -P -m redco_flow.launch.xmanager.experiment ATTEMPT …`, started by the executor. Owns
job.json and exit.json of the attempt and `xmanager.json` of the run. XManager's flags, event loop
and database are in this process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redco_flow.launch.call import read_call
from redco_flow.launch.processes import READY, kill_processes_of
from redco_flow.launch.xmanager.job import WorkUnit, is_over, write_ending
from redco_flow.records import open_no_link, read_json_if_present, write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now

_SECONDS_BETWEEN_LOOKS = 0.1
_HOME = Path("~/.xmanager")
"""Where XManager keeps its database."""


def main(arguments: list[str]) -> int:
    """Detach, run the attempt's work unit to its end, write the ending."""
    options = _parse(arguments)
    if os.fork() != 0:  # the submitter need not wait for us, nor see a zombie
        return 0
    attempt = AttemptDirectory(options.attempt)
    call = read_call(attempt.call_path)
    unit = WorkUnit(
        attempt=attempt.path,
        experiment=call.run,
        resources=call.resources,
        rendezvous_seconds=options.rendezvous_seconds,
        stall_seconds=options.stall_seconds,
        grace_seconds=options.grace_seconds,
    )
    try:
        asyncio.run(_run(unit, options.ready_fd))
    except BaseException:
        if attempt.read_job() is None:
            raise
        traceback.print_exc()  # XManager's trouble; what it has started runs on without it
    while not is_over(attempt, len(unit.rank_infos)):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    write_ending(attempt, len(unit.rank_infos))
    return 0


async def _run(unit: WorkUnit, ready_fd: int) -> None:
    """Add the work unit to the run's experiment; return once its jobs have ended."""
    from absl import flags

    flags.FLAGS(["redco-flow"])
    async with contextlib.AsyncExitStack() as until_jobs_end:
        with _alone():
            experiment = _open_experiment(unit)
            await until_jobs_end.enter_async_context(experiment)
            await _skip_numbers(experiment)
            # Before anything starts: who finds this record finds the job.
            _write_job_record(unit, experiment)
            try:
                await experiment.add(_job_group(experiment, unit))
            except BaseException:
                kill_processes_of(unit.attempt)  # a part of a group is of no use
                raise
        with contextlib.suppress(BrokenPipeError):  # the submitter is gone
            os.write(ready_fd, READY)
        os.close(ready_fd)


async def _skip_numbers(experiment: Any) -> None:
    """Let an experiment that was opened again number its next work unit.

    It would wait for ever for the work units of earlier processes to be launched by this one.
    """
    for number in range(1, experiment.work_unit_count + 1):
        async with experiment._work_unit_id_predictor.submit_id(number):
            pass


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Be the only process that opens XManager's database: it is not safe to make it twice."""
    folder = _HOME.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "redco-flow.lock", "w", opener=open_no_link) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_experiment(unit: WorkUnit) -> Any:
    """Return the run's experiment, made now if this is the run's first attempt here."""
    from xmanager import xm_local

    path = unit.attempt.parents[3] / "xmanager.json"  # RUN/stages/STAGE/attempts/NUMBER
    known = read_json_if_present(path)
    if known is None:
        experiment = xm_local.create_experiment(experiment_title=unit.experiment)
        write_json(path, {"experiment": experiment.experiment_id})
        return experiment
    return xm_local.get_experiment(known["experiment"])


def _job_group(experiment: Any, unit: WorkUnit) -> Any:
    from xmanager import xm, xm_local

    (executable,) = experiment.package(
        [
            xm.binary(
                path=sys.executable,
                executor_spec=xm_local.Local.Spec(),
                args=xm.SequentialArgs.from_collection(unit.arguments),
            )
        ]
    )
    jobs = {
        f"rank{rank_info.rank}": xm.Job(
            executable,
            # A streamed line of more than a megabyte would block the process for ever.
            executor=xm_local.Local(experimental_stream_output=False),
            env_vars=rank_info.to_environment(),
        )
        for rank_info in unit.rank_infos
    }
    return xm.JobGroup(**jobs)


def _write_job_record(unit: WorkUnit, experiment: Any) -> None:
    record = {
        "executor": "xmanager",
        "job_id": f"{experiment.experiment_id}-{experiment.work_unit_count + 1}",
        "attempt": str(unit.attempt),
        "num_processes": len(unit.rank_infos),
        "launcher": ProcessIdentity.current().to_json(),
        "submitted_at": utc_now(),
    }
    write_json(AttemptDirectory(unit.attempt).job_path, record)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.launch.xmanager.experiment")
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--rendezvous-seconds", type=int, required=True)
    parser.add_argument("--stall-seconds", type=float, required=True)
    parser.add_argument("--grace-seconds", type=float, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
