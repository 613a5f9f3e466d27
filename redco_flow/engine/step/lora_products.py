"""Multiply by a kernel W with factors A and B: x W + s (x A) B, where W + s A B is never formed.

Formed, it would take a gradient of the kernel's size to reach the factors, and a copy of the
kernel in each layer for the backward pass.
Dims in this file: R rank.
Source: Hu et al. 2021, LoRA, equation 3.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

_Rule = TypeVar("_Rule", bound=Callable[..., Any])
_PLAIN_RULES: set[Any] = set()


def plain_product_rule(backward: _Rule) -> _Rule:
    """Declare a `jax.custom_vjp`'s backward rule to give what JAX's own gives of a product.

    The function must be one `dot_general` of activations and a kernel. Other functions with rules
    of their own get kernels to which the factors' product was added.
    """
    _PLAIN_RULES.add(backward)
    return backward


has_masks: Any = jax.make_user_context(default_value=False)
"""Whether a function is traced for dropout of what kernels are multiplied with: `has_masks.value`.

Masks go by places and belong to kernels: a model must then neither reorder tokens for the mesh nor
put kernels together, or repeat parts of them.
"""


@dataclass(frozen=True)
class KernelProduct:
    """The dims of a product of activations x and a kernel; those of the kernel are its letters'.

    Args:
        x: letters of the activations' dims.
        result: of the result's.
        contracted: those that are summed over.
        dtype: of the result.
        precision: as in `jax.lax.dot_general`.
    """

    x: str
    result: str
    contracted: frozenset[str]
    dtype: Any
    precision: Any

    @classmethod
    def read(cls, equation: Any, side: int, kernel: str) -> Self | None:
        """Return what an operation multiplies; None where it is no product of two arrays.

        Args:
            side: of the kernel among its two operands.
            kernel: a small letter for each of the kernel's dims.
        """
        product = _product(equation)
        if product is None or not jnp.issubdtype(
            equation.invars[1 - side].aval.dtype, jnp.floating
        ):
            return None
        contracted, batch = product.params["dimension_numbers"]
        letters = dict(enumerate(string.ascii_uppercase[: equation.invars[1 - side].aval.ndim]))
        for dims in (contracted, batch):
            letters |= {
                own: kernel[other] for own, other in zip(dims[1 - side], dims[side], strict=True)
            }
        x = "".join(letters.values())
        sides = (kernel, x) if side == 0 else (x, kernel)
        shared = "".join(kernel[position] for position in batch[side])
        summed = {kernel[position] for position in contracted[side]}
        free = [one for one in "".join(sides) if one not in {*shared, *summed}]
        return cls(
            x,
            shared + "".join(free),
            frozenset(summed),
            equation.outvars[0].aval.dtype,
            product.params["precision"],
        )

    def of_factors(
        self, x: jax.Array, a: jax.Array, b: jax.Array, factors: str, added: str = ""
    ) -> jax.Array:
        """Return (x A) B with the result's dims and dtype, multiplied in the dtype of x.

        Args:
            factors: the einsum from A and B to the kernel.
            added: letters of A's that are dims of x too, behind those that it has in the product.
        """
        of_a, of_b = factors.split("->")[0].split(",")
        kept = [one for one in self.x if one not in self.contracted]
        apart = [one for one in of_a if one not in {*kept, *self.contracted}]
        between = "".join([*kept, *apart])
        a, b = a.astype(x.dtype), b.astype(x.dtype)
        inner = jnp.einsum(f"{self.x}{added},{of_a}->{between}", x, a, precision=self.precision)
        return self.of_kernel(inner, between, b, of_b)

    def of_kernel(self, x: jax.Array, of_x: str, kernel: jax.Array, of_kernel: str) -> jax.Array:
        """Return the product of an x and a kernel, of these letters, with the result's dims."""
        result: jax.Array = jnp.einsum(
            f"{of_x},{of_kernel}->{self.result}",
            x,
            kernel,
            precision=self.precision,
            preferred_element_type=self.dtype,
        )
        return result


def _product(equation: Any) -> Any:
    """Return the `dot_general` that an operation is; None where it is something else."""
    if equation.primitive.name == "dot_general":
        return equation
    rule = getattr(equation.params.get("bwd"), "f", None)
    if rule not in _PLAIN_RULES:
        return None
    (product,) = equation.params["call_jaxpr"].jaxpr.eqns
    return product
