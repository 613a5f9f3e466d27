"""The search over meshes against trying all of them, where time and memory follow closed forms."""

import pytest

from redco_flow.stages.train.mesh_search import Candidate, Trial, search_mesh

REMATS = ("none", "minimal", "full")
# Of what the forward and backward pass compute and keep, by what is computed again.
AGAIN = {"none": (1.0, 1.0), "minimal": (1.1, 0.3), "full": (1.33, 0.05)}


def cost(num_devices, candidate, *, state, kept, compute, bandwidth, latency=2e-5):
    """Return (GiB, seconds) of a step, by Megatron's and ZeRO's forms; `state` and `kept` in GiB.

    Gradients of data shards are all-reduced; kernels of fsdp shards are gathered twice and their
    gradients reduce-scattered, half hidden; four all-reduces a layer of model shards are not.
    """
    model, fsdp = candidate.num_model_shards, candidate.fsdp
    data = num_devices // model // fsdp
    more, keeps = AGAIN[candidate.remat]
    gib = state / (model * fsdp) + keeps * kept * (1 + (model - 1) / 2) / num_devices
    kernels = state / 8 / model
    sent = 2 * (data - 1) / data * kernels / fsdp + 0.5 * 3 * (fsdp - 1) / fsdp * kernels
    sent += 2 * (model - 1) / model * kept / 10 * model / num_devices
    update = state / 1000 / (model * fsdp)
    turns = (data > 1) + 3 * (fsdp - 1) + 4 * (model - 1)
    return gib, compute * more / num_devices + update + sent / bandwidth + turns * latency


@pytest.mark.parametrize("num_devices", [1, 4, 6, 8, 16])
@pytest.mark.parametrize("bandwidth", [20, 400])
@pytest.mark.parametrize(
    ("state", "kept", "compute"),
    [(4, 8, 0.5), (20, 30, 1.0), (120, 160, 3.0), (120, 2000, 12.0), (1100, 300, 8.0)],
)
def test_it_finds_what_trying_all_finds_with_fewer_trials(
    num_devices, bandwidth, state, kept, compute
):
    def attempt(candidate, device_gib=72):
        gib, seconds = cost(
            num_devices, candidate, state=state, kept=kept, compute=compute, bandwidth=bandwidth
        )
        return Trial(candidate, round(gib * 2**30), seconds if gib <= device_gib else None)

    every = [
        attempt(Candidate(model, fsdp, remat))
        for model in range(1, num_devices + 1)
        for fsdp in range(1, num_devices + 1)
        for remat in REMATS
        if num_devices % (model * fsdp) == 0
    ]
    best = min((one.seconds for one in every if one.seconds is not None), default=None)

    trials = list(search_mesh(num_devices, num_devices, REMATS, attempt))

    found = min((one.seconds for one in trials if one.seconds is not None), default=None)
    assert (found is None) == (best is None)
    assert found is None or found <= 1.05 * best
    assert len(trials) < len(every) or num_devices == 1


def test_on_the_fastest_mesh_more_is_computed_again_where_that_is_faster():
    def attempt(candidate):
        seconds = {"none": 3.0, "minimal": 4.0, "full": 2.0}[candidate.remat]
        return Trial(candidate, 2**30, seconds + candidate.num_model_shards)

    trials = list(search_mesh(2, 2, REMATS, attempt))

    fastest = min(trials, key=lambda one: one.seconds)
    assert fastest.candidate == Candidate(1, 2, "full")


def test_what_the_model_cannot_follow_ends_nothing():
    def attempt(candidate):
        if 4 % candidate.num_model_shards:
            return Trial(candidate, refusal="4 heads")
        return Trial(candidate, 2**30, 1 / candidate.num_model_shards)

    trials = list(search_mesh(12, 12, REMATS, attempt))

    assert min(trials, key=lambda one: one.seconds or 9).candidate.num_model_shards == 4
    assert {one.candidate.num_model_shards for one in trials if one.refusal} == {3, 6, 12}
