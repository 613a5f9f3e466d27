"""A training's model, optimizer and layout on the devices, from a train stage's settings.

What is trained may be the model's own parameters or low-rank factors beside them; the rest of
the stage sees the model's parameters either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from redco_flow.engine.data.batches import CollateFn
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.engine.sharding.two_rules import weight_decay_mask
from redco_flow.engine.step.lora import BASE, FACTORS, Lora, plan_lora
from redco_flow.engine.step.optimizers import Schedule, make_optimizer, make_schedule
from redco_flow.engine.step.trainable import Trainable
from redco_flow.engine.trainer import Trainer
from redco_flow.recipes.recipe import Recipe
from redco_flow.stages.train.config import Config


@dataclass(frozen=True)
class TrainerSetup:
    """A trainer, and how to get the model's parameters from what it trains.

    Args:
        rules: the layout of the model's parameters.
        model_params: the trained parameters -> the model's.
        is_merged: whether the two differ, so that a checkpoint must be merged to be a model's.
    """

    trainer: Trainer
    rules: ShardingRules
    model_params: Callable[[Any], Any]
    is_merged: bool = False


@dataclass(frozen=True)
class _Parts:
    """What training the model's own parameters takes; with factors some of it is others'."""

    shapes: Any
    start: Callable[[], Any]
    loss_fn: Any
    rules: ShardingRules
    decay_mask: Any
    trainable: Trainable | None
    collate_fn: CollateFn


def set_up_trainer(
    config: Config,
    recipe: Recipe,
    batch: Mapping[str, Any],
    total_steps: int,
    *,
    collate_fn: CollateFn,
) -> TrainerSetup:
    """Lay the model out over the devices and make its trainer.

    Args:
        batch: one collated, of any number of examples.
        total_steps: optimizer steps of the whole training.
        collate_fn: of what is trained on.

    Raises:
        EngineError: settings that the model or the devices cannot follow.
    """
    deployer = Deployer(
        config.num_model_shards,
        num_context_shards=config.num_context_shards,
        num_fsdp_shards=config.fsdp,
        seed=config.seed,
    )
    shapes = recipe.abstract_params()
    # What evaluation computes says all that a layout depends on.
    traced = (shapes, recipe.loss_fn, batch, None, False)
    schedule = _schedule(config, total_steps)
    lora = _plan_lora(config, traced)
    trainable = _all_but(config.freeze) if lora is None else lora.trainable
    rules = deployer.get_sharding_rules(
        *traced,
        overrides=config.sharding_overrides.items(),
        optimizer=_optimizer(config, schedule, None),
        trainable=trainable,
        lora=lora,
    )
    deployer.log_rules(rules)
    parts = _Parts(
        shapes=shapes,
        start=lambda: _start(config, recipe, deployer.params_sharding(shapes, rules)),
        loss_fn=recipe.loss_fn,
        rules=rules,
        decay_mask=weight_decay_mask(*traced),
        trainable=trainable,
        collate_fn=collate_fn,
    )
    if lora is None:
        return TrainerSetup(
            _trainer(config, deployer, parts, schedule), rules, lambda params: params
        )
    adapted = _with_factors(config, deployer, lora, parts)
    merge = jax.jit(lora.merge, out_shardings=deployer.params_sharding(shapes, rules))
    trainer = _trainer(config, deployer, adapted, schedule)
    return TrainerSetup(trainer, rules, merge, is_merged=True)


def _schedule(config: Config, total_steps: int) -> Schedule:
    asked = config.schedule
    warmup_steps = asked.warmup_steps or round((asked.warmup_ratio or 0.0) * total_steps)
    return make_schedule(
        asked.type, config.learning_rate, total_steps, min(warmup_steps, total_steps)
    )


def _optimizer(config: Config, schedule: Schedule, mask: Any) -> optax.GradientTransformation:
    return make_optimizer(
        config.optimizer, schedule, weight_decay=config.weight_decay, decay_mask=mask
    )


def _start(config: Config, recipe: Recipe, shardings: Any) -> Any:
    """Load or draw the model's parameters, laid out."""
    if recipe.load_params is not None:
        return recipe.load_params(shardings)
    initialise = jax.jit(recipe.init_params, out_shardings=shardings)
    return initialise(jax.random.key(config.seed))


def _plan_lora(config: Config, traced: Sequence[Any]) -> Lora | None:
    """Find the kernels to adapt in (shapes, loss function, *inputs), where that is asked for."""
    if config.lora is None:
        return None
    params, function, *inputs = traced
    asked = config.lora
    return plan_lora(
        params, function, *inputs, rank=asked.rank, alpha=asked.alpha, targets=asked.targets
    )


def _all_but(frozen: str | None) -> Trainable | None:
    if frozen is None:
        return None
    return lambda path, _leaf: re.search(frozen, path) is None


def _with_factors(config: Config, deployer: Deployer, lora: Lora, parts: _Parts) -> _Parts:
    key = jax.random.key(config.seed)
    shapes = lora.shapes(parts.shapes)
    rules = lora.rules(parts.rules, shapes)
    mask = {
        BASE: parts.decay_mask,
        FACTORS: jax.tree.map(lambda _: True, shapes[FACTORS]),
    }
    shardings = deployer.params_sharding(shapes, rules)
    start = jax.jit(lambda params: lora.start(params, key), out_shardings=shardings)
    return replace(
        parts,
        shapes=shapes,
        start=lambda: start(parts.start()),
        loss_fn=lora.adapt(parts.loss_fn),
        rules=rules,
        decay_mask=mask,
    )


def _trainer(config: Config, deployer: Deployer, parts: _Parts, schedule: Schedule) -> Trainer:
    return Trainer(
        deployer,
        collate_fn=parts.collate_fn,
        loss_fn=parts.loss_fn,
        params=parts.start(),
        optimizer=_optimizer(config, schedule, parts.decay_mask),
        sharding_rules=parts.rules,
        global_batch_size=config.global_batch_size,
        per_device_batch_size=config.per_device_batch_size,
        lr_schedule=schedule,
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        on_nonfinite=config.on_nonfinite,
        max_skipped=config.max_skipped,
        trainable=parts.trainable,
    )
