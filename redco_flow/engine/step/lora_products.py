"""Multiply by a kernel W with factors A and B: x W + s (x A) B, where W + s A B is never formed.

Formed, it would take a gradient of the kernel's size to reach the factors, and a copy of the
kernel in each layer for the backward pass.
Dims in this file: R rank.
Source: Hu et al. 2021, LoRA, equation 3.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KernelProduct:
    """The dims of a product of activations x and a kernel; those of the kernel are its letters'.

    Args:
        x: letters of the activations' dims.
        kernel: of the kernel's.
        result: of the result's.
        contracted: those that are summed over.
    """

    x: str
    kernel: str
    result: str
    contracted: frozenset[str]

    @classmethod
    def read(cls, equation: Any, side: int, kernel: str) -> Self | None:
        """Return what an operation multiplies; None where it is no product of two arrays.

        Args:
            side: of the kernel among its two operands.
            kernel: a small letter for each of the kernel's dims.
        """
        numbers = _dimension_numbers(equation)
        if numbers is None or len(equation.invars) != 2:
            return None
        contracted, batch = numbers
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
        return cls(x, kernel, shared + "".join(free), frozenset(summed))

    def of_factors(self, x: jax.Array, a: jax.Array, b: jax.Array, factors: str) -> jax.Array:
        """Return the result's dims of (x A) B, in the dtype of x.

        Args:
            factors: the einsum from A and B to the kernel.
        """
        of_a, of_b = factors.split("->")[0].split(",")
        kept = [one for one in self.x if one not in self.contracted]
        apart = [one for one in of_a if one not in {*kept, *self.contracted}]
        between = "".join([*kept, *apart])
        inner = jnp.einsum(f"{self.x},{of_a}->{between}", x, a.astype(x.dtype))
        result: jax.Array = jnp.einsum(f"{between},{of_b}->{self.result}", inner, b.astype(x.dtype))
        return result


_Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _dimension_numbers(equation: Any) -> _Numbers | None:
    """Return those of a dot_general, or of one that is all that a custom derivative is given to."""
    if equation.primitive.name == "dot_general":
        numbers: _Numbers = equation.params["dimension_numbers"]
        return numbers
    inner = equation.params.get("call_jaxpr")
    if inner is None or not equation.primitive.name.startswith("custom_vjp_call"):
        return None
    jaxpr = inner.jaxpr
    is_alone = len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "dot_general"
    if not is_alone or jaxpr.eqns[0].invars != jaxpr.invars:
        return None
    return _dimension_numbers(jaxpr.eqns[0])
