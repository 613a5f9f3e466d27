"""Optimizers by name, as the published recipes for finetuning set them.

Anything that is an optax.GradientTransformation works with the Trainer; these are for those who
write a name in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.engine.sharding.two_rules import read_roles
from redco_flow.engine.step.lora_targets import find_kernels

OPTIMIZER_TYPES = ("adamw", "adafactor", "lion", "sgd")


def make_optimizer(
    type: str,
    learning_rate: float | Callable[[Any], Any],
    *,
    weight_decay: float = 0.0,
    decay_mask: Any = None,
    stacked: Any = None,
    b1: float = 0.9,
    b2: float | None = None,
    eps: float = 1e-8,
    mu_dtype: str | None = None,
) -> optax.GradientTransformation:
    """Return an optax optimizer.

    Args:
        type: adamw, adafactor (relative updates off, as for finetuning T5; arrays whose second
            largest dim is below 128, as many heads' are, keep all second moments), lion or sgd.
        learning_rate: a number, or a function of the optimizer step.
        weight_decay: decoupled, times the learning rate; of sgd, added to the gradient.
        decay_mask: a tree of bools, True where the decay applies; see `weight_decay_mask`.
        stacked: a tree of tuples: the dims that number arrays of their own, see `stacked_dims`;
            adafactor limits the update of each. None: no parameter is a stack.
        b1: momentum, of all but adafactor.
        b2: second decay; 0.999 for adamw, 0.99 for lion.
        eps: of adamw.
        mu_dtype: the momentum's, of all but adafactor; None: that of what is trained.

    Raises:
        ValueError: an unknown type.
    """
    if type == "adamw":
        b2 = 0.999 if b2 is None else b2
        return optax.adamw(
            learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            mu_dtype=mu_dtype,
            weight_decay=weight_decay,
            mask=decay_mask,
        )
    if type == "lion":
        b2 = 0.99 if b2 is None else b2
        return optax.lion(
            learning_rate,
            b1=b1,
            b2=b2,
            mu_dtype=mu_dtype,
            weight_decay=weight_decay,
            mask=decay_mask,
        )
    if type == "adafactor":
        # optax.adafactor adds the decay after the learning rate, so that no schedule reaches it.
        return optax.chain(
            optax.scale_by_factored_rms(),
            _clip_by_rms(stacked),
            optax.add_decayed_weights(weight_decay, decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    if type == "sgd":
        return optax.chain(
            optax.add_decayed_weights(weight_decay, decay_mask),
            optax.sgd(learning_rate, momentum=b1 or None, accumulator_dtype=mu_dtype),
        )
    raise ValueError(f"optimizer {type!r} is unknown; allowed: {', '.join(OPTIMIZER_TYPES)}.")


def stacked_dims(params: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return a tree of tuples: the dims of each parameter that number arrays of their own.

    They number layers, and parts of a kernel such as q, k and v.

    Args:
        params: arrays or shapes.
        function: (params, *inputs) -> anything: the forward pass or the loss; traced, not run.
    """
    roles = read_roles(params, function, inputs)
    kernels = find_kernels(params, roles, separate=False)
    inner = {one.path: one.inputs for one in kernels}
    structure, found = jax.tree.structure(params), []
    for (path, _), dims in zip(named_leaves(params), roles.parameters, strict=True):
        counts = [roles.counts_layers(dim) or roles.are_parts(dim) for dim in dims]
        inputs_at = inner.get(join(path), ())
        found.append(
            tuple(at for at, is_one in enumerate(counts) if is_one and at not in inputs_at)
        )
    return jax.tree.unflatten(structure, found)


def _clip_by_rms(stacked: Any) -> optax.GradientTransformation:
    """Scale each array's update down to a root mean square of 1, each of a stack by itself."""
    if stacked is None:
        return optax.clip_by_block_rms(1.0)

    def clip(dims: tuple[int, ...], update: Any) -> Any:
        if isinstance(update, optax.MaskedNode):  # frozen
            return update
        axes = tuple(position for position in range(update.ndim) if position not in dims)
        rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=axes, keepdims=True))
        return update / jnp.maximum(rms, 1.0)

    def clip_all(updates: Any, _params: Any) -> Any:
        return jax.tree.map(clip, stacked, updates, is_leaf=lambda x: isinstance(x, tuple))

    return optax.stateless(clip_all)


Schedule = Callable[[Any], Any]

SCHEDULE_TYPES = ("linear", "cosine", "constant", "inverse_sqrt", "wsd")


def make_schedule(
    type: str,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    decay_fraction: float = 0.2,
    min_ratio: float = 0.0,
) -> Schedule:
    """Return the function from optimizer step to learning rate.

    Args:
        type: `linear` falls to the least rate at total_steps; `cosine` too, along half a cosine;
            `constant` stays at the peak after the warm-up; `inverse_sqrt` falls with the square
            root of the step, or without a warm-up of the step + 10,000, as in transformers; `wsd`
            (warm-up, stable, decay) stays at the peak and falls linearly to the least rate in the
            last steps.
        peak: the highest rate.
        total_steps: optimizer steps of the whole training.
        warmup_steps: steps of linear rise from 0; of more than total_steps, as many as there are.
        decay_fraction: for `wsd`, the share of total_steps in which the rate falls.
        min_ratio: the least rate after the warm-up, as a share of the peak.

    Raises:
        ValueError: an unknown type, or numbers out of range.
    """
    if type not in SCHEDULE_TYPES:
        raise ValueError(
            f"schedule type {type!r} is unknown; allowed: {', '.join(SCHEDULE_TYPES)}."
        )
    if not peak >= 0:
        raise ValueError(f"the peak learning rate {peak} must not be negative.")
    if total_steps < 1 or warmup_steps < 0:
        raise ValueError(
            f"warmup_steps={warmup_steps} must not be negative, and total_steps={total_steps} at "
            "least 1."
        )
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction={decay_fraction} must be above 0 and at most 1.")
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio={min_ratio} must be from 0 to 1.")
    after = _after_warmup(
        type, peak, total_steps, warmup_steps, decay_fraction=decay_fraction, min_ratio=min_ratio
    )
    if not warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, peak, warmup_steps)
    schedule: Schedule = optax.join_schedules([rise, after], [warmup_steps])
    return schedule


def _after_warmup(
    type: str,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    *,
    decay_fraction: float,
    min_ratio: float,
) -> Schedule:
    """Return the rate as a function of the steps since the warm-up."""
    falling_steps = max(total_steps - warmup_steps, 1)
    least = min_ratio * peak
    after: Schedule
    if type == "constant":
        after = optax.constant_schedule(peak)
    elif type == "linear":
        after = optax.linear_schedule(peak, least, falling_steps)
    elif type == "cosine":
        after = optax.cosine_decay_schedule(peak, falling_steps, alpha=min_ratio)
    elif type == "wsd":
        decay_steps = max(min(round(total_steps * decay_fraction), falling_steps), 1)
        after = optax.linear_schedule(peak, least, decay_steps, falling_steps - decay_steps)
    else:  # optax has no inverse square root
        timescale = warmup_steps or 10_000

        def after(count: Any) -> Any:
            falling = peak * jnp.sqrt(timescale / (jnp.maximum(count, 0) + timescale))
            return jnp.maximum(falling, least) if least else falling

    return after
