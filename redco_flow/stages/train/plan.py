"""Plan a train stage's training from its settings and its recipe, and start its trainer.

What is trained may be the model's own parameters or low-rank factors beside them; the rest of
the stage sees the model's parameters either way (`TrainingPlan.model_params`).
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import jax
import jax.numpy as jnp

from redco_flow.engine.agreement import decide_first
from redco_flow.engine.data.batches import CollateFn
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.rules import join, key_names, named_leaves
from redco_flow.engine.sharding.two_rules import weight_decay_mask
from redco_flow.engine.step.lora import BASE, FACTORS, SCALES, Lora, plan_lora
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.optimizers import (
    Schedule,
    make_optimizer,
    make_schedule,
    stacked_dims,
)
from redco_flow.engine.step.trainable import Trainable
from redco_flow.engine.trainer import Trainer
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.errors import ArtifactError
from redco_flow.models.hub.module_names import FoundTargets, find_targets
from redco_flow.recipes.recipe import Recipe, matmul_precision
from redco_flow.stages.artifacts.recorded_model import find_recorded_model
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.sections import in_feed_forward, is_head


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
    if config.mesh is not None:
        raise ValueError(
            f"mesh: {config.mesh} is decided where a run starts: start it by `redco-flow run`"
        )
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
    dropped = [one.path for one in lora.targets] if lora is not None and lora.dropout else []
    num_loss_chunks = _num_loss_chunks(config, dropped)

    def optimizer(decay_mask: Any = None, stacked: Any = None) -> Any:
        return make_optimizer(
            config.optimizer,
            schedule,
            weight_decay=config.weight_decay,
            decay_mask=decay_mask,
            stacked=stacked,
            mu_dtype=None if config.mu_dtype == "float32" else config.mu_dtype,
            **_moments(config),
        )

    rules = deployer.get_sharding_rules(
        *traced,
        overrides=config.sharding_overrides.items(),
        optimizer=optimizer(),
        trainable=trainable if lora is None else lora.trainable,
        lora=lora,
        param_dtype=config.param_dtype,
    )
    deployer.log_rules(rules)
    stacked = _stacked_dims(traced, lora) if config.optimizer == "adafactor" else None
    decayed = optimizer(_decay_mask(traced, lora), stacked)

    def plan_with(recipe: Recipe) -> TrainingPlan:
        return TrainingPlan(
            deployer,
            loss_fn=_loss_fn(config, recipe, num_loss_chunks),
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
    may_chunk = not any(map(in_feed_forward, dropped))
    return plan_for_memory(
        plan_with, recipe, config.num_mlp_chunks, memory_bytes, may_chunk=may_chunk
    )


def start_trainer(
    plan: TrainingPlan, config: Config, recipe: Recipe, collate_fn: CollateFn
) -> Trainer:
    """Load or draw the model's parameters as they were planned, and make the trainer.

    Args:
        collate_fn: of what is trained on.
    """
    shapes = _stored_shapes(config, recipe)
    shardings = plan.deployer.params_sharding(shapes, plan.model_rules)
    params = initial_params(recipe, config.seed, shapes, shardings)
    return Trainer.from_plan(
        plan,
        collate_fn=collate_fn,
        params=params,
        max_skipped=config.max_skipped,
        donate_params=True,
    )


def initial_params(recipe: Recipe, seed: int, shapes: Any, shardings: Any = None) -> Any:
    """Return the model's parameters, read or drawn; what is drawn depends on the seed.

    Args:
        shapes: in the dtypes in which they are kept.
        shardings: a tree like them; None: the default device.
    """

    def store(params: Any) -> Any:
        return jax.tree.map(lambda x, shape: x.astype(shape.dtype), params, shapes)

    def draw(pick: Callable[[Any], Any]) -> Any:
        drawn = jax.jit(
            lambda key: pick(store(recipe.init_params(key))),
            out_shardings=None if shardings is None else pick(shardings),
        )
        return drawn(jax.random.key(seed))

    if recipe.load_params is None:
        return draw(lambda tree: tree)
    params = store(recipe.load_params(shardings))
    if not recipe.drawn_parts:
        return params
    return {**params, **draw(lambda tree: {name: tree[name] for name in recipe.drawn_parts})}


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


def _num_loss_chunks(config: Config, dropped: Sequence[str]) -> int | Literal["auto"]:
    """Return the chunks of the loss; one where `lora.dropout` needs the head's product.

    Args:
        dropped: paths of the kernels whose factors have dropout.
    """
    if config.num_loss_chunks == AUTO and any(map(is_head, dropped)):
        logger.info(
            "num_loss_chunks auto: 1, for lora.dropout falls on what the head is multiplied with; "
            "leave the head out of lora.targets if that takes too much memory"
        )
        return 1
    return config.num_loss_chunks


def _loss_fn(config: Config, recipe: Recipe, num_loss_chunks: int | Literal["auto"]) -> LossFn:
    names = ("z_loss", "label_smoothing", "logits_dtype")
    asked = {name: getattr(config, name) for name in names}
    default = {name: Config.model_fields[name].default for name in names}
    options = {name: value for name, value in asked.items() if value != default[name]}
    given = recipe.loss_in_chunks
    if given is not None and _takes(given, num_loss_chunks, **options):
        loss_fn: LossFn = given(num_loss_chunks, **options)
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
    warmup_steps = asked.warmup_steps or math.ceil((asked.warmup_ratio or 0.0) * total_steps)
    if warmup_steps > total_steps:
        logger.warning(
            "the training ends after %d of the %d steps of its warm-up: its learning rate reaches "
            "%.3g of %.3g", total_steps, warmup_steps,
            config.learning_rate * (total_steps - 1) / warmup_steps, config.learning_rate,
        )  # fmt: skip
    return make_schedule(
        asked.type,
        config.learning_rate,
        total_steps,
        warmup_steps,
        min_ratio=asked.min_lr_ratio,
    )


def _moments(config: Config) -> dict[str, float]:
    """Return how the optimizer averages, where the settings say it."""
    found = {} if config.betas is None else dict(zip(("b1", "b2"), config.betas, strict=True))
    if config.momentum is not None:
        found["b1"] = config.momentum
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


def _stacked_dims(traced: Sequence[Any], lora: Lora | None) -> Any:
    """Return which dims number arrays of their own: of the model's parameters, and of factors."""
    params, function, *inputs = traced
    of_model = stacked_dims(params, function, *inputs)
    if lora is None:
        return of_model
    of_factors = {target.path: target.stacked_dims for target in lora.targets}
    shapes = lora.shapes(params)
    factors = {
        path: {name: of_factors[path][name] for name in factor}
        for path, factor in shapes[FACTORS].items()
    }
    unscaled = {name: dict.fromkeys(part, ()) for name, part in shapes.items() if name == SCALES}
    return {BASE: of_model, FACTORS: factors, **unscaled}


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
    *,
    may_chunk: bool = True,
) -> TrainingPlan:
    """Return the plan by the settings; what they leave to the memory is chosen.

    That is `remat: auto` of the model's config, with chunks unless their number is given, or the
    chunks alone. Where nothing fits it is the plan that takes least, with a warning; where the
    memory is not known, the one that computes nothing again. All processes choose alike.

    Args:
        plan_with: plans the training with a recipe's loss.
        num_mlp_chunks: None: as `remat` leaves it.
        memory_bytes: of one device; None: not known.
        may_chunk: whether chunks may be chosen; not where `lora.dropout` falls on what the
            feed-forward layers' kernels are multiplied with, which chunks hide.

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
    if not may_chunk and not given:
        logger.info(
            "%s auto: no feed-forward chunks, for lora.dropout falls on what the feed-forward "
            "layers' kernels are multiplied with", key,
        )  # fmt: skip
        given = {_CHUNKS: 1} if _can_chunk(recipe) else {}  # the config may have some
    if given or not may_chunk or not _can_chunk(recipe):
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
