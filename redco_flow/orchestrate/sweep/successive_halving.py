"""Asynchronous successive halving (ASHA): which trainings of a sweep continue after each rung.

Rung k is at `min_steps * reduction_factor**k` steps. A training that reaches a rung continues if
its value there is among the best `1 / reduction_factor` of those that have reached it so far,
itself included, and always if it is the best.
Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (2020), in the variant
that stops trainings and pauses none, as Optuna's SuccessiveHalvingPruner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from redco_flow.tracking.sweep_directory import RungDecision

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class SuccessiveHalving:
    """The settings of a sweep's early stopping.

    Args:
        stage: whose training is stopped.
        metric: by which trainings are compared, such as `val/eval_loss`.
        mode: whether less or more of it is better.
        min_steps: steps that every training does.
        reduction_factor: one of this number of trainings continues after a rung.
    """

    stage: str
    metric: str
    mode: Mode
    min_steps: int
    reduction_factor: int

    def rung_step(self, rung: int) -> int:
        """Return the steps after which trainings are compared."""
        return self.min_steps * int(self.reduction_factor**rung)


@dataclass(frozen=True, order=True)
class Measurement:
    """A value that a training has logged.

    Args:
        time: when it was logged; earlier ones are judged first.
        run: the point's.
        attempt: of the training; 0 where the point reuses a result.
        value: None where it was not a finite number.
    """

    time: str
    run: str
    step: int
    attempt: int
    value: float | None


def decide(
    halving: SuccessiveHalving, found: Iterable[Measurement], known: Sequence[RungDecision]
) -> Iterator[RungDecision]:
    """Yield a decision for each rung that a training has reached, in the order of time.

    A training that was stopped is not judged again. Depends on the arguments alone.

    Args:
        known: earlier decisions, which count as they are.
    """
    rungs: dict[int, dict[str, float | None]] = {}
    for past in known:
        rungs.setdefault(past.rung, {})[past.run] = past.value
    stopped = {past.run for past in known if past.is_stopped}
    reached = {past.run: past.rung + 1 for past in known}
    for one in sorted(found, key=lambda one: (one.time, one.run, one.step)):
        rung = reached.get(one.run, 0)
        while one.run not in stopped and one.step >= halving.rung_step(rung):
            values = rungs.setdefault(rung, {})
            values[one.run] = one.value
            decision = _judge(halving, one, rung, list(values.values()))
            yield decision
            stopped |= {one.run} if decision.is_stopped else set()
            reached[one.run] = rung = rung + 1


def _judge(
    halving: SuccessiveHalving, one: Measurement, rung: int, values: list[float | None]
) -> RungDecision:
    """Judge the value of a training among all values at a rung."""
    numbers = sorted((v for v in values if v is not None), reverse=halving.mode == "max")
    num_kept = max(1, len(values) // halving.reduction_factor)
    cutoff = numbers[min(num_kept, len(numbers)) - 1] if numbers else None
    if one.value is None or cutoff is None:
        is_stopped, why = True, f"{halving.metric} is not a finite number"
    else:
        is_stopped = one.value > cutoff if halving.mode == "min" else one.value < cutoff
        why = (
            f"{halving.metric} {one.value:.6g} is {'not ' if is_stopped else ''}among the best "
            f"{num_kept} of {len(values)} at rung {rung} (cutoff {cutoff:.6g})"
        )
    reason = f"{'stopped early' if is_stopped else 'continues'} at step {one.step}: {why}"
    return RungDecision(
        one.time, one.run, one.attempt, rung, one.step, one.value, cutoff, is_stopped, reason
    )
