"""Plan a train stage's training from its settings and its recipe, and start its trainer.

What is trained may be the model's own parameters or low-rank factors beside them; the rest of
the stage sees the model's parameters either way (`TrainingPlan.model_params`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.engine.data.batches import CollateFn
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.rules import join, key_names, named_leaves
from redco_flow.engine.sharding.two_rules import weight_decay_mask
from redco_flow.engine.step.lora import BASE, FACTORS, Lora, plan_lora
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.optimizers import Schedule, make_optimizer, make_schedule
from redco_flow.engine.step.trainable import Trainable
from redco_flow.engine.trainer import Trainer
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.errors import ArtifactError
from redco_flow.models.hub.module_names import FoundTargets, find_targets
from redco_flow.recipes.recipe import Recipe, matmul_precision
from redco_flow.stages.artifacts.recorded_model import find_recorded_model
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.remat import plan_for_memory


def plan_training(
    config: Config,
    recipe: Recipe,
    batch: Mapping[str, Any],
    total_steps: int,
    *,
    widest_batch: Mapping[str, Any] | None = None,
    devices: Sequence[jax.Device] | None = None,
    device_memory_gib: float | None = None,
) -> TrainingPlan:
    """Decide all that a stage's settings say of a training, without any array.

    Args:
        batch: one that the recipe collated, of any number of examples; arrays or shapes.
        total_steps: optimizer steps of the whole training.
        widest_batch: one of what is trained on, for the step to be lowered for; `batch` by
            default.
        devices: to train on; this machine's by default. They need not be there, see
            `jax.experimental.topologies`.
        device_memory_gib: of a device that does not report it, if `fsdp`, the model's `remat` or
            `num_mlp_chunks` is "auto".

    Raises:
        EngineError, ValueError: settings that the model or the devices cannot follow.
    """
    deployer = Deployer(
        config.num_model_shards,
        num_context_shards=config.num_context_shards,
        num_fsdp_shards=config.fsdp,
        fsdp_over_context=config.fsdp_over_context,
        seed=config.seed,
        devices=devices,
        device_memory_gib=device_memory_gib,
        matmul_precision=matmul_precision(recipe.model),
    )
    # What evaluation computes says all that a layout depends on.
    traced = (_stored_shapes(config, recipe), recipe.loss_fn, batch, None, False)
    schedule = _schedule(config, total_steps)
    lora = _plan_lora(config, recipe, traced)
    trainable = _all_but(config.freeze)

    def optimizer(decay_mask: Any) -> Any:
        return make_optimizer(
            config.optimizer,
            schedule,
            weight_decay=config.weight_decay,
            decay_mask=decay_mask,
            mu_dtype=None if config.mu_dtype == "float32" else config.mu_dtype,
            **_moments(config),
        )

    rules = deployer.get_sharding_rules(
        *traced,
        overrides=config.sharding_overrides.items(),
        optimizer=optimizer(None),
        trainable=trainable if lora is None else lora.trainable,
        lora=lora,
        param_dtype=config.param_dtype,
    )
    deployer.log_rules(rules)
    decayed = optimizer(_decay_mask(traced, lora))

    def plan_with(recipe: Recipe) -> TrainingPlan:
        return TrainingPlan(
            deployer,
            loss_fn=_loss_fn(config, recipe),
            params=traced[0],
            optimizer=decayed,
            sharding_rules=rules,
            lora=lora,
            global_batch_size=config.global_batch_size,
            per_device_batch_size=config.per_device_batch_size,
            lr_schedule=schedule,
            max_grad_norm=config.max_grad_norm,
            on_nonfinite=config.on_nonfinite,
            trainable=trainable,
            param_dtype=config.param_dtype,
            batch=batch if widest_batch is None else widest_batch,
            remat=recipe.model.get("config", {}).get("remat"),
        )

    memory_bytes = deployer.device_memory_bytes
    return plan_for_memory(plan_with, recipe, config.num_mlp_chunks, memory_bytes)


def start_trainer(
    plan: TrainingPlan, config: Config, recipe: Recipe, collate_fn: CollateFn
) -> Trainer:
    """Load or draw the model's parameters as they were planned, and make the trainer.

    Args:
        collate_fn: of what is trained on.
    """
    shapes = _stored_shapes(config, recipe)
    shardings = plan.deployer.params_sharding(shapes, plan.model_rules)

    def store(params: Any) -> Any:
        return jax.tree.map(lambda x, shape: x.astype(shape.dtype), params, shapes)

    if recipe.load_params is not None:
        params = store(recipe.load_params(shardings))
    else:
        initialise = jax.jit(lambda key: store(recipe.init_params(key)), out_shardings=shardings)
        params = initialise(jax.random.key(config.seed))
    return Trainer.from_plan(
        plan,
        collate_fn=collate_fn,
        params=params,
        max_skipped=config.max_skipped,
        donate_params=True,
    )


def _stored_shapes(config: Config, recipe: Recipe) -> Any:
    """Return the model's shapes, in the dtypes that the settings say."""
    shapes = recipe.abstract_params()
    full = set(_trained_in_full(config, recipe, shapes))

    def stored(key_path: tuple[Any, ...], leaf: Any) -> Any:
        path, freeze = join(key_names(key_path)), config.freeze
        is_frozen = path not in full and (
            config.lora is not None or (freeze is not None and re.search(freeze, path))
        )
        dtype = config.frozen_dtype if is_frozen else config.param_dtype
        if dtype == "float32" or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(stored, shapes)


