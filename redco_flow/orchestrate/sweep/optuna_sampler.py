"""Ask Optuna for a sweep's next point. Imported only by the process that drives the sweep.

Each point comes from a new study in memory, to which all earlier points are added. It depends only
on them, the seed and its number, so that a resumed sweep gets the same point.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from redco_flow.orchestrate.sweep.successive_halving import Mode
from redco_flow.spec.sweep_points import Distribution, Point, Space, Trial


def suggest(space: Space, trials: Sequence[Trial], *, seed: int, mode: Mode) -> Point:
    """Return the next point's overrides, by the tree-structured Parzen estimator (TPE).

    Args:
        trials: of the points before it, in their order.
        seed: of the sweep. Each point has a seed of its own, made of this one and its number.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    own_seed = random.Random(f"{seed} {len(trials)}").getrandbits(32)  # noqa: S311
    # Points that are running count as bad ones, so that the next does not repeat them.
    sampler = optuna.samplers.TPESampler(seed=own_seed, constant_liar=True)
    direction = StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
    study = optuna.create_study(sampler=sampler, direction=direction)
    distributions = {key: _distribution(one) for key, one in space.items()}
    study.add_trials([_frozen(trial, space, distributions) for trial in trials])
    params = study.ask(distributions).params
    return tuple(
        f"{key}={one.text(params[key]) if isinstance(one, Distribution) else params[key]}"
        for key, one in space.items()
    )


def _distribution(one: Distribution | list[str]) -> BaseDistribution:
    if isinstance(one, list):
        return CategoricalDistribution(one)
    if one.kind == "randint":
        return IntDistribution(int(one.low), int(one.high))
    return FloatDistribution(one.low, one.high, log=one.kind == "loguniform")


def _frozen(trial: Trial, space: Space, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    texts = dict(override.split("=", 1) for override in trial.overrides)
    params = {key: _value(space[key], text) for key, text in texts.items()}
    is_pruned = trial.state == "pruned"
    measured = math.nan if trial.value is None else trial.value
    return create_trial(
        state=TrialState[trial.state.upper()],
        value=trial.value if trial.state == "complete" else None,
        params=params,
        distributions=distributions,
        intermediate_values={trial.step: measured} if is_pruned else None,
    )


def _value(one: Distribution | list[str], text: str) -> CategoricalChoiceType:
    if isinstance(one, list):
        return text
    return int(text) if one.kind == "randint" else float(text)
