"""Count the floating-point operations that a model asks of a training step, from its trace.

Counted are matrix products and convolutions, two operations a multiply-add. A product is computed
once forwards, and once more backwards for each of its two operands that a gradient flows to: three
times where both depend on what is trained, twice under a frozen kernel, once before anything that
is trained. What rematerialisation computes again is not counted, nor are elementwise operations.
Attention is what the function computes without a mesh: every query with every key of its row, those
that a mask hides included, as PaLM counts it; padding counts like any token.
Source: Chowdhery et al. 2022, PaLM, appendix B.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from redco_flow.engine.errors import EngineError
from redco_flow.engine.sharding.dataflow.trace import scan_sizes
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.step import MicroBatches, masked_sums

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LowRank:
    """A frozen kernel that is trained by two factors: (num_inputs, rank), (rank, num_outputs)."""

    rank: int
    num_inputs: int
    num_outputs: int

    def backward_and_factors(self, forward: float, *, has_trained_inputs: bool) -> float:
        """Return the operations that come to a product with the kernel, besides its own forwards.

        Args:
            forward: operations of the product.
            has_trained_inputs: whether a gradient flows to what the kernel is multiplied with.
        """
        first = forward * self.rank / self.num_outputs
        second = forward * self.rank / self.num_inputs
        to_inputs = (forward + first) * has_trained_inputs
        return to_inputs + 2 * first + 3 * second


# Of a value: whether a gradient flows to it, or which factors stand for it.
Mark = bool | LowRank
_Found = tuple[list[Mark], float]


class ModelFlops:
    """The operations of a training's steps.

    Args:
        loss_fn: the model's, without low-rank factors.
        params: shapes.
        marks: of each parameter.
    """

    def __init__(self, loss_fn: LossFn, params: Any, marks: Iterable[Mark]) -> None:
        self._loss_fn = loss_fn
        self._params = params
        self._marks = list(marks)
        self._known: dict[Any, float | None] = {}

    def of_step(self, batches: MicroBatches) -> float | None:
        """Return the operations of a step on a global batch, arrays or shapes.

        None, and the log says why, if they are unknown.
        """
        leaves, structure = jax.tree.flatten(batches)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if (shapes, structure) not in self._known:
            self._known[shapes, structure] = self._count_or_tell(batches)
        return self._known[shapes, structure]

    def _count_or_tell(self, batches: MicroBatches) -> float | None:
        try:
            return self._count(batches)
        except Exception as error:  # noqa: BLE001 (a figure that is missing ends no training)
            logger.info("TFLOP/s and MFU of this training are not available: %s", error)
            return None

    def _count(self, batches: MicroBatches) -> float:
        num_micro = len(batches["mask"])
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)

        def loss(params: Any, micro_batch: MicroBatches) -> jax.Array:
            seed = jnp.zeros((), jnp.uint32)
            return masked_sums(self._loss_fn, params, micro_batch, seed, 0).total

        return num_micro * count_model_flops(loss, self._params, one, self._marks)


def trained_marks(params: Any, mask: Any) -> list[Mark]:
    """Return a mark for each parameter.

    Args:
        mask: a tree of bools, which are trained; None: all.
    """
    return [True] * len(jax.tree.leaves(params)) if mask is None else jax.tree.leaves(mask)


class NotCounted(EngineError):
    """The function computes something whose operations its trace does not tell."""


def count_model_flops(
    function: Callable[[Any, Any], Any], params: Any, inputs: Any, marks: Iterable[Mark]
) -> float:
    """Return the operations of `function(params, inputs)` and of its gradient.

    Args:
        params, inputs: trees of shapes.
        marks: of each leaf of params.

    Raises:
        NotCounted: there are products in a loop of unknown length, or kernels that are opaque.
    """
    closed = jax.make_jaxpr(function)(params, inputs)
    of_params = list(marks)
    of_inputs: list[Mark] = [False] * (len(closed.in_avals) - len(of_params))
    return _walk(closed, [*of_params, *of_inputs])[1]


def _walk(closed: ClosedJaxpr | Jaxpr, inputs: Sequence[Mark]) -> _Found:
    """Return the marks of a jaxpr's results, and the operations to compute them."""
    jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
    known: dict[Any, Mark] = dict.fromkeys(jaxpr.constvars, False)
    known.update(zip(jaxpr.invars, inputs, strict=True))
    total = 0.0

    def read(atom: Any) -> Mark:
        return False if isinstance(atom, Literal) else known[atom]

    for equation in _used(jaxpr):
        marks, flops = _follow(equation, [read(atom) for atom in equation.invars])
        total += flops
        for var, mark in zip(equation.outvars, marks, strict=True):
            known[var] = mark if _is_differentiable(var.aval) else False
    return [read(atom) for atom in jaxpr.outvars], total


