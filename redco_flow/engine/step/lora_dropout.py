"""Dropout of what low-rank factors read: x W + s mask(x) A B, with a mask for each product.

A mask depends on the keys of the batch's rows, on the kernel, its layer and how often it was
multiplied before, and on the place in the row: not on the mesh, the micro-batches or what is
rematerialised.
Dims in this file: B rows of the batch, N rows of activations, L layers.
Source: Hu et al. 2021, LoRA; the masks are those of PEFT's `lora_dropout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.engine.errors import EngineError
from redco_flow.engine.random import example_keys, fold_in, keep_mask

# Folded into rows' keys, apart from the numbers of the model's own dropouts.
_FACTORS = 0x10A4


@dataclass(frozen=True)
class KernelDropout:
    """The dropout of what one kernel's factors read.

    Args:
        path: of the kernel.
        rate: in (0, 1).
        uses: numbers the products with the kernel, in the order in which they are traced.
    """

    path: str
    rate: float
    uses: Iterator[int] = field(default_factory=count)

    @property
    def scale(self) -> float:
        """The factor of the numbers that are kept, so that expectations stay as they are."""
        return 1 / (1 - self.rate)

    def keys(self, rngs: jax.Array, number: int, num_layers: int | None) -> jax.Array:
        """Return raw keys (B, 2), of a stack (L, B, 2).

        Args:
            rngs: keys of the batch's rows (B,).
            number: of the kernel.
        """
        rows = example_keys(rngs, len(rngs))
        assert rows is not None
        rows = fold_in(fold_in(rows, _FACTORS), number)
        if num_layers is None:
            return rows
        return jax.vmap(fold_in, (None, 0))(rows, jnp.arange(num_layers))

    def drop(self, x: jax.Array, keys: jax.Array, use: int, parts: Sequence[int]) -> jax.Array:
        """Zero elements of x (N, …): (N, …, *parts); those that are kept stay as they are.

        Where N is not B, each row of the batch has N / B adjacent ones here, as pairs have.

        Args:
            keys: (B, 2).
            use: the product's number.
            parts: sizes of dims along which x is the same and the mask is not.

        Raises:
            EngineError: N is no multiple of B.
        """
        copies, rest = divmod(len(x), len(keys)) if x.ndim else (0, 1)
        if rest or not copies:
            raise self.refusal(
                f"is multiplied with activations {x.shape}, whose first dim has not one entry, or "
                f"the same number of them, for each of the batch's {len(keys)} rows"
            )
        keys = fold_in(keys, use)
        if copies > 1:
            folded = jax.vmap(fold_in, (None, 0), 1)(keys, jnp.arange(copies))
            keys = folded.reshape(-1, keys.shape[-1])
        is_kept = keep_mask(keys, (*x.shape[1:], *parts), self.rate)
        x = x.reshape(*x.shape, *[1] * len(parts))
        return jnp.where(is_kept, x, jnp.zeros((), x.dtype))

    def refusal(self, cause: str) -> EngineError:
        """Return the error of a kernel that has no products whose inputs could be dropped."""
        return EngineError(
            f"lora: dropout={self.rate} falls on what {self.path} is multiplied with, but the "
            f"kernel {cause}. Leave it out of the targets, or set dropout to 0."
        )

    def refusal_of(self, equation: Any) -> EngineError:
        """Return the error of an operation that is no product with activations."""
        name = equation.primitive.name
        cause = {
            "conv_general_dilated": "is a convolution's",
            "gather": "has rows that are looked up",
            "dot_general": "is not multiplied as inputs (batch, …, D) by a kernel (D, …): dims are "
            "shared, as experts share them, or the numbers are no floats",
        }.get(name)
        return self.refusal(
            cause
            or f"goes into an operation '{name}', as with experts, with num_mlp_chunks or with "
            "num_loss_chunks, which can be 1"
        )


def check_dropout(rate: float, tables: Set[str], experts: Set[str]) -> None:
    """Check that kernels can have dropout.

    Args:
        tables: paths of those whose rows are looked up.
        experts: paths of those with a kernel for each expert.

    Raises:
        EngineError: the rate is not in (0, 1), or there are such kernels; the message lists them.
    """
    if not 0 < rate < 1:
        raise EngineError(f"lora: dropout={rate} must be at least 0 and below 1.")
    causes = {"rows are looked up in": tables, "there is one for each expert of": experts}
    found = [f"{cause} {', '.join(sorted(paths))}" for cause, paths in causes.items() if paths]
    if found:
        raise EngineError(
            f"lora: dropout={rate} falls on what a kernel is multiplied with, but "
            f"{'; '.join(found)}: leave them out of the targets, or set dropout to 0."
        )
