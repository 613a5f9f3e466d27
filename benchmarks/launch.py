"""What launching costs on Slurm: the test cluster of four nodes, on this machine, for real.

    python benchmarks/launch.py [--repeats 7] [--jobs 200] [--minutes 1]

Needs slurm-wlm and munge (apt). Ours and bare submitit take turns. Measured are: from the call
that submits to the first thing that the job does (`start_*`); from the moment a job has written
its end to the launcher's knowing it (`known_seconds`); Slurm commands per minute while many jobs
wait and each is asked for its state twice a second (`requests_per_minute`); from `kill -9` of one
of two ranks to the whole group's end (`gone_*`). Prints one JSON line last; medians.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path += [str(TESTS / "cluster"), str(TESTS / "launch" / "kinds")]  # jobs look there, too

import submitit
from job_processes import phase_of, processes_of, worker_of
from slurm_cluster import INSTALL, missing_programs, running_cluster
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.launch.call import JobResources
from redco_flow.launch.slurm.executor import SlurmExecutor
from redco_flow.spec.slurm_section import SlurmSection
from redco_flow.tracking.attempt import AttemptDirectory

COUNTED = ("sbatch", "squeue", "scontrol", "scancel", "sacct")
SECONDS_BETWEEN_LOOKS = 0.5


def submit_ours(folder: Path, action: str, number: int, **options):
    """Submit an action of the tests' tiny stage."""
    settings = SlurmSection(options=options.pop("options", []))
    attempt = make_attempt(
        folder / "workspace", action, run=f"{action.replace('_', '-')}-{number}",
        config={"folder": str(folder)}, **options,
    )  # fmt: skip
    executor = SlurmExecutor(folder / "workspace", settings, stall_seconds=600, grace_seconds=5)
    return executor.submit_call(attempt)


def seconds_until(path: Path, submit: Callable[[], object]) -> tuple[float, object]:
    """Submit; return the seconds until the job makes a file, and the job."""
    start = time.perf_counter()
    job = submit()
    wait_until(path.exists, 120)
    return time.perf_counter() - start, job


def measure_start(folder: Path, repeats: int) -> dict[str, float]:
    """Alternate ours with bare submitit; also how soon the end of ours is known."""
    ours, theirs, known = [], [], []
    bare = submitit.SlurmExecutor(folder=folder / "submitit")
    bare.update_parameters(time=10)
    for number in range(repeats):
        place = folder / f"start{number}"
        place.mkdir()
        seconds, job = seconds_until(
            place / "starts", partial(submit_ours, place, "wait_for_go", number)
        )
        ours.append(seconds)
        (place / "go").touch()
        assert job.wait_seconds(120)
        known.append(time.time() - job.attempt.exit_path.stat().st_mtime)

        path = place / "theirs"
        seconds, job = seconds_until(path, partial(bare.submit, path.touch))
        theirs.append(seconds)
        job.result()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "start_seconds": statistics.median(ours),
        "start_seconds_submitit": statistics.median(theirs),
        "start_ratio": statistics.median(ratios),
        "known_seconds": statistics.median(known),
    }


def counted_programs(folder: Path) -> Path:
    """Put programs before Slurm's on PATH that note each call in a file; return that file."""
    programs, calls = folder / "programs", folder / "calls"
    programs.mkdir()
    for name in COUNTED:
        path = programs / name
        path.write_text(f'#!/bin/sh\nprintf x >> {calls}\nexec {shutil.which(name)} "$@"\n')
        path.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    return calls


def count_requests(folder: Path, calls: Path, num_jobs: int, minutes: float) -> dict[str, float]:
    """Follow jobs that wait; count the commands that this takes."""
    jobs = [submit_ours(folder, "write", number, options=["--hold"]) for number in range(num_jobs)]
    before = calls.stat().st_size
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        for job in jobs:
            job.status()
        time.sleep(SECONDS_BETWEEN_LOOKS)
    count = calls.stat().st_size - before
    for job in jobs:
        job.cancel(check=False)
    return {"jobs": num_jobs, "requests_per_minute": count / minutes}


def measure_group_end(folder: Path, repeats: int) -> dict[str, float]:
    """Kill one rank of two; the seconds until none of their processes is left."""
    seconds = []
    for number in range(repeats):
        place = folder / f"group{number}"
        place.mkdir()
        job = submit_ours(place, "hang", number, resources=JobResources(num_hosts=2))
        ranks = [AttemptDirectory(job.attempt.path, rank) for rank in range(2)]
        wait_until(lambda ranks=ranks: all(phase_of(rank) == "hanging" for rank in ranks), 120)
        worker = worker_of(job.attempt, 1)
        start = time.perf_counter()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda job=job: not processes_of(job.attempt), 60)
        seconds.append(time.perf_counter() - start)
        job.wait_seconds(60)
    return {"gone_seconds": statistics.median(seconds), "gone_seconds_max": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=1.0)
    options = parser.parse_args()
    if missing := missing_programs():
        sys.exit(f"not here: {', '.join(missing)}; {INSTALL}")
    with tempfile.TemporaryDirectory() as folder, running_cluster() as cluster:
        os.environ.update(cluster.environment)
        calls = counted_programs(Path(folder))
        figures = measure_start(Path(folder), options.repeats)
        figures |= measure_group_end(Path(folder), options.repeats)
        figures |= count_requests(Path(folder), calls, options.jobs, options.minutes)
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
