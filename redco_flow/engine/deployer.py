"""Place a model on devices: the mesh, the rules, and arrays laid out by them.

Knows devices and parameter shapes. Refuses to know what is trained, on which data, and who asked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow.engine.mesh import DATA_AXIS, MODEL_AXIS, build_mesh, find_data_process
from redco_flow.engine.optimizer_sharding import optimizer_specs
from redco_flow.engine.sharding import Axes, ShardingRules
from redco_flow.engine.two_rules import derive_rules

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


class Deployer:
    """A mesh of devices and how parameters lie on it.

    Args:
        num_model_shards: devices that share one copy of the parameters; the others are data
            parallel.
        seed: of everything random that is not given a seed of its own.
        devices: all of them by default.

    Raises:
        ValueError: num_model_shards does not divide the devices.
    """

    def __init__(
        self,
        num_model_shards: int = 1,
        *,
        seed: int = 0,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.mesh = build_mesh(num_model_shards, devices)
        processes = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        self.data_process = find_data_process(processes, jax.process_index())
        self.seed = seed

    @property
    def num_model_shards(self) -> int:
        """Devices that share one copy of the parameters."""
        return int(self.mesh.shape[MODEL_AXIS])

    @property
    def num_data_shards(self) -> int:
        """Parts that each batch is split into."""
        return int(self.mesh.shape[DATA_AXIS])

    def get_sharding_rules(
        self,
        params: Any,
        *,
        overrides: Iterable[tuple[str, Axes]] = (),
        scanned_layers: Sequence[str] | None = None,
        residual_width: int | None = None,
    ) -> ShardingRules:
        """Derive the rules that split `params` over the model shards.

        Args:
            params: arrays, or shapes as from `jax.eval_shape`.
            overrides: (regex, axes) pairs that come first, as `[("head$", (None, "model"))]`.
            scanned_layers: regexes of parameters whose first dim counts layers, where their
                shapes do not show it.
            residual_width: the model's width, where the shapes leave it open.

        Raises:
            ShardingError: an override matches no parameter or does not fit one.
        """
        rules = derive_rules(
            params,
            dict(self.mesh.shape),
            overrides=overrides,
            scanned_layers=scanned_layers,
            residual_width=residual_width,
        )
        logger.info("%s", rules.summary())
        return rules

    def log_rules(self, rules: ShardingRules) -> None:
        """Log every parameter's axes and reason, and how many bytes each device holds."""
        for line in rules.explain().splitlines():
            logger.info("%s", line)

    def named_sharding(self, *axes: str | None) -> NamedSharding:
        """Return the sharding with these mesh axes; none: replicated."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def params_sharding(self, params: Any, rules: ShardingRules) -> Any:
        """Return the tree of shardings for a tree of arrays or shapes."""
        return self._shardings(rules.specs(params))

    def optimizer_sharding(self, opt_state: Any, params: Any, rules: ShardingRules) -> Any:
        """Return the tree of shardings of an optimizer state (arrays or shapes)."""
        return self._shardings(optimizer_specs(opt_state, params, rules.specs(params)))

    def shard_params(self, params: Any, rules: ShardingRules) -> Any:
        """Lay parameters out over the mesh; arrays that already lie so are not copied."""
        return jax.device_put(params, self.params_sharding(params, rules))

    def put_rows(self, rows: Any, *, dim: int = 0) -> Any:
        """Lay this process' rows of a batch out over the data shards.

        Args:
            rows: a tree of NumPy arrays.
            dim: the dim along which the rows lie.
        """
        sharding = self.named_sharding(*[None] * dim, DATA_AXIS)
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

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
