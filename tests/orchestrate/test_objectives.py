"""The number of devices of a training: the fastest, the cheapest, or the first to end."""

import pytest
from planned_training import training

from redco_flow.orchestrate.run.fit import with_settings
from redco_flow.orchestrate.run.objectives import ExpectedStarts, Option, choose_devices, ranked
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import write_run
from redco_flow.spec.load import load_pipeline
from redco_flow.tracking.planned_fits import compare_fits

ON_SLURM = {"executor": "slurm", "slurm": {"gpu_type": "h100"}}


# A job of two GPUs is refused; the last word is the script.
SBATCH = """#!/bin/sh
echo asked >> "$LOG"
for script; do :; done
if grep -q "gpus-per-node=h100:2" "$script"; then echo "no such node" >&2; exit 1; fi
echo "sbatch: Job 1 to start at 4000000000 using 8 processors on nodes n1" >&2
"""


def option(num_devices, step_seconds, start=None):
    return Option(f"h100x{num_devices}", "", num_devices, step_seconds, 100, start)


@pytest.mark.parametrize(
    ("objective", "options", "best"),
    [
        ("auto", [option(8, 1.0), option(4, 1.9)], "h100x8"),
        ("auto", [option(8, 1.0), option(4, 1.02)], "h100x4"),
        ("cheapest", [option(8, 1.0), option(4, 1.9)], "h100x4"),
        ("cheapest", [option(8, 1.0), option(4, 1.95)], "h100x8"),
        ("first", [option(8, 1.0, 1100.0), option(4, 1.9, 1000.0)], "h100x4"),
        ("first", [option(8, 1.0, 1050.0), option(4, 1.9, 1000.0)], "h100x8"),
        # Ends after 192 s and 190 s: the difference is below 3 % of the time until then.
        ("first", [option(8, 1.0, 1090.0), option(4, 1.92, 1000.0)], "h100x4"),
        ("cheapest", [option(8, 1.0), option(4, None)], "h100x8"),
    ],
)
def test_the_best_number_of_devices_follows_the_objective(objective, options, best):
    (first, reason), _ = ranked(options, objective, now=1000.0)

    assert (first.target, reason) == (best, "")


TWO_RANKS = {**ON_SLURM, "slurm": {"gpu_type": "h100", "processes_per_host": 2}}
ADDRESSES = [{"address": name, "gpus": 8} for name in "ab"]
ON_HOSTS = {"executor": "hosts", "hosts": {"addresses": ADDRESSES, "gpu_type": "h100"}}


@pytest.mark.parametrize(
    ("hosts", "gpus", "profile", "settings", "targets"),
    [
        (6, 8, ON_SLURM, [], [1, 2, 4, 8, 24, 48]),
        (6, 8, ON_SLURM, ["num_context_shards=4"], [4, 8, 24, 48]),
        (1, 6, TWO_RANKS, [], [2, 6]),
        (2, 8, ON_HOSTS, [], [8, 16]),
    ],
)
def test_hosts_are_divided_before_the_gpus_of_one_host_where_the_job_can_follow(
    tmp_path, hosts, gpus, profile, settings, targets
):
    requested = (f"resources.num_hosts={hosts}", f"resources.gpus_per_host={gpus}")
    asked = ("mesh=cheapest", *requested, *settings)

    chosen = training(tmp_path, *asked, serial=0.1, parallel=0.9, **profile).choose()

    assert sorted(one["num_devices"] for one in chosen["devices"]) == targets


@pytest.mark.parametrize(
    ("overrides", "profile", "note"),
    [
        (["mesh=first"], {"local": {"gpu_type": "h100"}}, "executor 'local' does not say when"),
        (["mesh=first", "group=one"], ON_SLURM, "group 'one' shares one job"),
        (["mesh=cheapest"], {"local": {"gpu_type": "h100"}}, "there is no smaller number"),
    ],
)
def test_where_devices_cannot_be_compared_the_fastest_mesh_is_chosen_and_it_is_said(
    tmp_path, overrides, profile, note
):
    asked = (*overrides, "resources.gpus_per_host=4")

    fit = training(tmp_path, *asked, serial=0.1, parallel=0.9, **profile).choose()

    assert fit["target"] == "h100x4"
    assert "choice" not in fit
    assert note in fit["search_notes"][0]


def test_an_error_of_the_requested_number_is_the_answer_and_others_are_left_out(tmp_path):
    requested = ("mesh=cheapest", "resources.gpus_per_host=2")
    asked = training(tmp_path, *requested, serial=0.1, parallel=0.9, **ON_SLURM)
    error = {"error": "the compiler died", "exit_code": 1}

    def find(failing):
        def fit(stage):
            return error if stage.resources.gpus_per_host == failing else asked.find(stage)

        return choose_devices(asked.stage, asked.planned, fit, ExpectedStarts())

    left = find(1)
    assert find(2) == error
    assert left["target"] == "h100x2"
    assert left["search_notes"] == ["1 x 1 GPUs is left out: not planned: the compiler died"]


def test_slurm_is_asked_once_for_equal_jobs_of_a_sweep_and_a_note_has_its_refusal(
    tmp_path, monkeypatch
):
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    requested = ("mesh=first", "resources.gpus_per_host=4")
    points = [
        training(tmp_path, *requested, f"seed={seed}", serial=0.1, parallel=0.9, **ON_SLURM)
        for seed in (1, 2)
    ]
    starts = ExpectedStarts()

    open_one = choose_devices(points[0].stage, points[0].planned, points[0].find, None)
    fits = [choose_devices(one.stage, one.planned, one.find, starts) for one in points]

    assert open_one is None
    assert (tmp_path / "log").read_text().split() == ["asked"] * 3  # for 4, 2 and 1 GPUs
    for fit in fits:
        assert fit["target"] == "h100x1"  # ends as early as 4 GPUs, within 3 % of the wait
        assert fit["choice"]["expected_start"] == "2096-10-02T07:06:40+00:00"
        (note,) = fit["search_notes"]
        assert note.startswith("h100x2 is left out: ")
        assert note.endswith("no such node")


def test_a_run_has_the_choice_in_its_record_and_the_same_fingerprint(tmp_path):
    requested = ("mesh=cheapest", "resources.gpus_per_host=8", "resources.memory_gib=100")
    asked = training(tmp_path, *requested, serial=0.1, parallel=0.9, **ON_SLURM)
    planned = asked.planned
    fit = asked.choose()

    pipeline = with_settings(planned.pipeline, "train", fit["chosen"], "mesh: cheapest")
    plan = make_plan(pipeline, planned.workspace)
    run = write_run(pipeline, planned.profile, planned.workspace, plan, fits={"train": fit})
    again = load_pipeline(run.resolved_path).stages["train"]

    written = planned.pipeline.document["stages"]["train"]
    auto = with_settings(planned.pipeline, "train", {"mesh": None}, "mesh: auto")
    assert auto.document["stages"]["train"] == {**written, "mesh": None}
    assert again.config.mesh is None
    assert again.config.fsdp == again.resources.gpus_per_host == 1
    assert again.resources.memory_gib == 100
    assert again.settings == asked.stage.settings
    choice = {"objective": "cheapest", "requested": "h100x8", "no_start": ""}
    found = compare_fits(run)["train"]
    assert found.to_json()["choice"] == {**choice, "expected_start": None, "expected_end": None}
    assert found.text.endswith("on h100x1; chosen of h100x8 by mesh: cheapest")
