"""The names of a run's metrics: `accuracy` of an evaluation, `val/accuracy` of a training.

A name depends on what the pipeline's stages are, never on which of them have reported so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from redco_flow.errors import UsageError

Role = Literal["evaluation", "training", "other"]
Entry = Mapping[str, Any]

TRAINING_LOSS = "loss"
_KINDS: Mapping[str, Role] = {"train": "training", "evaluate": "evaluation"}


def role_of(entry: Entry) -> Role:
    """Return how a stage's metrics are named.

    Args:
        entry: the stage's in state.json. One without artifacts has the role of its kind.
    """
    made = {output.partition("/")[0] for output in entry.get("artifacts") or ()}
    if "metrics" in made:
        return "evaluation"
    if "checkpoint" in made:
        return "training"
    return "other" if made else _KINDS.get(str(entry.get("kind")), "other")


def training_metric(key: str) -> str:
    """Return the name of what a training measures: `train/loss`, `val/` before everything else."""
    return f"train/{key}" if key == TRAINING_LOSS else f"val/{key}"


def locate_metrics(stages: Mapping[str, Entry]) -> dict[str, tuple[str, str]]:
    """Return the stage and the key behind each metric's name, those of evaluations first.

    - of a stage that made a metrics artifact: the key alone; `STAGE/KEY` where the pipeline has
      several stages of this kind, or two stages report the key;
    - of a stage that made a checkpoint: `val/KEY`, and `train/loss` for the training loss;
      `STAGE/val/KEY` where the pipeline has several such stages, or another stage called `val`;
    - of any other stage: `STAGE/KEY`.

    Args:
        stages: the entries of state.json, those of stages that were left out included.
    """
    roles = {name: role_of(entry) for name, entry in stages.items()}
    trainings = [name for name, role in roles.items() if role == "training"]
    named: dict[str, tuple[str, str]] = {}
    for stage, entry in sorted(stages.items(), key=lambda one: roles[one[0]] != "evaluation"):
        for key in entry.get("metrics") or ():
            if roles[stage] == "training":
                name = training_metric(key)
                group = name.partition("/")[0]
                is_plain = trainings == [stage] and (group == stage or group not in stages)
            else:
                name = key
                is_plain = roles[stage] == "evaluation" and _is_only(stage, key, stages, roles)
            named[name if is_plain else f"{stage}/{name}"] = (stage, key)
    return named


def _is_only(stage: str, key: str, stages: Mapping[str, Entry], roles: Mapping[str, Role]) -> bool:
    """Whether no other evaluation is of this stage's kind or reports this key."""
    kind = stages[stage].get("kind")
    others = [one for name, one in stages.items() if roles[name] == "evaluation" and name != stage]
    return not any(
        (kind and one.get("kind") == kind) or key in (one.get("metrics") or ()) for one in others
    )


def read_metrics(stages: Mapping[str, Entry]) -> dict[str, float]:
    """Return the value of each metric of a run's stages (`locate_metrics` names them)."""
    located = locate_metrics(stages)
    return {name: stages[stage]["metrics"][key] for name, (stage, key) in located.items()}


def is_of_training(name: str) -> bool:
    """Whether a metric's name is that of something a training measured itself."""
    return name.endswith(training_metric(TRAINING_LOSS)) or "val" in name.split("/")[:2]


def require_metric(name: str, known: Iterable[str], where: str) -> None:
    """Raise unless a metric is among the known ones; another split's is never taken instead.

    Args:
        where: what was searched, such as "the runs of demo".

    Raises:
        UsageError: it is not; names the metrics with the same key, or all of them.
    """
    names = list(known)
    if name in names:
        return
    key = name.rpartition("/")[2]
    near = [one for one in names if one.rpartition("/")[2] == key]
    if near and all(map(is_of_training, near)):
        found = f"only {', '.join(near)}, measured by the training itself"
    elif near:
        found = f"only {', '.join(near)}"
    else:
        found = f"the metrics are {', '.join(names)}" if names else "there are no metrics"
    raise UsageError(f"{where}: no metric {name!r}: {found}.")
