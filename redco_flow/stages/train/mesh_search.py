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
        refusal: why it is not compiled, or its time not known.
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
        of_model: list[float] = []
        for fsdp in reversed(_divisors(num_devices // model)):
            seconds: list[float] = []
            for remat in remats:
                trial = attempt(Candidate(model, fsdp, remat))
                yield trial
                if not trial.refusal:
                    seconds.append(math.inf if trial.seconds is None else trial.seconds)
                if trial.seconds is not None:
                    break
            is_faster = min(seconds, default=0.0) < min(of_model, default=math.inf)
            of_model += seconds[-1:]
            if not is_faster:  # fewer fsdp shards send less and need more memory
                break
        if of_model and fastest < math.inf and min(of_model) >= fastest:
            return
        fastest = min([fastest, *of_model])


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
