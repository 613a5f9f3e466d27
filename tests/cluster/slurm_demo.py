"""The quickstart on a Slurm of four nodes, beside the same on this machine: equal metrics.

`make slurm-demo`. Starts the cluster of slurm_cluster.py, trains over two hosts with two processes
each, trains again in one process without Slurm, compares, and stops the cluster whatever happens.
Both train from scratch: each has a workspace of its own, which is kept to be looked at.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from slurm_cluster import INSTALL, missing_programs, running_cluster

TOLERANCE = 1e-5
PIPELINE = "pipelines/quickstart.yaml"
# Few and small steps: sums over four processes are added in another order, and each step of
# Adam's makes the difference in the last bit larger.
SMALL = (
    "data.max_examples=600",
    "stages.train.num_epochs=1",
    "stages.train.learning_rate=1e-3",
    "stages.train.keep.best=[eval_loss]",
    "stages.predict.checkpoint=best/eval_loss",
)
TWO_HOSTS = ("stages.train.resources.num_hosts=2", "profile.slurm.processes_per_host=2")


def main() -> int:
    """Run both, print their metrics side by side; return 0 if they are equal."""
    if missing := missing_programs():
        sys.stderr.write(f"slurm-demo: not here: {', '.join(missing)}; {INSTALL}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="redco-slurm-demo-"))
    try:
        with running_cluster() as cluster:
            print(cluster.run("sinfo"), flush=True)
            environment = os.environ | cluster.environment
            there = run_pipeline("slurm", folder / "slurm", environment, *TWO_HOSTS)
        here = run_pipeline("local", folder / "local", os.environ)
    except KeyboardInterrupt:
        sys.stderr.write("slurm-demo: interrupted; its cluster is stopped.\n")
        return 130
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"slurm-demo: this failed: {' '.join(error.cmd)}\n")
        return 1
    print(f"\n{side_by_side(there, here)}\nfiles: {folder}")
    return 0 if are_equal(there, here) else 1


def run_pipeline(
    profile: str, workspace: Path, environment: Mapping[str, str], *overrides: str
) -> dict[str, float]:
    """Run the small quickstart to its end; return its metrics by name.

    Raises:
        CalledProcessError: it failed, and has said why.
    """
    arguments = ["run", PIPELINE, "-p", profile, f"profile.workspace={workspace}"]
    command = [*_REDCO_FLOW, *arguments, *SMALL, *overrides, "--json"]
    print(f"$ redco-flow {' '.join(command[len(_REDCO_FLOW) :])}", flush=True)
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    except BaseException:
        # The run would outlive this process, and wait for a cluster that is no more.
        cancel = [*_REDCO_FLOW, "cancel", "--workspace", str(workspace)]
        subprocess.run(cancel, env=environment, check=False, capture_output=True)
        raise
    metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["metrics"]
    return metrics


_REDCO_FLOW = (sys.executable, "-m", "redco_flow.cli.main")


def are_equal(there: Mapping[str, float], here: Mapping[str, float]) -> bool:
    """Whether both have the same metrics, to TOLERANCE of their size."""
    return there.keys() == here.keys() and all(
        math.isclose(there[name], here[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for name in there
    )


def side_by_side(there: Mapping[str, float], here: Mapping[str, float]) -> str:
    """A table of both, with the relative difference of each."""
    lines = [f"{'metric':<20}{'slurm, 2 x 2 processes':>24}{'local':>16}{'difference':>14}"]
    for name in dict.fromkeys([*there, *here]):
        one, other = there.get(name, math.nan), here.get(name, math.nan)
        difference = abs(one - other) / max(abs(other), 1.0)
        lines.append(f"{name:<20}{one:>24.7f}{other:>16.7f}{difference:>14.1e}")
    verdict = "equal" if are_equal(there, here) else "NOT EQUAL"
    return "\n".join([*lines, f"{verdict} to {TOLERANCE:g}"])


if __name__ == "__main__":
    sys.exit(main())
