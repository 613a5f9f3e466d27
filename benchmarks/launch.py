"""What launching costs on Slurm: the test cluster of four nodes, on this machine, for real.

    python benchmarks/launch.py [--repeats 15] [--jobs 200] [--minutes 1]

Needs slurm-wlm and munge (apt). Ours and bare submitit take turns, in random order and after random
pauses, for Slurm starts jobs in time with a clock of its own. Measured are: from the call that
submits to the worker's first line (`start_*`) and to the stage's first act (`act_*`), each over
bare submitit's time to the first act of its function; from the moment a job has written its end
to the launcher's knowing it (`known_seconds`); Slurm commands per minute while many jobs wait and
each is asked for its state twice a second (`requests_per_minute`); from `kill -9` of one of two
ranks to the whole group's end (`gone_*`). Prints one JSON line last; ratios are of medians.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path += [str(TESTS / "cluster"), str(TESTS / "launch" / "kinds")]  # jobs look there, too

import submitit
from job_processes import phase_of, processes_of, worker_of
from slurm_cluster import INSTALL, missing_programs, running_cluster
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.launch.call import JobResources
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.executor import SlurmExecutor
from redco_flow.tracking.attempt import AttemptDirectory

COUNTED = ("sbatch", "squeue", "scontrol", "scancel", "sacct")
SECONDS_BETWEEN_LOOKS = 0.5
PAUSE_SECONDS = (1.0, 3.0)


def submit_ours(folder: Path, action: str, number: int, **options):
    """Submit an action of the tests' tiny stage."""
    settings = Config(options=options.pop("options", []))
    attempt = make_attempt(
        folder / "workspace", action, run=f"{action.replace('_', '-')}-{number}",
        config={"folder": str(folder)}, **options,
    )  # fmt: skip
    executor = SlurmExecutor(folder / "workspace", settings, stall_seconds=600, grace_seconds=5)
    return executor.submit_call(attempt)


def measure_start(folder: Path, repeats: int) -> dict[str, float]:
    """Alternate ours with bare submitit; also how soon the end of ours is known."""
    figures: dict[str, list[float]] = {}
    bare = submitit.SlurmExecutor(folder=folder / "submitit")
    bare.update_parameters(time=10)
    for number in range(repeats):
        place = folder / f"start{number}"
        place.mkdir()
        measurements = [partial(start_ours, place, number), partial(start_theirs, bare, place)]
        for measure in random.sample(measurements, 2):
            time.sleep(random.uniform(*PAUSE_SECONDS))
            for name, seconds in measure().items():
                figures.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in figures.items()}
    theirs = medians["start_seconds_submitit"]
    return medians | {
        "start_ratio": medians["start_seconds"] / theirs,
        "act_ratio": medians["act_seconds"] / theirs,
    }


def start_ours(place: Path, number: int) -> dict[str, float]:
    """Run one job of ours to its end."""
    start = time.time()
    job = submit_ours(place, "wait_for_go", number)
    acted = place / "starts"
    wait_until(acted.exists, 120)
    # Its worker has written one line and waits.
    first_line = job.attempt.log_path(0).stat().st_mtime
    (place / "go").touch()
    assert job.wait_seconds(120)
    known = time.time()
    return {
        "start_seconds": first_line - start,
        "act_seconds": acted.stat().st_mtime - start,
        "known_seconds": known - job.attempt.exit_path.stat().st_mtime,
    }


def start_theirs(bare: submitit.SlurmExecutor, place: Path) -> dict[str, float]:
    """Run one job of bare submitit's; it ends within the pause that follows."""
    acted = place / "theirs"
    start = time.time()
    bare.submit(acted.touch)
    wait_until(acted.exists, 120)
    return {"start_seconds_submitit": acted.stat().st_mtime - start}


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
    parser.add_argument("--repeats", type=int, default=15)
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
