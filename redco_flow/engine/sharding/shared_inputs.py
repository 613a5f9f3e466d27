"""Add up the gradients of what several column-parallel kernels read before they are all-reduced.

Separate query, key and value kernels (gate and up) read one array. Each product's gradient of it is
a partial sum on every model shard, which XLA reduces by itself, kernel by kernel (on GPUs and TPUs
where something, such as a cast, stands between the product and the sum). Here each shard has a copy
of the array: copies' gradients add up without traffic, and one all-reduce (the copying, transposed)
follows. The products of the forward pass stay as they are, copies are never made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import MODEL_AXIS, equations

# What changes an array's dtype or the look of its dims: done twice, it is the same.
_REPEATED = ("convert_element_type", "copy", "expand_dims", "reshape", "squeeze", "transpose")


class SharedInputs:
    """The arrays that several products of a jaxpr read, and their copies.

    Kernels are among them: what several of them are multiplied with is for the caller to say.

    Args:
        jaxpr: equations that others hold are no part of it.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self._made: dict[Hashable, Any] = {v: one for one in jaxpr.eqns for v in one.outvars}
        self._num_products = Counter(
            self._array(v)
            for equation in jaxpr.eqns
            if equation.primitive.name == "dot_general"
            for v in equation.invars
        )
        self._copies: dict[Hashable, jax.Array] = {}

    def __bool__(self) -> bool:
        return any(count > 1 for count in self._num_products.values())

    def has(self, variable: Any) -> bool:
        """Say whether more than one product reads it."""
        return self._num_products[self._array(variable)] > 1

    def copies(self, variable: Any, value: jax.Array, num_shards: int) -> jax.Array:
        """Return a variable's value (...) as (num_shards, ...), the same to all its products.

        In float32 or wider, as what gradients are added up in; they are reduced in the value's
        own dtype.
        """
        array = self._array(variable)
        if array not in self._copies:
            copies = jnp.broadcast_to(value, (num_shards, *value.shape))
            self._copies[array] = copies.astype(jnp.promote_types(value.dtype, jnp.float32))
        return self._copies[array]

    def _array(self, variable: Any) -> Any:
        """Return what is the same of variables that hold the same array."""
        if isinstance(variable, core.Literal):
            return id(variable)
        equation = self._made.get(variable)
        if equation is None or equation.primitive.name not in _REPEATED:
            return variable
        params = str(sorted(equation.params.items()))
        return equation.primitive.name, params, self._array(equation.invars[0])


def shares_inputs(jaxpr: core.Jaxpr) -> bool:
    """Say whether several products read the same array, in a jaxpr or in one that it holds."""
    held = (
        value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
        for equation in equations(jaxpr)
        for param in equation.params.values()
        for value in (param if isinstance(param, (list, tuple)) else (param,))
    )
    return any(SharedInputs(one) for one in (jaxpr, *held) if isinstance(one, core.Jaxpr))


def multiply(
    product: Callable[[Any, Any], Any],
    copies: jax.Array,
    value: jax.Array,
    kernel: jax.Array,
    columns: tuple[int, int],
) -> jax.Array:
    """Return product(value, kernel), of which the value's gradient goes to its copies.

    Args:
        product: linear in both.
        copies: of the value, (model shards, ...).
        columns: the dim along which the kernel is split over the shards, and its position
            in the result.
    """
    num_shards, (position, result_position) = copies.shape[0], columns

    @jax.custom_vjp
    def multiplied(copies: Any, value: Any, kernel: Any) -> Any:
        return product(value, kernel)

    def forward(copies: Any, value: Any, kernel: Any) -> tuple[Any, tuple[Any, Any]]:
        return product(value, kernel), (value, kernel)

    def backward(kept: tuple[Any, Any], gradient: Any) -> tuple[Any, None, Any]:
        value, kernel = kept
        (of_kernel,) = jax.linear_transpose(lambda kernel: product(value, kernel), kernel)(gradient)

        def of_copy(kernel: Any, gradient: Any) -> Any:
            (found,) = jax.linear_transpose(lambda value: product(value, kernel), value)(gradient)
            return found.astype(copies.dtype)

        of_copies = jax.vmap(of_copy, in_axes=columns)(
            _by_shard(kernel, position, num_shards),
            _by_shard(gradient, result_position, num_shards),
        )
        return _placed(of_copies), None, of_kernel

    multiplied.defvjp(forward, backward)
    result: jax.Array = multiplied(copies, value, kernel)
    return result


def _by_shard(array: jax.Array, position: int, num_shards: int) -> jax.Array:
    """Give the shards a dim of their own, before the one that is split over them."""
    shape = array.shape
    sizes = (num_shards, shape[position] // num_shards)
    return array.reshape(*shape[:position], *sizes, *shape[position + 1 :])


def _placed(copies: jax.Array) -> jax.Array:
    """Put each copy on its shard."""
    if MODEL_AXIS not in jax.sharding.get_abstract_mesh().shape:
        return copies
    free = [PartitionSpec.UNCONSTRAINED] * (copies.ndim - 1)
    placed: jax.Array = jax.lax.with_sharding_constraint(copies, PartitionSpec(MODEL_AXIS, *free))
    return placed
