"""`mesh: first`: the number of devices with which a training ends first, by Slurm's own starts."""

from datetime import datetime

import pytest
from planned_training import training

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROFILE = {"executor": "slurm", "slurm": {"gpu_type": "h100", "walltime_minutes": 600}}
# The time limits of jobs that have a node each; nodes and time limits of jobs that then wait; the
# devices with which the training ends first; and what says when it starts.
OCCUPANCIES = [
    ([], [], "h100x8", "sbatch --test-only"),
    ([90, 90], [], "h100x4", "sbatch --test-only"),
    ([120, 200, 400], [], "h100x2", "sbatch --test-only"),
    ([5, 5, 5, 30], [], "h100x8", "sbatch --test-only"),
    # All start after the job that waits: no time limit of 600 minutes fits before it.
    ([200, 200, 200], [(4, 60)], "h100x8", "squeue: 1 ahead"),
    # On one host it starts at once: three are left for the job that waits.
    ([600, 600], [(3, 100)], "h100x2", "squeue: 1 ahead"),
    ([45, 45, 45, 300], [], "h100x4", "sbatch --test-only"),
]


def occupy(slurm, running, waiting):
    """Submit jobs; wait until the former run, and until Slurm has planned when the latter start."""

    def submit(nodes, limit):
        job = ["--exclusive", "--output=/dev/null", f"--time={limit}", "--wrap=sleep 100000"]
        slurm.run("sbatch", f"--nodes={nodes}", *job)

    for limit in running:
        submit(1, limit)
    are_running = ["RUNNING"] * len(running)
    slurm.wait_for("the nodes are occupied", lambda: [*slurm.jobs().values()] == are_running)
    for nodes, limit in waiting:
        submit(nodes, limit)
    of_planned = ["squeue", "--noheader", "--states=PENDING", "--Format=SchedNodes"]
    slurm.wait_for("the starts are planned", lambda: "(null)" not in slurm.run(*of_planned))


def test_the_training_gets_the_devices_with_which_it_ends_first(slurm, tmp_path):
    """Where none waits, a job of k hosts starts once the k-th of the four nodes is free.

    The training takes 42, 75, 142 and 275 minutes with 8, 4, 2 and 1 GPUs; each node has 2.
    """
    requested = ("mesh=first", "resources.num_hosts=4", "resources.gpus_per_host=2")
    asked = training(tmp_path, *requested, serial=0.5, parallel=16, **PROFILE)
    for running, waiting, best, source in OCCUPANCIES:
        occupy(slurm, running, waiting)

        fit = asked.choose()

        assert (fit["target"], fit["choice"]["objective"]) == (best, "first"), (running, waiting)
        assert fit["devices"][0]["start_source"] == source
        if running:
            slurm.run("scancel", "--me")
            slurm.wait_until_idle()
    # Of the last one, whose job of four hosts waits for 300 minutes.
    by_target = {one["target"]: one for one in fit["devices"]}
    starts = [
        datetime.fromisoformat(by_target[target]["expected_start"]).timestamp()
        for target in ("h100x4", "h100x8")
    ]
    assert starts[1] - starts[0] == pytest.approx(60 * (300 - 45), abs=30)
    assert by_target["h100x8"]["reason"] == "ends later"


def test_what_slurm_would_refuse_loses_and_without_any_start_the_fastest_is_chosen(slurm, tmp_path):
    requested = ("mesh=first", "resources.num_hosts=8", "resources.gpus_per_host=2")
    refused = {**PROFILE, "slurm": {**PROFILE["slurm"], "constraint": "a100"}}

    too_many = training(tmp_path, *requested, serial=0.5, parallel=16, **PROFILE).choose()
    nowhere = training(tmp_path, *requested, serial=0.5, parallel=16, **refused).choose()

    assert too_many["target"] == "h100x8"
    reasons = {one["target"]: one["reason"] for one in too_many["devices"]}
    assert "Requested node configuration is not available" in reasons["h100x16"]
    assert nowhere["target"] == "h100x16"
    assert any(note.startswith("h100x16 is left out: ") for note in too_many["search_notes"])
    (note,) = nowhere["search_notes"]
    assert "Invalid feature specification" in note
    choice = {"objective": "first", "requested": "h100x16", "no_start": note}
    assert nowhere["choice"] == {**choice, "expected_start": None, "expected_end": None}
