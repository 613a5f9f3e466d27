"""The search over meshes against trying all of them, where time and memory follow closed forms."""

import pytest

from redco_flow.stages.train.mesh_search import (
    Candidate,
    MeshTrial,
    Saving,
    best_of,
    search_mesh,
)

SAVINGS = tuple(map(Saving, ("none", "minimal", "full")))
MICRO_BATCHES = tuple(Saving(num_micro=2**power) for power in range(5))
# Of what the forward and backward pass compute and keep, by what is computed again.
AGAIN = {"none": (1.0, 1.0), "minimal": (1.1, 0.3), "full": (1.33, 0.05)}
GIB = 2**30


def tried(
    num_devices, candidate, *, state, kept, compute, bandwidth, device=72, of_host=64, latency=2e-5
):
    """Return the trial of a step, by Megatron's and ZeRO's forms; `state` and `kept` in GiB.

    Gradients of data shards are all-reduced; kernels of fsdp shards are gathered twice and their
    gradients reduce-scattered, half hidden; four all-reduces a layer of model shards are not.
    Micro-batches gather again and keep less. Between hosts all is four times as slow.
    """
    model, fsdp, saving = candidate.num_model_shards, candidate.fsdp, candidate.saving
    data, micro = num_devices // model // fsdp, saving.num_micro or 1
    more, keeps = AGAIN[saving.remat or "none"]
    gib = state / (model * fsdp) + keeps * kept * (1 + (model - 1) / 2) / num_devices / micro
    kernels = state / 8 / model
    of_data, of_fsdp, of_model = (
        4 if shards > 1 and size > of_host else 1
        for shards, size in ((data, num_devices), (fsdp, model * fsdp), (model, model))
    )
    sent = of_data * 2 * (data - 1) / data * kernels / fsdp
    sent += of_fsdp * 0.5 * 3 * micro * (fsdp - 1) / fsdp * kernels
    sent += of_model * 2 * (model - 1) / model * kept / 10 * model / num_devices
    update = state / 1000 / (model * fsdp)
    turns = (data > 1) + 3 * micro * (fsdp - 1) + 4 * micro * (model - 1)
    waits = sent / bandwidth + turns * latency
    return MeshTrial(
        candidate,
        used_bytes=round(gib * GIB),
        seconds=compute * more / num_devices + update + waits,
        fits=gib <= device,
        state_bytes=round(state / (model * fsdp) * GIB),
        communication=waits,
        update=update,
    )


def search(num_devices, attempt, savings=SAVINGS, of_host=64, device=72):
    compiled = []

    def counted(candidate):
        compiled.append(attempt(candidate))
        return compiled[-1]

    trials = list(search_mesh(num_devices, of_host, savings, device * GIB, counted))
    return trials, compiled


@pytest.mark.parametrize(
    ("num_devices", "of_host", "savings"),
    [
        *((size, size, SAVINGS) for size in (1, 4, 6, 8, 16)),
        (8, 4, SAVINGS),
        *((*sizes, MICRO_BATCHES) for sizes in ((8, 8), (8, 4), (12, 4), (16, 8), (24, 8))),
    ],
)
@pytest.mark.parametrize("bandwidth", [20, 400])
@pytest.mark.parametrize(
    ("state", "kept", "compute"),
    [(4, 8, 0.5), (20, 30, 1.0), (120, 160, 3.0), (120, 2000, 12.0), (1100, 300, 8.0)],
)
def test_it_finds_what_trying_all_finds_and_compiles_few(
    num_devices, of_host, savings, bandwidth, state, kept, compute
):
    def attempt(candidate):
        sizes = {"state": state, "kept": kept, "compute": compute, "bandwidth": bandwidth}
        return tried(num_devices, candidate, of_host=of_host, **sizes)

    # Model shards are of one host, and each host has whole groups of them.
    every = [
        attempt(Candidate(model, fsdp, saving))
        for model in range(1, of_host + 1)
        for fsdp in range(1, num_devices + 1)
        for saving in savings
        if num_devices % (model * fsdp) == 0 and of_host % model == 0
    ]
    fitting = [one for one in every if one.fits]
    if savings == MICRO_BATCHES:  # no more of them than needed
        fewest = min((one.candidate.saving.num_micro for one in fitting), default=None)
        fitting = [one for one in fitting if one.candidate.saving.num_micro == fewest]

    trials, compiled = search(num_devices, attempt, savings, of_host)

    assert {one.candidate for one in trials} <= {one.candidate for one in every}
    best = best_of(trials)
    assert best.fits == bool(fitting)
    # Of more remat on a mesh on which less does not fit nothing is known: 1.057 in one case.
    fastest = min((one.seconds for one in fitting), default=None)
    assert fastest is None or best.seconds <= 1.06 * fastest
    assert len(compiled) <= 0.5 * len(every) or num_devices == 1


def test_on_the_fastest_mesh_more_is_computed_again_as_long_as_that_is_faster():
    def attempt(candidate):
        seconds = {"none": 3.0, "minimal": 2.0, "full": 2.5}[candidate.saving.remat]
        return MeshTrial(candidate, GIB, seconds, fits=True)

    trials, _ = search(2, attempt)

    assert best_of(trials).candidate == Candidate(1, 1, Saving("minimal"))


def test_of_equally_fast_meshes_the_simplest_is_chosen_and_what_cannot_be_faster_is_not_compiled():
    def attempt(candidate):
        seconds = 1.02 if candidate.num_shards == 1 else 1.0
        return MeshTrial(candidate, GIB, seconds, fits=True, communication=0.01)

    trials, compiled = search(8, attempt, savings=[Saving()])

    assert best_of(trials).candidate == Candidate(1, 1)
    assert {one.candidate for one in compiled} == {Candidate(1, 8), Candidate(1, 1)}
    assert all("not faster by 3 %" in one.refusal for one in trials if one not in compiled)
    assert len(trials) == 10  # of 8 devices: as many as pairs of powers of two with product <= 8


def test_where_nothing_fits_there_are_more_micro_batches_as_few_as_fit():
    def attempt(candidate):
        sizes = {"state": 120, "kept": 900, "compute": 3.0, "bandwidth": 400}
        return tried(8, candidate, **sizes)

    trials, compiled = search(8, attempt, savings=MICRO_BATCHES)

    # 15 GiB of state, and 112 GiB kept by one micro-batch, 56 by two.
    assert best_of(trials).candidate == Candidate(1, 8, Saving(num_micro=2))
    assert {one.candidate.saving.num_micro for one in compiled} == {1, 2}


def test_what_the_model_cannot_follow_ends_nothing():
    def attempt(candidate):
        if 4 % candidate.num_model_shards:
            return MeshTrial(candidate, refusal="4 heads")
        seconds = 1 / candidate.num_model_shards
        return MeshTrial(candidate, GIB, seconds, fits=True, communication=seconds)

    trials, _ = search(12, attempt, of_host=12)

    assert best_of(trials).candidate.num_model_shards == 4
    assert {3, 6, 12} <= {one.candidate.num_model_shards for one in trials if one.refusal}
