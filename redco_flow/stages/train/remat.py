"""Choose the cheapest rematerialization and chunking that fits the devices' memory.

Each choice's train step is compiled, least recomputation first, until one fits: what counts is the
compiler's own sum, and the program that trains is found in the compilation cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

from redco_flow.engine.agreement import decide_first
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.recipes.recipe import Recipe

AUTO = "auto"
# None: `auto` where remat is.
NumChunks = int | Literal["auto"] | None
Choice = Mapping[str, Any]

_CHUNKS = "num_mlp_chunks"
# Keys of the model's config, from what computes least again to what takes least memory. What `full`
# computes in chunks it would compute again anyway.
REMATS: tuple[Choice, ...] = (
    {"remat": "none"},
    {"remat": "minimal"},
    {"remat": "minimal", "activations": {"mlp_in": "recompute"}},
    {"remat": "full"},
    {"remat": "full", _CHUNKS: 8},
    {"remat": "full", "activations": {"layer_input": "offload"}, _CHUNKS: 8},
)
CHUNKS: tuple[Choice, ...] = ({_CHUNKS: 1}, {_CHUNKS: 8}, {_CHUNKS: 32})
# The rest is for batches made ahead, for evaluation, and for what fragmentation costs.
STEP_SHARE = 0.95

_GIB = 2**30

logger = logging.getLogger(__name__)


def plan_for_memory(
    plan_with: Callable[[Recipe], TrainingPlan],
    recipe: Recipe,
    num_mlp_chunks: NumChunks,
    memory_bytes: int | None,
) -> TrainingPlan:
    """Return the plan by the settings; what they leave to the memory is chosen.

    That is `remat: auto` of the model's config, with chunks unless their number is given, or the
    chunks alone. Where nothing fits it is the plan that takes least, with a warning; where the
    memory is not known, the one that computes nothing again. All processes choose alike.

    Args:
        plan_with: plans the training with a recipe's loss.
        num_mlp_chunks: None: as `remat` leaves it.
        memory_bytes: of one device; None: not known.

    Raises:
        ValueError: the recipe makes no model with another config, or its model has no chunks.
    """
    given: Choice = {_CHUNKS: num_mlp_chunks} if isinstance(num_mlp_chunks, int) else {}
    if recipe.model.get("config", {}).get("remat") == AUTO:
        key, choices = "remat", REMATS
    elif num_mlp_chunks == AUTO:
        key, choices = _CHUNKS, CHUNKS
    elif num_mlp_chunks is None or (num_mlp_chunks == 1 and recipe.with_config is None):
        return plan_with(recipe)
    else:
        return plan_with(_changed(recipe, given))
    if given or not _can_chunk(recipe):
        choices = _without_chunks(choices)
    plans = (
        (_name(choice), plan_with(_changed(recipe, {**choice, **given}))) for choice in choices
    )
    plan, name, reason = _first_that_fits(key, plans, decide_first(lambda: memory_bytes or 0))
    if key == "remat":
        plan.remat = name
    logger.info("%s auto: %s (%s)", key, name, reason)
    return plan


def _changed(recipe: Recipe, choice: Choice) -> Recipe:
    if recipe.with_config is None:
        raise ValueError(
            f"{' and '.join(choice)} cannot be chosen, for this recipe makes no model with another "
            "config: leave remat auto and num_mlp_chunks out, or give the recipe a with_config."
        )
    return recipe.with_config(choice)


def _can_chunk(recipe: Recipe) -> bool:
    """Say whether its model's feed-forward layers can take some tokens at a time."""
    try:
        _changed(recipe, {"remat": "full", _CHUNKS: 2})
    except ValueError:
        return recipe.with_config is None  # A refusal follows.
    return True


def _without_chunks(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return them, each once, with the number of chunks left out, which 1 is too."""
    left = [{key: value for key, value in choice.items() if key != _CHUNKS} for choice in choices]
    return tuple(choice for place, choice in enumerate(left) if choice not in left[:place])


def _first_that_fits(
    key: str, plans: Iterable[tuple[str, TrainingPlan]], memory: int
) -> tuple[TrainingPlan, str, str]:
    """Return the first plan whose step fits, else the last; its name, and why it is that.

    Args:
        memory: bytes of a device; 0: not known.
    """
    told: list[str] = []
    for name, plan in plans:
        if not memory:
            return plan, name, "the devices do not report their memory"
        needed = _bytes_needed(plan)
        told.append(f"{name} takes {_gib(needed)} GiB")
        reason = f"of a device's {_gib(memory)} GiB {', '.join(told)}"
        if _all_find(needed is not None and needed <= STEP_SHARE * memory):
            return plan, name, reason
    logger.warning("no choice of %s makes a train step fit: %s", key, reason)
    return plan, name, reason


def _bytes_needed(plan: TrainingPlan) -> int | None:
    """Return what a step takes on a device; None where its compiler refuses it for its memory."""
    try:
        return plan.memory().total
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise


def _all_find(fits: bool) -> bool:  # noqa: FBT001 (what the first process found)
    return decide_first(lambda: int(fits)) == 1


def _gib(num_bytes: int | None) -> str:
    return "more" if num_bytes is None else f"{num_bytes / _GIB:.3g}"


def _name(choice: Choice) -> str:
    """Return the choice in the words of the settings; of chunks alone their number."""
    if "remat" not in choice:
        return str(choice.get(_CHUNKS, 1))
    by_name = (f"{name} {kind}" for name, kind in choice.get("activations", {}).items())
    chunks = (f"{_CHUNKS} {choice[_CHUNKS]}",) if _CHUNKS in choice else ()
    return ", ".join((choice["remat"], *by_name, *chunks))
