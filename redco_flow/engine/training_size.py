"""How many bytes a training keeps on each device from step to step: from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optax

from redco_flow.engine.lora import Lora
from redco_flow.engine.sharding import ShardingRules
from redco_flow.engine.state_layout import bytes_per_device, state_layout
from redco_flow.engine.trainable import Trainable, restrict, select


@dataclass(frozen=True)
class Training:
    """What is trained, as far as it decides how much there is to keep.

    Args:
        params: the model's; arrays or shapes.
        optimizer: keeps state for what is trained alone.
        lora: factors that lie beside the model's parameters; None: none do.
        trainable: as a Trainer of all of these is given it; None: everything is trained.
    """

    params: Any
    optimizer: optax.GradientTransformation
    lora: Lora | None = None
    trainable: Trainable | None = None

    def bytes_per_device(self, rules: ShardingRules) -> int:
        """Return the bytes of parameters, gradients and optimizer state, padding included.

        What is frozen counts once, in its own dtype.

        Args:
            rules: the model's.

        Raises:
            EngineError: `trainable` is no regex or leaves nothing to train.
        """
        params = self.params
        if self.lora is not None:
            params = self.lora.shapes(params)
            rules = self.lora.rules(rules, params)
        optimizer, mask = restrict(self.optimizer, params, self.trainable)
        shapes, specs = state_layout(params, optimizer, rules, trainable=mask)
        gradients = shapes["params"], specs["params"]
        if mask is not None:
            gradients = select(gradients[0], mask), select(gradients[1], mask)
        return sum(bytes_per_device(*of, rules.axis_sizes) for of in ((shapes, specs), gradients))
