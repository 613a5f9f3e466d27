"""Search for the mesh and the rematerialisation with which a train step is fastest.

Galvatron (arXiv 2211.13878) searches a strategy for each layer. Our layers are scanned as one, so a
strategy is a mesh and what is computed again. The search descends: from parameters split over all
devices by `fsdp` alone to fewer fsdp shards, then to more model shards, as long as either is
faster. More rematerialisation is tried where less does not fit, and on the fastest mesh: what is
kept has to be written and read, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Candidate:
    """Devices that are neither fsdp nor model shards are data shards, or context shards as set.

    Args:
        remat: as in the model's config; None: as it is set.
    """

    num_model_shards: int
    fsdp: int
    remat: str | None


@dataclass(frozen=True)
class Trial:
    """A candidate, and what its compilation says.

    Args:
        used_bytes: of a device's memory; None where it was not compiled.
        seconds: of a step; None where it does not fit.
        refusal: why it cannot be compiled.
    """

    candidate: Candidate
    used_bytes: int | None = None
    seconds: float | None = None
    refusal: str = ""


def search_mesh(
    num_devices: int,
    most_model_shards: int,
    remats: Sequence[str | None],
    attempt: Callable[[Candidate], Trial],
) -> Iterator[Trial]:
    """Yield each trial; the fastest of all is the result.

    Args:
        num_devices: of one context shard.
        most_model_shards: the devices of a host: model shards exchange most, by its links.
        remats: the one that computes least again first.
    """
    trials: list[Trial] = []
    for trial in _descend(num_devices, most_model_shards, remats, attempt):
        trials.append(trial)
        yield trial
    fastest = min(trials, key=lambda one: one.seconds or math.inf)
    if fastest.seconds is not None:
        for remat in remats[remats.index(fastest.candidate.remat) + 1 :]:
            yield attempt(replace(fastest.candidate, remat=remat))


def _descend(
    num_devices: int,
    most_model_shards: int,
    remats: Sequence[str | None],
    attempt: Callable[[Candidate], Trial],
) -> Iterator[Trial]:
    fastest = math.inf
    for model in _divisors(num_devices):
        if model > most_model_shards:
            return
        with_these = math.inf
        for fsdp in reversed(_divisors(num_devices // model)):
            seconds = math.inf
            for remat in remats:
                trial = attempt(Candidate(model, fsdp, remat))
                yield trial
                if trial.seconds is not None:
                    seconds = trial.seconds
                if trial.seconds is not None or trial.refusal:
                    break
            if seconds >= with_these:  # fewer fsdp shards send less and need more memory
                break
            with_these = seconds
        if fastest < math.inf and with_these >= fastest:
            return
        fastest = min(fastest, with_these)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
