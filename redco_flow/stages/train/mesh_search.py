"""Search for the mesh with which a train step is fastest, and for what makes it fit.

Galvatron (arXiv 2211.13878) searches a strategy for each layer. Our layers are scanned as one, so a
strategy is a mesh, and a saving of memory: more rematerialisation, or more micro-batches. Meshes
have closed forms for what differs between them, but for communication, which only a compiled
program shows. So a few are compiled, and of the others is known that they cannot fit or cannot be
faster: parameters, gradients and optimizer state are divided by all fsdp and model shards, the
update reads and writes them once, and the rest of a step is the same on every mesh, or more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

AS_FAST = 1.03
"""A step that takes at most this many times the fastest one's counts as fast as that."""

# A layer's kernels, which fsdp gathers, are smaller with more model shards.
_LESS_WITH_MODEL_SHARDS = 0.85
_ROOMY = 0.85


@dataclass(frozen=True)
class Saving:
    """A way for a step to need less memory; None: as it is set.

    Args:
        remat: as in the model's config.
        num_micro: micro-batches of a step.
    """

    remat: str | None = None
    num_micro: int | None = None


@dataclass(frozen=True)
class Candidate:
    """Devices that are neither fsdp nor model shards are data shards, or context shards as set."""

    num_model_shards: int
    fsdp: int
    saving: Saving = Saving()

    @property
    def num_shards(self) -> int:
        """Devices that share one copy of the parameters."""
        return self.num_model_shards * self.fsdp


@dataclass(frozen=True)
class MeshTrial:
    """A candidate, and what its compilation says.

    Args:
        used_bytes: of a device's memory; None where they are not known.
        seconds: of a step; None where that is not known, or not compiled.
        fits: whether the devices have as much memory.
        state_bytes: of parameters, gradients and optimizer state on a device.
        communication: the seconds of a step that wait for it.
        update: the seconds in which the optimizer reads and writes its state.
        weights: the seconds in which products read their kernels, where that takes as long as to
            compute.
        refusal: why it was not compiled, or its time is not known.
        is_estimate: whether it was not compiled, and the bytes are estimated.
    """

    candidate: Candidate
    used_bytes: int | None = None
    seconds: float | None = None
    fits: bool = False
    state_bytes: int = 0
    communication: float = 0.0
    update: float = 0.0
    weights: float = 0.0
    refusal: str = ""
    is_estimate: bool = False

    def least_bytes(self, other: Candidate) -> float:
        """Return the bytes that another candidate with as much remat needs at least."""
        assert self.used_bytes is not None
        num_micro = self.candidate.saving.num_micro or 1
        kept = (self.used_bytes - self.state_bytes) * num_micro / (other.saving.num_micro or 1)
        model = self.candidate.num_model_shards
        if other.num_model_shards > model:
            kept *= _LESS_WITH_MODEL_SHARDS
        else:  # Activations are split over data shards; model shards hold copies of some.
            kept *= other.num_model_shards / model
        return kept + self.state_bytes * self.candidate.num_shards / other.num_shards

    def least_seconds(self, other: Candidate) -> float:
        """Return the seconds that a step of another candidate takes at least."""
        assert self.seconds is not None
        update = self.update * (self.candidate.num_shards / other.num_shards - 1)
        shared = self.candidate.num_model_shards / other.num_model_shards
        return self.seconds - self.communication + update - self.weights * max(0.0, 1 - shared)


