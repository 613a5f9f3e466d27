"""`mesh: first` on a busy Slurm: does it choose the number of GPUs that ends a training first?

    python benchmarks/first_to_end.py [--only 1 7]           (needs slurm-wlm and munge)

The four-node Slurm of the tests, each node with two GPUs, gets jobs that run and, in the first
twenty occupancies, jobs that wait. A training of 42, 75, 142 or 275 minutes on 8, 4, 2 or 1 GPUs,
with a time limit of 600 minutes, is then planned with `mesh: first`. Afterwards each of the four
requests is submitted alone, and the start that Slurm gives it or plans for it is read. The choice
is right where that start and the training's time are the earliest end, within 3 %. Prints a JSON
line for each occupancy, and the number of right choices.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "cluster"), str(TESTS / "orchestrate/kinds")]

from planned_training import Training, training
from slurm_cluster import SlurmCluster, running_cluster

from redco_flow.launch.executor import make_executor
from redco_flow.orchestrate.run.objectives import ExpectedStarts, choose_devices
from redco_flow.orchestrate.run.rendering import stage_to_render

AS_GOOD = 1.03
SIZES = {"h100x8": (4, 2), "h100x4": (2, 2), "h100x2": (1, 2), "h100x1": (1, 1)}
PROFILE = {"executor": "slurm", "slurm": {"gpu_type": "h100", "walltime_minutes": 600}}
WHOLE = "--exclusive"
GPU = "--gpus-per-node=h100:1"
Jobs = list[tuple[int, int, str]]
# Jobs that run, then jobs that wait: nodes, minutes, and whether it has whole nodes.
OCCUPANCIES: list[tuple[Jobs, Jobs]] = [
    ([(1, 200, WHOLE)] * 3, [(4, 60, WHOLE)]),
    ([(1, 120, WHOLE)] * 2, [(4, 30, WHOLE)]),
    ([(1, 30, WHOLE), (1, 120, WHOLE), (1, 120, WHOLE)], [(1, 60, WHOLE)]),
    ([(1, 90, WHOLE)] * 2, [(2, 60, WHOLE)]),
    ([(1, 20, WHOLE)] * 4, [(4, 60, WHOLE)]),
    ([(1, 60, WHOLE)] * 4, [(2, 300, WHOLE)] * 2),
    ([(1, 600, WHOLE)] * 2, [(3, 100, WHOLE)]),
    ([(1, 45, WHOLE)] * 3 + [(1, 300, WHOLE)], [(1, 30, WHOLE)]),
    ([(1, 30, WHOLE)], [(4, 240, WHOLE)]),
    ([(1, 600, WHOLE)], [(4, 30, WHOLE)]),
    ([(1, 700, GPU)] * 4, [(4, 100, WHOLE)]),
    ([(1, 50, GPU)] * 5, [(2, 120, GPU)] * 2),
    ([(2, 300, WHOLE)], [(3, 60, WHOLE), (1, 900, WHOLE)]),
    ([(2, 100, WHOLE), (1, 400, GPU)], [(2, 90, WHOLE), (4, 45, WHOLE)]),
    ([(4, 15, WHOLE)], [(2, 500, WHOLE), (1, 30, WHOLE)]),
    ([(3, 240, WHOLE)], [(1, 30, WHOLE), (1, 45, WHOLE), (1, 200, WHOLE)]),
    ([(1, 650, WHOLE), (1, 100, WHOLE)], [(3, 620, WHOLE)]),
    ([(4, 90, GPU)], [(4, 300, GPU), (4, 30, GPU)]),
    ([(4, 240, GPU), (2, 240, GPU)], [(4, 60, WHOLE), (1, 700, GPU)]),
    ([(2, 180, WHOLE), (2, 60, WHOLE)], [(1, 240, WHOLE)] * 3),
    *(
        ([(1, minutes, WHOLE) for minutes in running], [])
        for running in (
            [], [20], [600], [10, 10], [90, 90], [30, 120, 120], [200, 200, 200], [120, 200, 400],
            [5, 5, 5, 30], [45, 45, 45, 300],
        )
    ),
]  # fmt: skip


def submit(slurm: SlurmCluster, *options: str) -> str:
    said = slurm.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 100000")
    return said.strip()


def occupy(slurm: SlurmCluster, running: Jobs, waiting: Jobs) -> None:
    for nodes, minutes, share in running:
        submit(slurm, f"--nodes={nodes}", f"--time={minutes}", share)
    is_running = ["RUNNING"] * len(running)
    slurm.wait_for("the jobs run", lambda: [*slurm.jobs().values()] == is_running)
    for nodes, minutes, share in waiting:
        submit(slurm, f"--nodes={nodes}", f"--time={minutes}", share)
    slurm.wait_for(
        "the starts are planned", lambda: all(start_of(slurm, one) for one in slurm.jobs())
    )


def start_of(slurm: SlurmCluster, job: str) -> float:
    """When a job started or, by Slurm's plan, starts; 0: not planned."""
    fields = slurm.run(
        "squeue", "--noheader", f"--jobs={job}", "--Format=StartTime:|,SchedNodes:|,State:|"
    )
    start, nodes, state, _ = fields.strip().split("|")
    is_known = state != "PENDING" or nodes not in ("", "(null)")
    return datetime.fromisoformat(start).timestamp() if is_known else 0


