"""The quickstart under another profile, beside the same without one: equal metrics.

`make slurm-demo`, or `python tests/cluster/profile_demo.py slurm|hosts|xmanager`. Trains in four
processes (on two nodes of a Slurm cluster, on two machines behind sshd, in one work unit of
XManager), trains again in one process with four devices, compares, and stops what it started
whatever happens. Both train from scratch: each has a workspace of its own, which is kept to be
looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import slurm_cluster

sys.path.append(str(Path(__file__).resolve().parent.parent / "hosts"))
import ssh_hosts

TOLERANCE = 1e-5
PIPELINE = "pipelines/quickstart.yaml"
# Few and small steps: each step of Adam's makes a difference in the last bit larger.
SMALL = (
    "data.max_examples=600",
    "stages.train.num_epochs=1",
    "stages.train.learning_rate=1e-3",
    "stages.train.keep.best=[eval_loss]",
    "stages.predict.checkpoint=best/eval_loss",
)
TWO_HOSTS = "stages.train.resources.num_hosts=2"


class CannotShow(Exception):
    """What the demo needs is not on this machine."""


@dataclass(frozen=True)
class Place:
    """Where the four processes run.

    Args:
        title: of the column of its metrics.
        profile: a name, or a profile's file.
    """

    title: str
    profile: str
    overrides: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def on_slurm(folder: Path) -> Iterator[Place]:
    """Start a cluster of four nodes."""
    if missing := slurm_cluster.missing_programs():
        raise CannotShow(f"not here: {', '.join(missing)}; {slurm_cluster.INSTALL}")
    with slurm_cluster.running_cluster() as cluster:
        print(cluster.run("sinfo"), flush=True)
        overrides = (TWO_HOSTS, "profile.slurm.processes_per_host=2")
        yield Place("slurm, 2 x 2 processes", "slurm", overrides, cluster.environment)


@contextlib.contextmanager
def on_hosts(folder: Path) -> Iterator[Place]:
    """Start two machines that share no disk with this one."""
    if missing := ssh_hosts.missing_programs():
        raise CannotShow(f"not here: {', '.join(missing)}; {ssh_hosts.INSTALL}")
    if reason := ssh_hosts.why_not_permitted():
        raise CannotShow(reason)
    import yaml

    with ssh_hosts.running_hosts() as hosts:
        section = hosts.profile(shared_workspace=False, processes_per_host=2)
        path = folder / "hosts.yaml"
        path.write_text(yaml.safe_dump({"executor": "hosts", "hosts": section}, sort_keys=False))
        yield Place("hosts, 2 x 2 processes", str(path), (TWO_HOSTS,))


@contextlib.contextmanager
def on_xmanager(folder: Path) -> Iterator[Place]:
    """Use XManager's local backend."""
    if importlib.util.find_spec("xmanager") is None:
        raise CannotShow("no xmanager in this environment: uv pip install 'redco-flow[xmanager]'")
    overrides = (
        "stages.train.resources.num_hosts=1",
        "profile.xmanager.processes_per_host=4",
    )
    yield Place("xmanager, 4 processes", "xmanager", overrides)


# One process with four devices: as many shards, so that only their sums' order may differ. One
# greedy choice between two tokens that are nearly equal would show in BLEU.
HERE = Place("local", "local", ("profile.num_cpu_devices=4",))
PLACES = {"slurm": on_slurm, "hosts": on_hosts, "xmanager": on_xmanager}


def main() -> int:
    """Run both, print their metrics side by side; return 0 if they are equal."""
    parser = argparse.ArgumentParser(prog="profile_demo", description=__doc__.splitlines()[0])
    parser.add_argument("profile", choices=PLACES, nargs="?", default="slurm")
    profile = parser.parse_args().profile
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix=f"redco-{profile}-demo-"))
    try:
        with PLACES[profile](folder) as place:
            there = run_pipeline(place, folder / profile)
        here = run_pipeline(HERE, folder / "local")
    except CannotShow as error:
        sys.stderr.write(f"profile_demo: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("profile_demo: interrupted; what it started is stopped.\n")
        return 130
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"profile_demo: this failed: {' '.join(error.cmd)}\n")
        return 1
    print(f"\n{side_by_side(place.title, there, here)}\nfiles: {folder}")
    return 0 if are_equal(there, here) else 1


def run_pipeline(place: Place, workspace: Path) -> dict[str, float]:
    """Run the small quickstart to its end; return its metrics by name.

    Raises:
        CalledProcessError: it failed, and has said why.
    """
    arguments = ["run", PIPELINE, "-p", place.profile, f"profile.workspace={workspace}"]
    command = [*_REDCO_FLOW, *arguments, *SMALL, *place.overrides, "--json"]
    print(f"$ redco-flow {' '.join(command[len(_REDCO_FLOW) :])}", flush=True)
    environment = os.environ | place.environment
    started_at = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    except BaseException:
        # The run would outlive this process, and wait for a cluster that is no more.
        cancel = [*_REDCO_FLOW, "cancel", "--workspace", str(workspace)]
        subprocess.run(cancel, env=environment, check=False, capture_output=True)
        raise
    print(f"{place.title}: {time.monotonic() - started_at:.0f} s", flush=True)
    metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["metrics"]
    return metrics


_REDCO_FLOW = (sys.executable, "-m", "redco_flow.cli.main")


def are_equal(there: Mapping[str, float], here: Mapping[str, float]) -> bool:
    """Whether both have the same metrics, to TOLERANCE of their size."""
    return there.keys() == here.keys() and all(
        math.isclose(there[name], here[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for name in there
    )


def side_by_side(title: str, there: Mapping[str, float], here: Mapping[str, float]) -> str:
    """A table of both, with the relative difference of each."""
    lines = [f"{'metric':<20}{title:>24}{'local':>16}{'difference':>14}"]
    for name in dict.fromkeys([*there, *here]):
        one, other = there.get(name, math.nan), here.get(name, math.nan)
        difference = abs(one - other) / max(abs(other), 1.0)
        lines.append(f"{name:<20}{one:>24.7f}{other:>16.7f}{difference:>14.1e}")
    verdict = "equal" if are_equal(there, here) else "NOT EQUAL"
    return "\n".join([*lines, f"{verdict} to {TOLERANCE:g}"])


if __name__ == "__main__":
    sys.exit(main())
