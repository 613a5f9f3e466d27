"""Run a decoder's layers while generating: on TPUs one scan, else a loop over unstacked layers.

Parameters that products cast are cast before the first token, not at every one: the compiled step
of a bfloat16 model reads half the bytes.

A scan slices each layer's parameters, keys and values out of arrays (L, …). On CPUs and GPUs that
is a copy for every token; the compiler for TPUs reads in place, and compiles a scan faster.
Seen by `benchmarks/kept_files.py --file decoding_layers --models t5` on two cores: CPU time of a
scan over ours, greedy 1.52 (quartiles 1.22, 1.67), 4 beams 2.40 (2.37, 2.45).
Dims in this file: L layers, B batch, N beams, M cache slots, D model, G key-value groups,
K head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.models.attention.kernels import mesh_device

Params = dict[str, Any]

# The parameters of layers before `layers`, where there are some that differ.
LEADING = "leading_layers"
LayerOf = Callable[[Any], nn.Module]
# (one layer's parameters, carry, its own inputs) to (carry, output)
RunLayer = Callable[[Any, Any, Any], tuple[Any, Any]]


# Used in float32: norms, what is added to float32 scores.
_KEPT_IN_FLOAT32 = (
    "norm",
    "sinks",
    "choice_bias",
    "router_bias",
    "relative_bias",
    "lm_head_bias",
    "final_logits_bias",
)


def cast_for_products(params: Params, dtype: jnp.dtype) -> Params:
    """Return the parameters with those that products read in the products' dtype.

    Where they were split over `fsdp`, they are gathered after it, once for all tokens: gathering
    them layer by layer for every token would send all of them as often as there are tokens.
    """

    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf if any(kept in name for kept in _KEPT_IN_FLOAT32) else leaf.astype(dtype)

    found: Params = jax.tree_util.tree_map_with_path(cast, params)
    return found


def unstack_where_faster(layers: Any) -> Any:
    """Return stacked layers, or a list of stacks, as a tuple of layers, for TPUs as they are.

    The platform is that of the mesh that is being traced for, without one this process' default.
    """
    device = mesh_device()
    platform = jax.default_backend() if device is None else device.platform
    if isinstance(layers, tuple) or platform == "tpu":
        return layers
    stacks = layers if isinstance(layers, list) else [layers]
    return tuple(layer for stack in stacks for layer in _unstack(stack, _num_layers(stack)))


def without_layers(params: Params) -> tuple[Params, Any]:
    """Return the parameters without those of the layers, and these.

    They are stacked or unstacked; stacked with others that lead, they are a list of both stacks.
    """
    rest = {name: part for name, part in params.items() if name not in ("layers", LEADING)}
    return rest, [params[LEADING], params["layers"]] if LEADING in params else params["layers"]


def unstack_like(layers: Any, per_layer: Any) -> Any:
    """Divide what each layer is given, arrays (L, …), as the layers' parameters are divided."""
    if isinstance(layers, tuple):
        return _unstack(per_layer, len(layers))
    if not isinstance(layers, list):
        return per_layer
    ends = np.cumsum([0, *map(_num_layers, layers)])
    bounds = [slice(start, end) for start, end in itertools.pairwise(ends)]
    return [jax.tree.map(lambda leaf, bound=bound: leaf[bound], per_layer) for bound in bounds]


def _num_layers(stacked: Any) -> int:
    number: int = jax.tree.leaves(stacked)[0].shape[0]
    return number


def _unstack(stacked: Any, num_layers: int) -> tuple[Any, ...]:
    return tuple(
        jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked) for layer in range(num_layers)
    )


def call_layer(layer: nn.Module, params: Any, *inputs: Any, method: str) -> Any:
    """Call a method of one layer on its parameters."""
    return layer.apply({"params": params}, *inputs, method=method)


def run_layers(run_layer: RunLayer, layers: Any, carry: Any, own: Any) -> tuple[Any, Any]:
    """Return the last carry and each layer's output, divided as `layers` and `own` are."""
    if isinstance(layers, list):
        outputs_of_stacks = []
        for stack, inputs in zip(layers, own, strict=True):
            carry, output = run_layers(run_layer, stack, carry, inputs)
            outputs_of_stacks.append(output)
        return carry, outputs_of_stacks
    if not isinstance(layers, tuple):
        return jax.lax.scan(lambda carry, x: run_layer(x[0], carry, x[1]), carry, (layers, own))
    outputs: list[Any] = []
    for params, inputs in zip(layers, own, strict=True):
        carry, output = run_layer(params, carry, inputs)
        outputs.append(output)
    return carry, tuple(outputs)


def step_layers(
    layer_of: LayerOf, layers: Any, hidden: jax.Array, heads: Any, own: Any, shared: Any
) -> tuple[jax.Array, Any]:
    """Map one token of each beam, (B, N, D), by every layer's method `step`.

    Args:
        layer_of: the module for one layer's parameters.
        heads: each layer's keys and values of the tokens so far, (B, G, M, K) each, divided as
            `layers` and `own` are.

    Returns:
        the last layer's result, and the keys and values with this token's.
    """

    def step(params: Any, hidden: jax.Array, heads: Any, number: Any, own: Any) -> Any:
        inputs = (hidden, heads, number, own, shared)
        return call_layer(layer_of(params), params, *inputs, method="step")

    if isinstance(layers, list):
        kept = []
        for stack, cache, inputs in zip(layers, heads, own, strict=True):
            hidden, cache = step_layers(layer_of, stack, hidden, cache, inputs, shared)
            kept.append(cache)
        return hidden, kept
    if isinstance(layers, tuple):

        def run_unstacked(params: Any, hidden: jax.Array, inputs: Any) -> Any:
            heads, own = inputs
            return step(params, hidden, heads, None, own)

        return run_layers(run_unstacked, layers, hidden, tuple(zip(heads, own, strict=True)))

    def run_stacked(params: Any, carry: Any, inputs: Any) -> tuple[Any, None]:
        return step(params, *carry, *inputs), None

    # All layers' keys and values are carried, so that the token's are written in place.
    numbers = jnp.arange(jax.tree.leaves(layers)[0].shape[0])
    carry, _ = run_layers(run_stacked, layers, (hidden, heads), (numbers, own))
    last: tuple[jax.Array, Any] = carry
    return last
