"""Place a model on devices: the mesh, the rules, and arrays laid out by them.

Knows devices and parameter shapes.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_flow.engine.agreement import decide_first
from redco_flow.engine.compiler_options import compiler_options
from redco_flow.engine.sharding.fsdp import (
    ModelStates,
    choose_parameter_split,
    device_memory_bytes,
    known_memory_bytes,
    split_over_fsdp,
)
from redco_flow.engine.sharding.mesh import (
    BATCH_AXES,
    CONTEXT_AXIS,
    DATA_AXIS,
    FSDP_AXIS,
    MODEL_AXIS,
    DataProcess,
    build_mesh,
    check_context_is_used,
    find_data_process,
    merge_context,
    own_device,
    parameter_axis_sizes,
)
from redco_flow.engine.sharding.rules import Axes, ShardingRules
from redco_flow.engine.sharding.storage import PaddedStorage
from redco_flow.engine.sharding.two_rules import derive_rules
from redco_flow.engine.step.lora import Lora
from redco_flow.engine.step.trainable import Trainable

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


class Deployer:
    """A mesh of devices and how parameters lie on it.

    Args:
        num_model_shards: devices that split every product among them; the others are data
            parallel.
        num_context_shards: devices that split every sequence among them, for rows too long for
            one. The models of this package attend by a ring there.
        num_fsdp_shards: data-parallel devices that share one copy of parameters and optimizer
            state (ZeRO-3), each gathering what it uses. `"auto"` is the smallest number with
            which they fit a device's memory; `get_sharding_rules` decides it, once.
        fsdp_over_context: whether context shards share copies too, as fsdp shards do; else each
            has one. None: as `"auto"` decides, and not where num_fsdp_shards is a number.
        seed: of everything random that is not given a seed of its own.
        devices: all of them by default.
        device_memory_gib: of one device, if the device does not report it.
        matmul_precision: as of `jax.default_matmul_precision`, of all programs on accelerators;
            None is JAX's default, which multiplies float32 numbers rounded to bfloat16 (TPUs) or
            TF32 (GPUs). `"highest"` keeps float32; products of bfloat16 numbers need none of it.
            JAX's own setting wins where there is one (`JAX_DEFAULT_MATMUL_PRECISION`).

    Raises:
        ValueError: the shards do not divide the devices.
    """

    def __init__(
        self,
        num_model_shards: int = 1,
        *,
        num_context_shards: int = 1,
        num_fsdp_shards: int | Literal["auto"] = 1,
        fsdp_over_context: bool | None = None,
        seed: int = 0,
        devices: Sequence[jax.Device] | None = None,
        device_memory_gib: float | None = None,
        matmul_precision: str | None = None,
    ) -> None:
        # Before "auto" is decided: as if it were 1.
        start = 1 if num_fsdp_shards == "auto" else num_fsdp_shards
        self._mesh = build_mesh(
            num_model_shards,
            devices,
            num_fsdp_shards=start,
            num_context_shards=num_context_shards,
        )
        self._is_decided = num_fsdp_shards != "auto"
        self._fsdp_over_context = fsdp_over_context
        self._device_memory_gib = device_memory_gib
        self.seed = seed
        self.matmul_precision = matmul_precision

    @property
    def mesh(self) -> Mesh:
        """The devices, arranged as (data, fsdp, context, model).

        Raises:
            ValueError: num_fsdp_shards is "auto" and not decided yet.
        """
        if not self._is_decided:
            raise ValueError(
                "num_fsdp_shards='auto' is decided by deployer.get_sharding_rules(params, "
                "function, *inputs, optimizer=optimizer): call that first."
            )
        return self._mesh

    @property
    def data_process(self) -> DataProcess:
        """The share of each batch that this process reads."""
        processes = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        by_row = processes.reshape(self.num_data_shards, -1)
        return find_data_process(by_row, jax.process_index())

    @property
    def num_model_shards(self) -> int:
        """Devices that split every product among them."""
        return int(self._mesh.shape[MODEL_AXIS])

    @property
    def num_context_shards(self) -> int:
        """Devices that split every sequence among them."""
        return int(self._mesh.shape[CONTEXT_AXIS])

    @property
    def num_fsdp_shards(self) -> int:
        """Data-parallel devices that share one copy of the parameters."""
        return int(self.mesh.shape[FSDP_AXIS])

    @property
    def fsdp_over_context(self) -> bool:
        """Whether what is split over `fsdp` is split over `context` as well."""
        return bool(self._fsdp_over_context) and self.num_context_shards > 1

    @property
    def num_data_shards(self) -> int:
        """Parts that each batch is split into: over both `data` and `fsdp`."""
        return int(self._mesh.shape[DATA_AXIS] * self._mesh.shape[FSDP_AXIS])

    @property
    def device_memory_bytes(self) -> int | None:
        """Memory of one device, where it tells or `device_memory_gib` was given; else None."""
        device = own_device(self._mesh.devices.flatten().tolist())
        return known_memory_bytes(device, self._device_memory_gib)

    def get_sharding_rules(
        self,
        params: Any,
        function: Callable[..., Any] | None = None,
        *inputs: Any,
        overrides: Iterable[tuple[str, Axes]] = (),
        optimizer: optax.GradientTransformation | None = None,
        trainable: Trainable | None = None,
        lora: Lora | None = None,
        param_dtype: str = "float32",
    ) -> ShardingRules:
        """Derive the rules that split `params` over the model shards from what is computed.

        Over several fsdp shards the rules then split what is still replicated.

            deployer.get_sharding_rules(params, model_apply, ids)
            deployer.get_sharding_rules(params, loss_fn, collate_fn(examples[:2]), None, False)

        Args:
            params: arrays, or shapes as from `jax.eval_shape`.
            function: (params, *inputs) -> anything: a forward pass or a loss. Traced on shapes,
                never run. Not needed with one model shard, where everything is replicated.
            inputs: arrays or shapes, in trees; other Python values are passed as they are.
            overrides: (regex, axes) pairs that come first, as `[("head$", (None, "model"))]`.
            optimizer: what will train; num_fsdp_shards="auto" counts its state.
            trainable: as the Trainer is given it; "auto" counts neither gradients nor optimizer
                state of what is frozen.
            lora: the factors that the Trainer is given beside `params`, for "auto"; the rules are
                those of `params` alone.
            param_dtype: as the Trainer is given it, for "auto".

        Raises:
            ShardingError: no function, and several model shards; an override matches no
                parameter or does not fit one; or there are several context shards, and the
                function splits no sequence over them.
            ValueError: num_fsdp_shards is "auto", and there is no optimizer or the device does
                not report its memory.
            EngineError: num_fsdp_shards is "auto", and `trainable` leaves nothing to train.
        """
        sizes = dict(self._mesh.shape)
        rules = derive_rules(params, sizes, function, inputs, overrides=overrides)
        if not self._is_decided:
            if optimizer is None:
                raise ValueError(
                    "num_fsdp_shards='auto' counts what the optimizer keeps: pass optimizer=…, or "
                    "a number of shards where nothing is trained."
                )
            self._decide_parameter_split(
                rules, ModelStates(params, optimizer, lora, trainable, param_dtype)
            )
        sizes = parameter_axis_sizes(dict(self.mesh.shape), over_context=self.fsdp_over_context)
        rules = split_over_fsdp(rules, params, sizes)
        if function is not None:
            check_context_is_used(self.on_mesh(function), params, inputs, self.num_context_shards)
        logger.info("%s", rules.summary())
        return rules

    def _decide_parameter_split(self, rules: ShardingRules, states: ModelStates) -> None:
        devices = self._mesh.devices.flatten().tolist()

        def decide() -> int:
            memory = device_memory_bytes(own_device(devices), self._device_memory_gib)
            split = choose_parameter_split(
                rules,
                states,
                dict(self._mesh.shape),
                memory,
                over_context=self._fsdp_over_context,
            )
            # One number, for all processes.
            return 2 * split.num_fsdp + split.over_context

        count, over_context = divmod(decide_first(decide), 2)
        self._mesh = build_mesh(
            self.num_model_shards,
            devices,
            num_fsdp_shards=count,
            num_context_shards=self.num_context_shards,
        )
        self._fsdp_over_context = bool(over_context)
        self._is_decided = True

    def without_context_shards(self) -> Deployer:
        """Return one on the same devices whose context shards have rows of their own instead.

        Generating, which takes token after token, has no sequence to split. Parameters lie the
        same way on both.
        """
        other = copy.copy(self)
        other._mesh = merge_context(self.mesh, into_fsdp=self.fsdp_over_context)
        return other

    def log_rules(self, rules: ShardingRules) -> None:
        """Log every parameter's axes and reason, where devices split more than the batch."""
        splits_more = self.mesh.size > self.mesh.shape[DATA_AXIS]
        for line in rules.explain().splitlines() if splits_more else ():
            logger.info("%s", line)

    def named_sharding(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Return the sharding with these mesh axes; none: replicated."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def params_sharding(self, params: Any, rules: ShardingRules) -> Any:
        """Return the tree of shardings for a tree of arrays or shapes, unpadded."""
        return self.params_storage(params, rules).exact_sharding

    def params_storage(self, params: Any, rules: ShardingRules) -> PaddedStorage:
        """Say how parameters are stored while they are computed with."""
        return self.storage(params, rules.specs(params), rules.fused(params))

    def storage(self, tree: Any, specs: Any, fused: Any = None) -> PaddedStorage:
        """Say how a tree of arrays or shapes with these specs is stored.

        Args:
            fused: per leaf the dim that is sorted by shard, or None; None: no dim of any.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        nothing = jax.tree.map(lambda _: None, shapes)
        fused = nothing if fused is None else fused
        return PaddedStorage(self.mesh, shapes, specs, fused, self.fsdp_over_context)

    def shard_params(self, params: Any, rules: ShardingRules) -> Any:
        """Lay parameters out over the mesh; arrays that already lie so are not copied."""
        return jax.device_put(params, self.params_sharding(params, rules))

    def rows_sharding(self, *, dim: int = 0) -> NamedSharding:
        """Return the sharding of arrays whose rows lie along `dim`: over the data shards."""
        return self.named_sharding(*[None] * dim, BATCH_AXES)

    def put_rows(self, rows: Any, *, dim: int = 0) -> Any:
        """Lay this process' rows of a batch out over the data shards.

        Args:
            rows: a tree of NumPy arrays.
            dim: the dim along which the rows lie.
        """
        sharding = self.rows_sharding(dim=dim)
        if self.data_process.count == 1:
            return jax.device_put(rows, sharding)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), rows
        )

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Return `function` compiled for the mesh, with its platform's compiler options.

        The options of a platform are in `engine.compiler_options`. An option that `XLA_FLAGS`
        or `LIBTPU_INIT_ARGS` names is left to them.

        Args:
            options: of `jax.jit`; its `compiler_options` come on top.
        """
        given = compiler_options(self.mesh) | (options.pop("compiler_options", None) or {})
        return jax.jit(self.on_mesh(function), compiler_options=given or None, **options)

    def on_mesh(self, function: F) -> F:
        """Let `function` name mesh axes while it is traced, and multiply in `matmul_precision`."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            mesh = jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)
            with mesh, jax.default_matmul_precision(self._precision()):
                return function(*args, **kwargs)

        return cast("F", traced)

    def _precision(self) -> Any:
        """Return the precision to trace with: JAX's setting, or ours where there is none.

        CPUs multiply in the numbers' own dtype anyway.
        """
        of_jax = jax.config.values["jax_default_matmul_precision"]
        is_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return of_jax if is_cpu or of_jax is not None else self.matmul_precision