def _loss_fn(config: Config, recipe: Recipe) -> LossFn:
    names = ("z_loss", "label_smoothing", "logits_dtype")
    asked = {name: getattr(config, name) for name in names}
    default = {name: Config.model_fields[name].default for name in names}
    options = {name: value for name, value in asked.items() if value != default[name]}
    given = recipe.loss_in_chunks
    if given is not None and _takes(given, config.num_loss_chunks, **options):
        loss_fn: LossFn = given(config.num_loss_chunks, **options)
        return loss_fn
    if config.num_loss_chunks == "auto" and not options:
        return recipe.loss_fn
    name = next(iter(options), "num_loss_chunks")
    raise ValueError(
        f"{name} is {getattr(config, name)}, and recipe '{config.recipe}' has no loss with it: "
        "leave the setting out, or give the recipe a loss_in_chunks that takes it."
    )


def _takes(function: Callable[..., Any], *args: Any, **keywords: Any) -> bool:
    with suppress(ValueError):  # a built-in has no signature, as `partial(partial, …)`
        try:
            inspect.signature(function).bind(*args, **keywords)
        except TypeError:
            return False
    return True


def _schedule(config: Config, total_steps: int) -> Schedule:
    asked = config.schedule
    warmup_steps = asked.warmup_steps or round((asked.warmup_ratio or 0.0) * total_steps)
    return make_schedule(
        asked.type,
        config.learning_rate,
        total_steps,
        min(warmup_steps, total_steps),
        min_ratio=asked.min_lr_ratio,
    )


def _moments(config: Config) -> dict[str, float]:
    """Return how the optimizer averages, where the settings say it."""
    found = {} if config.betas is None else dict(zip(("b1", "b2"), config.betas, strict=True))
    return found if config.epsilon is None else {**found, "eps": config.epsilon}


def _plan_lora(config: Config, recipe: Recipe, traced: Sequence[Any]) -> Lora | None:
    """Find the kernels to adapt in (shapes, loss function, *inputs), where that is asked for."""
    if config.lora is None:
        return None
    params, function, *inputs = traced
    options = config.lora.model_dump(exclude={"targets"})
    full = _trained_in_full(config, recipe, params)
    found = _find_targets(config.lora.targets, recipe, params)
    named = {path: parts for path, parts in found.modules.items() if path not in full}
    return plan_lora(
        params,
        function,
        *inputs,
        targets=found.pattern,
        named=named,
        without=found.without,
        full=full,
        **options,
    )


def _find_targets(targets: str | list[str], recipe: Recipe, params: Any) -> FoundTargets:
    """Return which kernels are meant, by the names of transformers' modules too where it has some.

    Raises:
        ValueError: a target matches nothing.
    """
    shapes = {join(path): leaf.shape for path, leaf in named_leaves(params)}
    try:
        model = find_recorded_model("", recipe.model)
    except ArtifactError:  # a model of the user's own, whose modules have no such names
        return FoundTargets("|".join([targets] if isinstance(targets, str) else targets))
    layouts = {path: layout for path, (layout, _) in model.parameters.items()}
    return find_targets(targets, layouts, shapes, renamings=model.module_renamings)


def _trained_in_full(config: Config, recipe: Recipe, shapes: Any) -> tuple[str, ...]:
    """Return the paths of what low-rank adaptation trains in full: the recipe's heads."""
    if config.lora is None:
        return ()
    paths = [join(path) for path, _ in named_leaves(shapes)]
    return tuple(path for path in paths if path.partition("/")[0] in recipe.head_parts)


def _all_but(frozen: str | None) -> Trainable | None:
    if frozen is None:
        return None
    return lambda path, _leaf: re.search(frozen, path) is None


def _decay_mask(traced: Sequence[Any], lora: Lora | None) -> Any:
    """Return what weight decay applies to: kernels and tables, and all factors."""
    params, function, *inputs = traced
    mask = weight_decay_mask(params, function, *inputs)
    if lora is None:
        return mask
    return {
        name: mask if name == BASE else jax.tree.map(lambda _, name=name: name == FACTORS, part)
        for name, part in lora.shapes(params).items()
    }