def search_mesh(
    num_devices: int,
    of_host: int,
    savings: Sequence[Saving],
    limit_bytes: int,
    attempt: Callable[[Candidate], MeshTrial],
) -> Iterator[MeshTrial]:
    """Yield each candidate, tried or refused; `best_of` chooses among them.

    Savings are in turn: the next one where no mesh fits with those before, and then, if it is of
    rematerialisation, on the fastest mesh, as long as that is faster: what is kept has to be
    written and read, too.

    Args:
        num_devices: of one context shard.
        of_host: of these, the devices of a host. Model shards exchange most, so their number
            divides it, and none has to exchange with another host.
        savings: the one that saves least first.
        limit_bytes: of a device's memory.
    """
    trials: list[MeshTrial] = []

    def tried(candidate: Candidate) -> MeshTrial:
        reason = _why_not(candidate, trials, limit_bytes, of_host)
        trial = MeshTrial(candidate, refusal=reason) if reason else attempt(candidate)
        trials.append(trial)
        return trial

    remaining, best = list(savings), None
    while remaining and (best is None or not best.fits):
        saving = remaining.pop(0)
        for model in _divisors(math.gcd(num_devices, of_host)):
            sizes = _divisors(num_devices // model)
            in_host = of_host // model
            ends = dict.fromkeys([sizes[-1], *([in_host] if in_host in sizes else []), sizes[0]])
            of_ends = [tried(Candidate(model, fsdp, saving)) for fsdp in ends]
            yield from of_ends
            between = [fsdp for fsdp in sizes if fsdp not in ends]
            begins_small = _seconds(of_ends[-1]) < _seconds(of_ends[0])
            for fsdp in between if begins_small else reversed(between):
                yield tried(Candidate(model, fsdp, saving))
        best = best_of(trials)
        if best is None:  # no mesh can be followed, with any saving
            return
    for more in remaining:
        if best is None or more.num_micro != best.candidate.saving.num_micro:
            return
        trial = attempt(Candidate(best.candidate.num_model_shards, best.candidate.fsdp, more))
        yield trial
        if _seconds(trial) >= _seconds(best):
            return
        best = trial


def best_of(trials: Sequence[MeshTrial]) -> MeshTrial | None:
    """Return the simplest of the fastest that fit; where none does, what needs least memory.

    An estimate is the best only where none was compiled. None: no bytes are known.
    """
    fastest = min(map(_seconds, trials), default=math.inf)
    if fastest < math.inf:
        savings = list(dict.fromkeys(one.candidate.saving for one in trials))
        return min(
            (one for one in trials if _seconds(one) <= AS_FAST * fastest),
            key=lambda one: (*_shards(one.candidate), savings.index(one.candidate.saving)),
        )
    known = [one for one in trials if one.used_bytes is not None]
    return min(known, key=lambda one: (one.is_estimate, one.used_bytes or 0), default=None)


def _shards(candidate: Candidate) -> tuple[int, int]:
    """Return the numbers by which one mesh is simpler than another."""
    return candidate.num_model_shards, candidate.fsdp


def _seconds(trial: MeshTrial) -> float:
    """Return the seconds of a step; infinite where it does not fit, or they are not known."""
    return trial.seconds if trial.fits and trial.seconds is not None else math.inf


def _why_not(
    candidate: Candidate, trials: Sequence[MeshTrial], limit_bytes: int, of_host: int
) -> str:
    """Say by the compiled ones why a candidate need not be; empty where it is to be compiled."""
    compiled = [one for one in trials if one.used_bytes is not None and not one.is_estimate]
    remat = candidate.saving.remat
    alike = [one for one in compiled if one.candidate.saving.remat == remat]
    needed = max((one.least_bytes(candidate) for one in alike), default=0.0)
    if needed > limit_bytes:
        over = (needed - limit_bytes) / 2**30
        return f"does not fit: needs about {needed / 2**30:.0f} GiB, {over:.1f} more than there is"
    best = best_of(trials)
    if best is None or _seconds(best) == math.inf:
        return ""
    # Near a GPU's memory XLA computes parts again by itself, which others need not do.
    roomy = [one for one in compiled if (one.used_bytes or 0) <= _ROOMY * limit_bytes and one.fits]
    least = max((one.least_seconds(candidate) for one in roomy if one.seconds), default=0.0)
    is_simpler = _shards(candidate) < _shards(best.candidate)
    if is_simpler and least > AS_FAST * _seconds(best):
        return f"slower: takes at least {least:.3g} s"
    if not is_simpler and least * AS_FAST > _seconds(best):
        return f"not faster by 3 %: takes at least {least:.3g} s"
    return _beyond_slower(candidate, compiled, of_host)


def _beyond_slower(candidate: Candidate, compiled: Sequence[MeshTrial], of_host: int) -> str:
    """Say which number of shards, between a faster one and the candidate's, was slower."""
    model, fsdp = candidate.num_model_shards, candidate.fsdp
    by_model: dict[int, float] = {}
    for one in compiled:
        other = one.candidate.num_model_shards
        by_model[other] = min(by_model.get(other, math.inf), _seconds(one))
    for fewer, more in itertools.pairwise(sorted(by_model)):
        if more < model and by_model[fewer] < by_model[more] < math.inf:
            return f"slower with {more} model shards than with {fewer}"
    in_host = of_host // model
    for a, b in itertools.permutations(compiled, 2):
        sizes = [a.candidate.fsdp, b.candidate.fsdp, fsdp]
        is_between = sorted(sizes) in (sizes, sizes[::-1]) and sizes[1] != fsdp
        is_one_side = min(sizes) >= in_host or max(sizes) <= in_host
        is_of_model = a.candidate.num_model_shards == b.candidate.num_model_shards == model
        if is_of_model and is_between and is_one_side and _seconds(a) < _seconds(b) < math.inf:
            return f"slower with fsdp {sizes[1]} than with {sizes[0]}"
    return ""


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
