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
from redco_flow.engine.sharding.axes import check_context_is_used
from redco_flow.engine.sharding.fsdp import (
    Training,
    choose_num_fsdp_shards,
    device_memory_bytes,
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
    find_data_process,
    merge_context_into_data,
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
            one. The models of this package attend by a ring there; parameters are copied.
        num_fsdp_shards: data-parallel devices that share one copy of parameters and optimizer
            state (ZeRO-3), each gathering what it uses. `"auto"` is the smallest number with
            which they fit a device's memory; `get_sharding_rules` decides it, once.
        seed: of everything random that is not given a seed of its own.
        devices: all of them by default.
        device_memory_gib: of one device, for `"auto"`, where the device does not tell.

    Raises:
        ValueError: the shards do not divide the devices.
    """

    def __init__(
        self,
        num_model_shards: int = 1,
        *,
        num_context_shards: int = 1,
        num_fsdp_shards: int | Literal["auto"] = 1,
        seed: int = 0,
        devices: Sequence[jax.Device] | None = None,
        device_memory_gib: float | None = None,
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
        self._device_memory_gib = device_memory_gib
        self.seed = seed

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
        """Which share of each batch this process reads."""
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
    def num_data_shards(self) -> int:
        """Parts that each batch is split into: over both `data` and `fsdp`."""
        return int(self._mesh.shape[DATA_AXIS] * self._mesh.shape[FSDP_AXIS])

    def get_sharding_rules(
        self,
        params: Any,
        function: Callable[..., Any] | None = None,
        *inputs: Any,
        overrides: Iterable[tuple[str, Axes]] = (),
        optimizer: optax.GradientTransformation | None = None,
        trainable: Trainable | None = None,
        lora: Lora | None = None,
    ) -> ShardingRules:
        """Derive the rules that split `params` over the model shards from what is computed.

        Over several fsdp shards the rules then split what is still whole.

            deployer.get_sharding_rules(params, model_apply, ids)
            deployer.get_sharding_rules(params, loss_fn, collate_fn(examples[:2]), None, False)

        Args:
            params: arrays, or shapes as from `jax.eval_shape`.
            function: (params, *inputs) -> anything: a forward pass or a loss. Traced on shapes,
                never run. Only with one model shard, where everything is whole, not needed.
            inputs: arrays or shapes, in trees; other Python values are passed as they are.
            overrides: (regex, axes) pairs that come first, as `[("head$", (None, "model"))]`.
            optimizer: what will train; num_fsdp_shards="auto" counts its state.
            trainable: as the Trainer is given it; "auto" counts neither gradients nor optimizer
                state of what is frozen.
            lora: the factors that the Trainer is given beside `params`, for "auto"; the rules are
                those of `params` alone.

        Raises:
            ShardingError: no function, and several model shards; an override matches no
                parameter or does not fit one; or there are several context shards, and the
                function splits no sequence over them.
            ValueError: num_fsdp_shards is "auto", and there is no optimizer or the device does
                not tell its memory.
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
            self._decide_num_fsdp_shards(rules, Training(params, optimizer, lora, trainable))
        rules = split_over_fsdp(rules, params, dict(self.mesh.shape))
        if function is not None:
            check_context_is_used(self.on_mesh(function), params, inputs, self.num_context_shards)
        logger.info("%s", rules.summary())
        return rules

    def _decide_num_fsdp_shards(self, rules: ShardingRules, training: Training) -> None:
        devices = self._mesh.devices.flatten().tolist()

        def decide() -> int:
            memory = device_memory_bytes(jax.local_devices()[0], self._device_memory_gib)
            return choose_num_fsdp_shards(rules, training, dict(self._mesh.shape), memory)

        count = decide_first(decide)
        self._mesh = build_mesh(
            self.num_model_shards,
            devices,
            num_fsdp_shards=count,
            num_context_shards=self.num_context_shards,
        )
        self._is_decided = True

    def without_context_shards(self) -> Deployer:
        """Return one on the same devices whose context shards have rows of their own instead.

        Generating, which takes token after token, has no sequence to split. Parameters lie the
        same way on both.
        """
        other = copy.copy(self)
        other._mesh = merge_context_into_data(self.mesh)
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
        return PaddedStorage(self.mesh, shapes, specs, nothing if fused is None else fused)

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

    def on_mesh(self, function: F) -> F:
        """Let `function` name mesh axes in sharding constraints while it is traced."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args, **kwargs)

        return cast("F", traced)
