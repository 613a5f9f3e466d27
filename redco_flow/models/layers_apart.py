"""Run layers one after the other, stacked or each apart, as their parameters are laid out.

Stacked layers, arrays (L, …), are one scan. Reading one layer's part out of a stack is a copy on
CPUs, which every decoded token would pay for again: there a tuple of layers is faster, and what is
kept of each layer is then a tuple too. Elsewhere compilers read a stack in place, and a scan
compiles faster.
Dims in this file: L layers, B batch, N beams, M cache slots, D model, G key-value groups,
K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = dict[str, Any]

# (one layer's parameters, carry, its own inputs) to (carry, output)
RunLayer = Callable[[Any, Any, Any], tuple[Any, Any]]


def apart_where_faster(stacked: Any) -> Any:
    """Return the layers as a tuple where the platform at hand runs them faster so."""
    if isinstance(stacked, tuple) or jax.default_backend() != "cpu":
        return stacked
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    return apart(stacked, num_layers)


def with_faster_layers(params: Params, part: str | None = None) -> Params:
    """Return the parameters with their layers laid out as the platform at hand runs them fastest.

    Args:
        part: whose `layers` they are; None: the whole model's.
    """
    owner = params if part is None else params[part]
    laid = {**owner, "layers": apart_where_faster(owner["layers"])}
    return laid if part is None else {**params, part: laid}


def without_layers(params: Params, part: str | None = None) -> tuple[Params, Any]:
    """Return the parameters without their layers, and these, stacked or apart.

    Args:
        part: whose `layers` they are; None: the whole model's.
    """
    rest = dict(params if part is None else params[part])
    layers = rest.pop("layers")
    return (rest if part is None else {**params, part: rest}), layers


def apart(stacked: Any, num_layers: int) -> tuple[Any, ...]:
    """Take a tree of arrays (L, …) apart into a tree for each layer."""
    return tuple(
        jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked) for layer in range(num_layers)
    )


def laid_like(params: Any, stacked: Any) -> Any:
    """Lay what each layer is given besides its parameters as these are laid."""
    return apart(stacked, len(params)) if isinstance(params, tuple) else stacked


def call_layer(layer: nn.Module, params: Any, *inputs: Any, method: str) -> Any:
    """Call a method of one layer on its parameters."""
    return layer.apply({"params": params}, *inputs, method=method)


def run_layers(run_layer: RunLayer, params: Any, carry: Any, own: Any) -> tuple[Any, Any]:
    """Return the last carry and what each layer gave, laid as `params` and `own` are."""
    if not isinstance(params, tuple):
        return jax.lax.scan(
            lambda carry, inputs: run_layer(inputs[0], carry, inputs[1]), carry, (params, own)
        )
    outputs: list[Any] = []
    for layer, parts in zip(params, own, strict=True):
        carry, output = run_layer(layer, carry, parts)
        outputs.append(output)
    return carry, tuple(outputs)


def step_layers(
    layer: nn.Module, params: Any, hidden: jax.Array, heads: Any, own: Any, shared: Any
) -> tuple[jax.Array, Any]:
    """Map one token of each beam, (B, N, D), by every layer's method `step`.

    Args:
        heads: keys and values of the tokens so far, (B, G, M, K) each for each layer, laid as
            `params` and `own` are.

    Returns:
        the last layer's result, and the keys and values with this token's.
    """

    def run_layer(params: Any, carry: Any, number: jax.Array | None, own: Any) -> Any:
        return call_layer(layer, params, *carry, number, own, shared, method="step")

    if not isinstance(params, tuple):
        # Carried as a whole, so that a token is written in place.
        numbers = jnp.arange(jax.tree.leaves(params)[0].shape[0])
        carry, _ = jax.lax.scan(
            lambda carry, inputs: (run_layer(inputs[0], carry, *inputs[1:]), None),
            (hidden, heads),
            (params, numbers, own),
        )
        last: tuple[jax.Array, Any] = carry
        return last
    grown: list[Any] = []
    for part, kept, parts in zip(params, heads, own, strict=True):
        hidden, kept = run_layer(part, (hidden, kept), None, parts)
        grown.append(kept)
    return hidden, tuple(grown)
