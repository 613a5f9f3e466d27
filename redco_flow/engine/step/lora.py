"""Low-rank adaptation: train two thin factors beside each kernel, and add their product to it.

Which dims of a kernel are inputs and which outputs comes from what the function computes, so it
holds for any model. Activations that are multiplied by a kernel are multiplied by its factors, too,
and the two results are added; any other operation gets the sum of kernel and factors, in a scan
over layers one layer at a time.
Dims in this file: R rank.
Source: Hu et al. 2021, LoRA; differs: what is one kernel here (a stacked q, k, v) has one A, unless
they are asked to be `separate`.
Kalajdzievski 2023, rank-stabilised: the product counts alpha / sqrt(R) times. Liu et al. 2024,
DoRA: a trained magnitude for each output takes the place of its column's norm, which gradients take
for a constant, as in PEFT. Dropout of what the factors read is PEFT's, too: see `lora_dropout`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_flow.engine.errors import EngineError
from redco_flow.engine.sharding.mesh import MODEL_AXIS
from redco_flow.engine.sharding.rules import (
    ShardedParameter,
    ShardingRule,
    ShardingRules,
    check_rules,
    join,
    named_leaves,
)
from redco_flow.engine.sharding.shared_inputs import SharedInputs
from redco_flow.engine.sharding.two_rules import read_roles
from redco_flow.engine.step.deferred import Deferred, Outcome, bind, run_deferred
from redco_flow.engine.step.lora_dropout import KernelDropout, check_dropout
from redco_flow.engine.step.lora_products import KernelProduct, has_masks
from redco_flow.engine.step.lora_targets import (
    LETTERS,
    LoraTarget,
    Parts,
    choose_kernels,
    find_kernels,
    kernels_of_experts,
    kernels_of_vocabularies,
    looked_up,
)
from redco_flow.engine.step.loss import LossFn
from redco_flow.engine.step.model_flops import LowRank, Mark
from redco_flow.engine.step.quantization import BaseDtype, Blocks, EachOutput, Quantization

# A cast to another dtype changes more of a kernel than its last digits, and so of its factors.
_ROUNDED_BY_CASTS = (jnp.float32, jnp.bfloat16, jnp.float16)
BASE, FACTORS, SCALES = "base", "lora", "scales"


class _Value(NamedTuple):
    """A kernel and what belongs to it; keys are those of dropout, see `KernelDropout`."""

    kernel: Any
    a: Any
    b: Any
    scales: Any = None
    magnitudes: Any = None
    keys: Any = None


@dataclass(frozen=True)
class _Adapted(Deferred):
    """A kernel, A, B, and maybe scales and magnitudes, that together are a kernel.

    Args:
        inputs: positions of the dims that magnitudes do not have.
        stored: how the kernel is quantized; None: it is not.
        parts: those of the kernel that have factors; None: all.
        casts: dtypes that it is cast to, one after the other.
        is_row: it was one of a stack, in a loop over that.
        dropout: of what the factors read; None: there is none.
    """

    equation: str
    scale: float
    inputs: tuple[int, ...]
    is_stacked: bool
    stored: Quantization | None = None
    parts: Parts | None = None
    casts: tuple[Any, ...] = ()
    is_row: bool = False
    dropout: KernelDropout | None = None
    casts_first: ClassVar[bool] = False

    def use(self, value: Any) -> jax.Array:
        if self.dropout is not None:
            raise self.dropout.refusal("is used whole in a loop or a branch, or is a result")
        return self.merged(value)

    def merged(self, value: _Value) -> jax.Array:
        """Return the sum of kernel and factors."""
        return self._cast(self._sum(value))

    def _cast(self, kernel: jax.Array) -> jax.Array:
        for dtype in self.casts:
            kernel = kernel.astype(dtype)
        return kernel

    def _kernel(self, value: _Value) -> jax.Array:
        if self.stored is None:
            kernel: jax.Array = value.kernel
            return kernel
        return self.stored.widen(value.kernel, value.scales)

    def _sum(self, value: _Value) -> jax.Array:
        kernel = self._kernel(value)
        change = self.scale * jnp.einsum(self.equation, value.a, value.b)
        if self.parts is not None:
            change = _spread(change, *self.parts, kernel.shape[self.parts[0]], fill=0)
        # Not in the kernel's dtype where that is narrower: most of the change would be rounded off.
        adapted: jax.Array = kernel.astype(jnp.promote_types(kernel.dtype, change.dtype)) + change
        if value.magnitudes is None:
            return adapted
        norms = jax.lax.stop_gradient(_norms(adapted, self.inputs, self.parts))
        # Of padding the norm is zero, and so is the magnitude.
        ratios = value.magnitudes / jnp.where(norms == 0, 1, norms)
        if self.parts is not None:
            position, numbers = _without(self.parts, self.inputs)
            ratios = _spread(ratios, position, numbers, kernel.shape[self.parts[0]], fill=1)
        return adapted * jnp.expand_dims(ratios, self.inputs)

    def row(self) -> Deferred | None:
        if not self.is_stacked:
            return None
        first, second = self.equation.split("->")[0].split(",")
        result = self.equation.split("->")[1]
        letter = LETTERS[0]
        rest = f"{first[1:]},{second[1:]}->{result.removeprefix(letter)}"
        return replace(
            self,
            equation=rest,
            inputs=tuple(position - 1 for position in self.inputs),
            is_stacked=False,
            stored=None if self.stored is None else self.stored.row(),
            parts=None if self.parts is None else (self.parts[0] - 1, self.parts[1]),
            is_row=True,
        )

    def through(
        self,
        equation: Any,
        values: Sequence[Any],
        deferred: Sequence[Deferred | None],
        shared: SharedInputs,
    ) -> list[Outcome] | None:
        """Defer casts; multiply by the kernel and by the factors, and add the results."""
        side = deferred.index(self)
        if equation.primitive.name == "convert_element_type":
            dtype = equation.params["new_dtype"]
            if dtype in _ROUNDED_BY_CASTS:
                return [(values[0], replace(self, casts=(*self.casts, dtype)))]
        elif equation.primitive.name == "sharding_constraint" and self.dropout is not None:
            return [(values[0], self)]  # no number changes: the layout stays its own
        elif sum(how is not None for how in deferred) == 1:
            product = self._product(equation, side, values[side])
            if product is not None:
                return [(self._multiplied(equation, side, product, values), None)]
        if self.dropout is not None:
            raise self.dropout.refusal_of(equation)
        return None

    def _product(self, equation: Any, side: int, value: _Value) -> KernelProduct | None:
        """Return the product that an operation is; None where it needs the sum."""
        if value.magnitudes is not None and self.dropout is None:
            return None
        of_a, letters = self.equation.split(",")[0], self.equation.split("->")[1]
        product = KernelProduct.read(equation, side, letters)
        if product is None or product.contracted != {letters[position] for position in self.inputs}:
            return None
        # Dims of the kernel that are the activations' too: those of A alone have factors each.
        shared = {*product.x} & {*letters} - product.contracted
        if self.dropout is not None:
            is_of_rows = product.x[0] not in {*letters}
            return product if is_of_rows and not shared and not self.is_stacked else None
        parts = set() if self.parts is None else {letters[self.parts[0]]}
        return product if shared <= {*of_a} - parts else None

    def _multiplied(
        self, equation: Any, side: int, product: KernelProduct, values: Sequence[Any]
    ) -> jax.Array:
        """Return the product with the kernel and what the factors add to it."""
        dtype, dropout = equation.invars[side].aval.dtype, self.dropout
        use = None if dropout is None else next(dropout.uses)
        has_magnitudes = values[side].magnitudes is not None

        def multiply(x: jax.Array, value: _Value) -> jax.Array:
            kernel = self._cast(self._kernel(value)).astype(dtype)
            result: jax.Array = bind(equation, (x, kernel) if side else (kernel, x))[0]
            of_a, letters = self.equation.split(",")[0], self.equation.split("->")[1]
            ratio, apart = 1.0, ""
            if dropout is not None and use is not None:
                ratio = dropout.scale
                apart = "".join(one for one in of_a[:-1] if one not in product.contracted)
                names, sized = (letters, kernel) if has_magnitudes else (of_a, value.a)
                sizes = [sized.shape[names.index(one)] for one in apart]
                x = dropout.drop(x, value.keys, use, sizes)
            if has_magnitudes:
                change = self._cast(ratio * (self._sum(value) - self._kernel(value)))
                of_x = product.x + apart
                return result + product.of_kernel(x, of_x, change.astype(dtype), letters)
            scaled = ratio * self.scale * value.b
            change = product.of_factors(x, value.a, scaled, self.equation, apart)
            if self.parts is not None:
                at, numbers = self.parts
                position, size = product.result.index(letters[at]), kernel.shape[at]
                change = _spread(change, position, numbers, size, fill=0)
            return result + change

        value = values[side]
        # Made again in the backward pass, not kept: a kernel in another dtype, and a mask.
        if value.kernel.dtype != dtype or dropout is not None:
            multiply = jax.checkpoint(multiply, prevent_cse=not self.is_row)
        return multiply(values[1 - side], value)


def _norms(kernel: jax.Array, inputs: tuple[int, ...], parts: Parts | None) -> jax.Array:
    """The norm of each output's weights, of some parts; float32, without the dims of the inputs."""
    norms = jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=inputs))
    if parts is None:
        return norms
    position, numbers = _without(parts, inputs)
    return jnp.concatenate(
        [jax.lax.slice_in_dim(norms, at, at + 1, axis=position) for at in numbers], position
    )


