"""Plan and compile variants of one training's step for devices that need not be there."""

from __future__ import annotations

import logging
import math
import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import yaml

from redco_flow.engine.step.links import NotPredicted
from redco_flow.engine.step.program import Program
from redco_flow.engine.step.step_time import StepTime, predict_step_time
from redco_flow.engine.targets import Target
from redco_flow.engine.training_plan import StepMemory, TrainingPlan, step_memory
from redco_flow.recipes.recipe import Recipe
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.plan import plan_training
from redco_flow.stages.train.planned_data import PlannedData

logger = logging.getLogger(__name__)

Changes = Mapping[str, Any]
"""New values of the stage's settings; `remat` is of the model's config."""

MOST_CPU_SECONDS = 600.0
"""When no more settings are tried."""

# Estimates for GPUs were at most 6 % too high (docs/design/memory.md); none of steps for TPUs was
# compared. Too low ones are compiled.
_CLEARLY = {"cuda": 1.10, "tpu": 1.25}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Args:
        memory: None where the compiler refused it for its memory.
        used_bytes: of a device's memory at once.
        program: the optimized one; None where it cannot be read.
        is_estimate: whether it was not compiled, and the bytes are estimated.
    """

    plan: TrainingPlan
    memory: StepMemory | None
    used_bytes: int
    limit_bytes: int
    program: Program | None = None
    is_estimate: bool = False

    @property
    def fits(self) -> bool:
        """Whether the device has as much memory."""
        return self.memory is not None and self.used_bytes <= self.limit_bytes

    @property
    def rows(self) -> int:
        """Rows that a device works on at once."""
        return self.plan.layout.micro_batch_size // self.plan.deployer.num_data_shards

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients on a device."""
        return self.plan.bytes_per_device - bytes_per_device(self.plan.state)

    @property
    def hosts(self) -> list[int]:
        """The number of each device's host, in the mesh's order."""
        return [device.process_index for device in self.plan.mesh.devices.flat]

    @property
    def updated_bytes(self) -> int:
        """Bytes that the optimizer reads or writes: its state, what it trains, and gradients."""
        return 3 * self.gradient_bytes + 2 * bytes_per_device(self.plan.state["opt_state"])


@dataclass(frozen=True)
class StepCompiler:
    """Plans and compiles variants of one training for one target."""

    config: Config
    data: PlannedData
    target: Target
    devices: Sequence[jax.Device]
    limit_bytes: int

    def plan(self, changes: Changes) -> TrainingPlan:
        """Raise ValueError where the model or the devices cannot follow the changes."""
        recipe, settings = self.data.recipe, dict(changes)
        if "remat" in settings:
            recipe = _with_config(recipe, {"remat": settings.pop("remat")})
        values = {**self.config.model_dump(mode="json"), "mesh": None, **settings}
        config = Config.from_json(values)
        return plan_training(
            config,
            recipe,
            self.data.batch,
            self.data.num_steps or 1,
            widest_batch=self.data.widest_batch,
            devices=self.devices,
            device_memory_gib=self.limit_bytes / 2**30,
        )

    def follows(self, changes: Changes) -> bool:
        """Say whether the model and the devices can follow the changes."""
        try:
            self.plan(changes)
        except ValueError:
            return False
        return True

    def compile_if_it_may_fit(self, plan: TrainingPlan) -> CompiledStep:
        """Compile a plan's step, unless its estimate says clearly that it does not fit."""
        estimate = estimated_bytes(plan)
        clearly = _CLEARLY[self.target.device.platform]
        if estimate is not None and estimate > clearly * self.limit_bytes:
            return CompiledStep(plan, None, estimate, self.limit_bytes, is_estimate=True)
        return self.compile(plan)

    def compile(self, plan: TrainingPlan) -> CompiledStep:
        """Compile a plan's step; one that its compiler refuses for its memory is a step, too."""
        limit = self.limit_bytes
        try:
            compiled = plan.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or "No space left" in str(error):
                raise
            return CompiledStep(plan, None, _bytes_of_refusal(str(error)), limit)
        memory = step_memory(compiled)
        return CompiledStep(plan, memory, memory.total, limit, _program_of(compiled))


def estimated_bytes(plan: TrainingPlan) -> int | None:
    """Return the estimate of a plan's memory; None, and the log says why, where it fails."""
    try:
        return plan.estimate_bytes()
    except Exception:  # noqa: BLE001 (a plan goes on without an estimate)
        logger.warning("the step's memory cannot be estimated", exc_info=True)
        return None


def override(stage: str, key: str, value: Any) -> str:
    """Return a change of a setting, or of `remat`, as an override on the command line."""
    path = f"stages.{stage}.{'model.config.remat' if key == 'remat' else key}"
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    return f"{path}={text}" if text.isalnum() else f"'{path}={text}'"


def _with_config(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    if recipe.with_config is None:
        raise ValueError("the recipe makes no model with another config")
    return recipe.with_config(changes)


def _program_of(compiled: jax.stages.Compiled) -> Program | None:
    try:
        return Program(compiled.as_text() or "")
    except jax.errors.JaxRuntimeError:  # of a libtpu that is newer than jaxlib
        return None


def predicted_time(step: CompiledStep, target: Target) -> StepTime:
    """Return how long a step takes; raise NotPredicted where that is not known."""
    if step.memory is None:
        raise NotPredicted("the step is too large to be compiled")
    if step.program is None:
        raise NotPredicted("the compiled program cannot be read")
    return predict_step_time(step.program, target.device, step.hosts, target.fabrics)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of arrays, or shapes, on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _bytes_of_refusal(message: str) -> int:
    """Return what a TPU's compiler says that a program would use."""
    found = re.search(r"[Uu]sed (\d+(?:\.\d+)?)([KMG]) of", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def cpu_seconds() -> float:
    """Return this process' CPU time, assemblers' included."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