def _used(jaxpr: Jaxpr) -> list[Any]:
    """List the equations that the results hang on."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    used = []
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            used.append(equation)
            wanted.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return used[::-1]


def _is_differentiable(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact)


def _follow(equation: Any, operands: list[Mark]) -> _Found:
    name = equation.primitive.name
    if name in _PRODUCTS:
        return _product(_PRODUCTS[name](equation), operands[:2])
    if name in _CALLS:
        return _CALLS[name](equation, operands)
    if _OPAQUE.fullmatch(name):
        raise NotCounted(f"it calls {name}, whose operations are not known")
    inner = _inner_jaxpr(equation)
    if inner is not None:
        if _function_name(inner) == _GROUPED_PRODUCT:
            return _product(_grouped_flops(equation), operands[:2])
        marks, flops = _walk(inner, operands)
        return marks, flops * _num_shards(equation)
    return [_passed_on(name, operands)] * len(equation.outvars), 0.0


def _product(forward: float, operands: Sequence[Mark]) -> _Found:
    flops = forward
    for mark, other in (operands, operands[::-1]):
        if isinstance(mark, LowRank):
            flops += mark.backward_and_factors(forward, has_trained_inputs=bool(other))
        elif mark and not isinstance(other, LowRank):
            flops += forward
    return [any(map(bool, operands))], flops


def _passed_on(name: str, operands: Sequence[Mark]) -> Mark:
    """Return the mark of what an elementwise or shaping operation makes."""
    if name == "stop_gradient":
        return False
    if name in _SAME_KERNEL and operands and isinstance(operands[0], LowRank):
        return operands[0]
    return any(map(bool, operands))


# What is still the kernel, in another dtype or shape, or one layer's of a stack.
_SAME_KERNEL = frozenset({
    "convert_element_type", "copy", "dynamic_slice", "name", "reduce_precision", "reshape",
    "sharding_constraint", "slice", "squeeze", "transpose",
})  # fmt: skip
_OPAQUE = re.compile(r"pallas_call|tpu_custom_call|ffi_call|dot_product_attention.*|.*callback")
# `models.feed_forward.grouped_product`: its loops end where groups do, and pass over each row once.
_GROUPED_PRODUCT = "grouped_product"


def _dot_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return _contraction(equation, contracted)


def _ragged_flops(equation: Any) -> float:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return _contraction(equation, contracted)


def _contraction(equation: Any, contracted: Sequence[int]) -> float:
    left: tuple[int, ...] = equation.invars[0].aval.shape
    made: tuple[int, ...] = equation.outvars[0].aval.shape
    return 2.0 * math.prod(made) * math.prod(left[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> float:
    kernel: tuple[int, ...] = equation.invars[1].aval.shape
    made: tuple[int, ...] = equation.outvars[0].aval.shape
    outputs: int = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    # A transposed convolution's dilated inputs are zeros for the most part.
    zeros: int = math.prod(equation.params["lhs_dilation"])
    return 2.0 * math.prod(made) * math.prod(kernel) / outputs / zeros


def _grouped_flops(equation: Any) -> float:
    rows: tuple[int, ...] = equation.invars[0].aval.shape
    kernels: tuple[int, ...] = equation.invars[1].aval.shape
    return 2.0 * rows[0] * math.prod(kernels[1:])


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_flops,
    "conv_general_dilated": _convolution_flops,
}


def _scan(equation: Any, operands: list[Mark]) -> _Found:
    body, length = equation.params["jaxpr"], equation.params["length"]
    num_consts, num_carry = scan_sizes(
        body, [v.aval.ndim for v in equation.invars], [v.aval.ndim for v in equation.outvars]
    )
    consts, rest = operands[:num_consts], operands[num_consts:]
    marks, flops = _until_stable(body, consts, rest[:num_carry], rest[num_carry:])
    return marks, flops * length


def _until_stable(
    body: ClosedJaxpr, consts: list[Mark], carry: list[Mark], stacked: list[Mark]
) -> _Found:
    """Walk a loop's body with the marks that its carry has from some turn on."""
    while True:
        marks, flops = _walk(body, [*consts, *carry, *stacked])
        joined = _joined([carry, marks[: len(carry)]])
        if joined == carry:
            return marks, flops
        carry = joined


def _joined(alternatives: Sequence[Sequence[Mark]]) -> list[Mark]:
    """Join the marks that values may have."""
    together = zip(*alternatives, strict=True)
    return [one[0] if len(set(one)) == 1 else any(map(bool, one)) for one in together]


def _while(equation: Any, operands: list[Mark]) -> _Found:
    params = equation.params
    operands = operands[params["cond_nconsts"] :]
    num_consts = params["body_nconsts"]
    marks, flops = _until_stable(
        params["body_jaxpr"], operands[:num_consts], operands[num_consts:], []
    )
    if flops:
        raise NotCounted("it multiplies in a loop (while_loop) of which no trace tells the length")
    return marks, 0.0


def _cond(equation: Any, operands: list[Mark]) -> _Found:
    """Of branches the dearest counts."""
    found = [_walk(branch, operands[1:]) for branch in equation.params["branches"]]
    return _joined([marks for marks, _ in found]), max(flops for _, flops in found)


_CALLS: dict[str, Callable[[Any, list[Mark]], _Found]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _inner_jaxpr(equation: Any) -> ClosedJaxpr | Jaxpr | None:
    """Return the jaxpr that a call takes its operands to."""
    sizes = (len(equation.invars), len(equation.outvars))
    for value in equation.params.values():
        if isinstance(value, ClosedJaxpr | Jaxpr):
            jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if (len(jaxpr.invars), len(jaxpr.outvars)) == sizes:
                return value
    return None


def _function_name(inner: ClosedJaxpr | Jaxpr) -> str:
    jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    return str(jaxpr.debug_info.func_name)


def _num_shards(equation: Any) -> int:
    """Return how often a call's jaxpr runs: `shard_map`'s on each shard."""
    if equation.primitive.name != "shard_map":
        return 1
    sizes = equation.params["mesh"].shape
    return math.prod(sizes[axis] for axis in equation.params["manual_axes"])
