"""A sampler's next point, compared with a study of Optuna that is asked directly."""

import copy
import random

import pytest

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'redco-flow[optuna]'")

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from redco_flow.orchestrate.sweep.optuna_sampler import suggest
from redco_flow.spec.sweep_points import Trial, read_space

SPACE = ["lr=loguniform(1e-5,1e-2)", "dropout=uniform(0,0.5)", "n=randint(1,9)", "kind=a,b"]
DISTRIBUTIONS = {
    "lr": FloatDistribution(1e-5, 1e-2, log=True),
    "dropout": FloatDistribution(0, 0.5),
    "n": IntDistribution(1, 8),
    "kind": CategoricalDistribution(["a", "b"]),
}


@pytest.mark.parametrize(("mode", "direction"), [("min", "minimize"), ("max", "maximize")])
def test_each_point_is_the_one_of_a_study_that_was_told_the_points_before(mode, direction):
    study = optuna.create_study(direction=direction)
    trials = []
    for number in range(18):  # the first ten that end are drawn at random
        seed = random.Random(f"7 {number}").getrandbits(32)
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        expected = copy.deepcopy(study).ask(DISTRIBUTIONS).params

        point = suggest(read_space(SPACE), trials, seed=7, mode=mode)

        texts = dict(one.split("=") for one in point)
        assert float(texts["lr"]) == pytest.approx(expected["lr"], rel=1e-3)  # four digits
        assert float(texts["dropout"]) == pytest.approx(expected["dropout"], rel=1e-3)
        assert (texts["n"], texts["kind"]) == (str(expected["n"]), expected["kind"])
        told = {key: float(texts[key]) for key in ("lr", "dropout")}
        study.enqueue_trial({**told, "n": int(texts["n"]), "kind": texts["kind"]})
        trial, value = study.ask(DISTRIBUTIONS), abs(told["lr"] - 1e-3) * int(texts["n"])
        if number == 3:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            trials.append(Trial(point, "fail"))
        elif number % 4 == 1:
            trial.report(value, step=2)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            trials.append(Trial(point, "pruned", value, 2))
        elif number % 8 == 6:
            trials.append(Trial(point, "running"))
        else:
            study.tell(trial, value)
            trials.append(Trial(point, "complete", value))