def _without(parts: Parts, inputs: tuple[int, ...]) -> Parts:
    """Parts of what has a kernel's dims without its inputs."""
    position, numbers = parts
    return position - sum(at < position for at in inputs), numbers


def _spread(
    values: jax.Array, position: int, numbers: tuple[int, ...], size: int, *, fill: float
) -> jax.Array:
    """Return values of some parts among all parts of a kernel, `fill` in the others' places."""
    shape = [*values.shape[:position], 1, *values.shape[position + 1 :]]
    others = jnp.full(shape, fill, values.dtype)
    places = {number: place for place, number in enumerate(numbers)}

    def one(number: int) -> jax.Array:
        if (place := places.get(number)) is None:
            return others
        return jax.lax.slice_in_dim(values, place, place + 1, axis=position)

    return jnp.concatenate([one(number) for number in range(size)], position)


@dataclass(frozen=True)
class Lora:
    """The kernels that have low-rank factors, and their scales; build it with `plan_lora`.

    Its parameters are `{"base": the model's, "lora": {path: {"a": …, "b": …}}}`, of a quantized
    base also `"scales": {path: …}`, and a checkpoint holds them all: it can be restored without the
    file that the base once came from.

    Args:
        rank: of the factors.
        alpha: the product counts alpha / rank times.
        rank_stabilized: it counts alpha / sqrt(rank) times.
        dora: each output has a magnitude, `"m"` beside its A and B.
        separate: kernels that are stacked into one have an A each.
        dropout: share of what factors read that training zeroes: each number of each token by
            itself, again in each product with a kernel.
        stored: by path, how kernels that have factors are quantized; none: they are not.
        full: paths of the model's parameters that are trained in full, without factors.
    """

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]
    rank_stabilized: bool = False
    dora: bool = False
    separate: bool = False
    dropout: float = 0.0
    stored: Mapping[str, Quantization] = field(default_factory=dict)
    full: tuple[str, ...] = ()

    @property
    def trainable(self) -> str:
        """The `trainable` of a Trainer: the factors, and what is trained in full."""
        return "|".join([f"^{FACTORS}/", *(f"^{BASE}/{re.escape(path)}$" for path in self.full)])

    def start(self, params: Any, key: jax.Array) -> Any:
        """Return the parameters with factors whose product is zero; traceable.

        A is uniform within ±1 / sqrt(inputs), as in PEFT; B is zero; magnitudes are the kernel's
        norms; all float32.
        """
        shapes = {join(path): leaf.shape for path, leaf in named_leaves(params)}
        params, scales = self._store(params)
        leaves = {join(path): leaf for path, leaf in named_leaves(params)}
        factors = {}
        for number, target in enumerate(self.targets):
            shape = shapes[target.path]
            stack, inputs, outputs = (
                target.sizes(positions, shape)
                for positions in (target.stack, target.inputs, target.outputs)
            )
            limit = 1 / math.sqrt(math.prod(inputs))
            a_shape = (*stack, *inputs, self.rank)
            factors[target.path] = {
                "a": jax.random.uniform(
                    jax.random.fold_in(key, number), a_shape, jnp.float32, -limit, limit
                ),
                "b": jnp.zeros((*stack, self.rank, *outputs), jnp.float32),
            }
            if self.dora:
                kernel = leaves[target.path]
                if target.path in scales:
                    kernel = self.stored[target.path].widen(kernel, scales[target.path])
                factors[target.path]["m"] = _norms(kernel, target.inputs, target.parts)
        return {BASE: params, FACTORS: factors, **({SCALES: scales} if scales else {})}

    def _store(self, params: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Return the model's parameters as they are kept, and the scales of the quantized ones."""
        scales = {}
        leaves, structure = jax.tree.flatten(params)
        for position, (path, leaf) in enumerate(named_leaves(params)):
            if (stored := self.stored.get(name := join(path))) is not None:
                leaves[position], scales[name] = stored.store(leaf)
        return jax.tree.unflatten(structure, leaves), scales

    def shapes(self, params: Any) -> Any:
        """Return the shapes of the parameters with factors, given the model's or their shapes."""
        return jax.eval_shape(lambda params: self.start(params, jax.random.key(0)), params)

    def adapt(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` of the parameters with factors, given one of the model's."""
        return lambda params, *inputs: self._run(function, params, inputs, None)

    def adapt_loss(self, loss_fn: LossFn) -> LossFn:
        """Return the loss function of the parameters with factors; in training it has dropout.

        Raises (where it is traced):
            EngineError: there is dropout, and the function does more with a kernel than multiply
                activations by it.
        """

        def adapted(params: Any, *inputs: Any) -> Any:
            _, rngs, is_training = inputs
            rngs = rngs if is_training and self.dropout else None
            return self._run(loss_fn, params, inputs, rngs)

        return adapted

    def _run(
        self,
        function: Callable[..., Any],
        params: Any,
        inputs: Sequence[Any],
        rngs: jax.Array | None,
    ) -> Any:
        """Run it with dropout by the keys of the batch's rows; None: without."""
        targets = {target.path: target for target in self.targets}
        numbers = {path: number for number, path in enumerate(targets)}
        values, deferred, shapes = [], [], []
        for path, leaf in named_leaves(params[BASE]):
            name, value, how = join(path), leaf, None
            if name in targets:
                how, value = self._adapted(targets[name]), self._value(leaf, params, name)
                leaf = jax.eval_shape(how.merged, value)
                if rngs is not None:
                    dropout = KernelDropout(name, self.dropout)
                    num_layers = leaf.shape[0] if how.is_stacked else None
                    value = value._replace(keys=dropout.keys(rngs, numbers[name], num_layers))
                    how = replace(how, dropout=dropout)
            deferred.append(how)
            values.append(value)
            shapes.append(leaf)
        used = jax.tree.unflatten(jax.tree.structure(params[BASE]), shapes)
        with has_masks(rngs is not None):
            return run_deferred(function, used, values, deferred, inputs)

    def merge(self, params: Any) -> Any:
        """Return the model's parameters with the products added; traceable."""
        leaves, structure = jax.tree.flatten(params[BASE])
        paths = [join(path) for path, _ in named_leaves(params[BASE])]
        targets = {target.path: target for target in self.targets}
        for position, path in enumerate(paths):
            if path in targets:
                value = self._value(leaves[position], params, path)
                leaves[position] = self._adapted(targets[path]).merged(value)
        return jax.tree.unflatten(structure, leaves)

    def rules(self, rules: ShardingRules, params: Any) -> ShardingRules:
        """Return the layout with factors: A split like its kernel's inputs, B like its outputs.

        Args:
            rules: the model's.
            params: with factors; arrays or shapes.
        """
        base = [
            ShardingRule(
                f"{BASE}/{p.path}", p.spec, p.reason, exact=True, is_padded=True, fused=p.fused
            )
            for p in rules.parameters
        ]
        kernels = {parameter.path: parameter for parameter in rules.parameters}
        factors = [
            rule
            for target in self.targets
            for rule in _factor_rules(target, kernels[target.path], has_magnitudes=self.dora)
        ]
        scales = [
            _rule_of_scales(self.stored[target.path], target, kernels[target.path])
            for target in self.targets
            if target.path in self.stored
        ]
        return check_rules([*base, *factors, *scales], params, rules.axis_sizes)

    def marks(self, params: Any) -> list[Mark]:
        """Return, for each of the model's parameters, what gradients flow to in its place.

        Args:
            params: the model's; arrays or shapes.
        """
        targets = {target.path: target for target in self.targets}

        def mark(path: str, shape: tuple[int, ...]) -> Mark:
            if path not in targets:
                return path in self.full
            sides = (targets[path].inputs, targets[path].outputs)
            return LowRank(self.rank, *(math.prod(shape[dim] for dim in side) for side in sides))

        return [mark(join(path), leaf.shape) for path, leaf in named_leaves(params)]

    def _value(self, leaf: Any, params: Any, path: str) -> _Value:
        own = params[FACTORS][path]
        scales = params[SCALES][path] if path in self.stored else None
        return _Value(leaf, own["a"], own["b"], scales, own.get("m"))

    def _adapted(self, target: LoraTarget) -> _Adapted:
        scale = self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
        is_stacked = target.stack[:1] == (0,)
        stored = self.stored.get(target.path)
        return _Adapted(target.equation, scale, target.inputs, is_stacked, stored, target.parts)


def plan_lora(
    params: Any,
    function: Callable[..., Any],
    *inputs: Any,
    rank: int,
    alpha: float,
    targets: str | None,
    named: Mapping[str, Parts | None] | None = None,
    without: Sequence[str] = (),
    rank_stabilized: bool = False,
    dora: bool = False,
    separate: bool = False,
    dropout: float = 0.0,
    base_dtype: BaseDtype | None = None,
    full: Sequence[str] = (),
) -> Lora:
    """Find the kernels to adapt.

    Args:
        params: arrays or shapes.
        function: (params, *inputs) -> anything: the forward pass or the loss; traced, not run.
        inputs: arrays or shapes, in trees; other Python values are passed as they are.
        rank: of the factors; at least 1.
        alpha: the factors' product counts alpha / rank times.
        targets: a regex searched in the paths of the parameters that data is multiplied with, or
            `ALL_LINEAR`; None: `named` alone.
        named: further kernels by their paths, and of some the parts that get factors, each its own.
        without: paths of kernels that `ALL_LINEAR` does not mean.
        rank_stabilized, dora, separate, dropout: see `Lora`.
        base_dtype: in which the kernels that have factors are kept; None: as they are given.
        full: paths of parameters that are trained in full, as a head that was just drawn; none of
            them gets factors.

    Raises:
        EngineError: rank below 1, not a regex, no such dtype, or no such parameter; or dropout
            where there can be none. The message lists them.
    """
    if base_dtype not in (None, *get_args(BaseDtype)):
        allowed = ", ".join(get_args(BaseDtype))
        raise EngineError(f"lora: base_dtype={base_dtype!r} must be one of {allowed}, or None.")
    if rank < 1 or not alpha > 0:
        raise EngineError(f"lora: rank={rank} must be at least 1 and alpha={alpha} above 0.")
    _check_full(full, params)
    roles = read_roles(params, function, inputs)
    found = find_kernels(params, roles, separate=separate)
    kernels = [kernel for kernel in found if kernel.path not in full]

    def left_out() -> set[str]:
        return {*without, *kernels_of_vocabularies(kernels, params, roles)}

    chosen = choose_kernels(kernels, targets, named or {}, left_out)
    if not chosen:
        besides = f" (trained in full: {', '.join(full)})" if full else ""
        raise EngineError(
            f"lora targets={targets!r} matches no kernel; kernels: "
            f"{', '.join(kernel.path for kernel in kernels)}{besides}."
        )
    if dropout:
        tables = {one.path for one in chosen} & looked_up(params, roles)
        check_dropout(dropout, tables, kernels_of_experts(chosen, params, roles))
    shapes = {join(path): leaf.shape for path, leaf in named_leaves(params)}
    stored = {
        one.path: _quantization(base_dtype, one, shapes[one.path])
        for one in chosen
        if base_dtype is not None
    }
    kinds = (rank_stabilized, dora, separate, dropout, stored)
    return Lora(rank, alpha, chosen, *kinds, full=tuple(full))


def _check_full(full: Sequence[str], params: Any) -> None:
    paths = [join(path) for path, _ in named_leaves(params)]
    if unknown := sorted(set(full) - set(paths)):
        raise EngineError(
            f"lora: there are no parameters {', '.join(unknown)} to train in full; parameters: "
            f"{', '.join(paths)}."
        )


def _quantization(dtype: BaseDtype, target: LoraTarget, shape: Sequence[int]) -> Quantization:
    if dtype == "int8":
        return EachOutput(target.inputs)
    position = target.inputs[-1]
    return Blocks(position, shape[position])


def _factor_rules(
    target: LoraTarget, kernel: ShardedParameter, *, has_magnitudes: bool
) -> list[ShardingRule]:
    axes = dict(enumerate(kernel.spec))

    def along(positions: Sequence[int]) -> list[str | None]:
        return [MODEL_AXIS if axes.get(position) == MODEL_AXIS else None for position in positions]

    whole: list[str | None] = [None] * len(target.stack)
    a = PartitionSpec(*whole, *along(target.inputs), None)
    b = PartitionSpec(*whole, None, *along(target.outputs))
    fused = kernel.fused
    if kernel.fused is not None:
        position = kernel.fused.position
        fused = kernel.fused.at(len(whole) + 1 + target.outputs.index(position))
    name = f"{FACTORS}/{target.path}"
    why = "split like its kernel's"
    rules = [
        ShardingRule(f"{name}/a", a, f"{why} inputs", exact=True, is_padded=True),
        ShardingRule(f"{name}/b", b, f"{why} outputs", exact=True, is_padded=True, fused=fused),
    ]
    if has_magnitudes:
        rules.append(_rule_of_outputs(f"{name}/m", target, kernel))
    return rules


def _rule_of_scales(
    stored: Quantization, target: LoraTarget, kernel: ShardedParameter
) -> ShardingRule:
    name = f"{SCALES}/{target.path}"
    if isinstance(stored, EachOutput):
        return _rule_of_outputs(name, target, kernel)
    why = "split like its kernel"
    return ShardingRule(name, kernel.spec, why, exact=True, is_padded=True, fused=kernel.fused)


def _rule_of_outputs(name: str, target: LoraTarget, kernel: ShardedParameter) -> ShardingRule:
    """Of what has a kernel's dims without its inputs, such as magnitudes."""
    axes = dict(enumerate(kernel.spec))
    split = (
        MODEL_AXIS if axes.get(position) == MODEL_AXIS else None for position in target.magnitudes
    )
    fused = kernel.fused
    if fused is not None:
        fused = fused.at(target.magnitudes.index(fused.position))
    why = "split like its kernel's outputs"
    return ShardingRule(name, PartitionSpec(*split), why, exact=True, is_padded=True, fused=fused)