def real_start(slurm: SlurmCluster, asked: Training) -> float:
    """Submit a training's request, read its start, and take it back."""
    profile = asked.planned.profile
    run = asked.planned.workspace.runs / "tiny-RUN"
    script = make_executor(profile, os.environ).render(*stage_to_render(run, asked.stage, profile))
    words = ("--nodes", "--ntasks", "--gpus", "--time")
    options = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    job = submit(slurm, *(one for one in options if one.startswith(words)))
    slurm.wait_for("its start is planned", lambda: start_of(slurm, job) > 0)
    start = start_of(slurm, job)
    slurm.run("scancel", job)
    slurm.wait_for("it has ended", lambda: job not in slurm.jobs())
    return start


def measure(slurm: SlurmCluster, folder: Path, running: Jobs, waiting: Jobs) -> dict[str, Any]:
    requests = {}
    for target, (hosts, gpus) in SIZES.items():
        (folder / target).mkdir(exist_ok=True)
        resources = (f"resources.num_hosts={hosts}", f"resources.gpus_per_host={gpus}")
        requests[target] = training(
            folder / target, "mesh=first", *resources, serial=0.5, parallel=16, **PROFILE
        )
    occupy(slurm, running, waiting)
    asked, now = requests["h100x8"], time.time()
    fit = choose_devices(asked.stage, asked.planned, asked.find, ExpectedStarts())
    assert fit is not None
    expected = {
        one["target"]: datetime.fromisoformat(one["expected_start"]).timestamp() - now
        for one in fit["devices"]
    }
    starts = {target: max(0, real_start(slurm, one) - now) for target, one in requests.items()}
    ends = {
        target: start + requests[target].seconds(math.prod(SIZES[target]))
        for target, start in starts.items()
    }
    slurm.run("scancel", "--me")
    slurm.wait_until_idle()
    return {
        "chosen": fit["target"],
        "is_right": ends[fit["target"]] <= AS_GOOD * min(ends.values()),
        "source": fit["devices"][0]["start_source"],
        "expected_start_minutes": {key: round(value / 60) for key, value in expected.items()},
        "start_minutes": {key: round(value / 60) for key, value in starts.items()},
        "end_minutes": {key: round(value / 60) for key, value in ends.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of occupancies, from 1")
    chosen = parser.parse_args().only or range(1, len(OCCUPANCIES) + 1)
    num_right = 0
    with running_cluster() as slurm, tempfile.TemporaryDirectory() as folder:
        os.environ |= slurm.environment
        for number in chosen:
            found = measure(slurm, Path(folder), *OCCUPANCIES[number - 1])
            num_right += found["is_right"]
            print(json.dumps({"occupancy": number, **found}), flush=True)
    print(json.dumps({"right": num_right, "of": len(chosen)}))


if __name__ == "__main__":
    main()
