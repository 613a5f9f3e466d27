"""Compile a training's step for devices that need not be there, and say whether it fits them.

Bytes are the compiler's own sum. Where it does not fit, settings are looked for that do: the
nearest first, each compiled before it is named.
"""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import yaml

from redco_flow.engine.sharding.mesh import FSDP_AXIS, MODEL_AXIS
from redco_flow.engine.step.links import NotPredicted, Traffic, find_traffic
from redco_flow.engine.step.program import Program, UnknownLoop
from redco_flow.engine.step.step_time import StepTime, links_of, predict_step_time
from redco_flow.engine.targets import Target
from redco_flow.engine.training_plan import StepMemory, TrainingPlan, step_memory
from redco_flow.recipes.recipe import Recipe
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.disk_space import num_bytes
from redco_flow.stages.train.mesh_search import Candidate, Trial, search_mesh
from redco_flow.stages.train.plan import plan_training
from redco_flow.stages.train.planned_data import PlannedData

Changes = Mapping[str, Any]
"""New values of the stage's settings; `remat` is of the model's config."""

_NUM_SUGGESTED = 3
_MOST_COMPILES = {"cuda": 6, "tpu": 3}  # beyond the first; a TPU's takes a minute or more
_MOST_CPU_SECONDS = 600.0  # when no more suggestions or meshes are looked for
_REMATS = ("none", "minimal", "full")
_MOST_OF_REASON = 200
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_ROOM = 0.95
_LORA: Changes = {
    "lora": {"rank": 16, "alpha": 32.0, "targets": "all-linear"},
    "frozen_dtype": "bfloat16",
}


@dataclass(frozen=True)
class _Step:
    """A compiled step.

    Args:
        memory: None where the compiler refused it for its memory.
        used_bytes: of a device's memory at once.
        program: the optimized one; None where it cannot be read.
    """

    plan: TrainingPlan
    memory: StepMemory | None
    used_bytes: int
    limit_bytes: int
    program: Program | None = None

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.used_bytes <= self.limit_bytes

    @property
    def rows(self) -> int:
        """Rows that a device works on at once."""
        return self.plan.layout.micro_batch_size // self.plan.deployer.num_data_shards

    @property
    def gradient_bytes(self) -> int:
        return self.plan.bytes_per_device - _bytes_per_device(self.plan.state)


@dataclass(frozen=True)
class _Compiler:
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
        config = Config.from_json({**self.config.model_dump(mode="json"), **settings})
        return plan_training(
            config,
            recipe,
            self.data.batch,
            self.data.num_steps or 1,
            widest_batch=self.data.widest_batch,
            devices=self.devices,
            device_memory_gib=self.limit_bytes / 2**30,
        )

    def compile(self, plan: TrainingPlan) -> _Step:
        limit = self.limit_bytes
        try:
            compiled = plan.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _Step(plan, None, _bytes_of_refusal(str(error)), limit)
        memory = step_memory(compiled)
        return _Step(plan, memory, memory.total, limit, _program_of(compiled))


def fit(
    stage: str,
    config: Config,
    data: PlannedData,
    target: Target,
    progress: Callable[[str], None],
    share_of_gpu: float,
    *,
    searches: bool = False,
) -> dict[str, Any]:
    """Return the figures of a training's step on a target, as JSON with units in the names.

    Args:
        stage: its name, for overrides.
        progress: hears what is being done.
        share_of_gpu: of a GPU's memory, which the stage's process takes.
        searches: also for the mesh and the rematerialisation with the fastest step.

    Raises:
        EngineError, ValueError: settings that the model or the devices cannot follow.
    """
    if searches and target.device.platform != "cuda":
        raise NotPredicted("--search needs step times, which are predicted for GPUs alone.")
    devices = target.find_devices()
    compiler = _Compiler(config, data, target, devices, target.device.limit_bytes(share_of_gpu))
    progress(f"compiling the train step for {len(devices)} x {target.device.kind}")
    step = compiler.compile(compiler.plan({}))
    plan, used = step.plan, step.memory
    parts = {
        "parameters": _bytes_per_device(plan.state["params"]),
        "optimizer_state": _bytes_per_device(plan.state["opt_state"]),
        "batch": _bytes_per_device(plan.micro_batches()),
    }
    if used is not None:
        parts["temporaries"] = used.temporaries
        parts["other"] = used.total - sum(parts.values())
    found = {
        "device": target.device.kind,
        "reported": target.device.reported,
        "num_devices": len(devices),
        "mesh": {axis: size for axis, size in plan.mesh.shape.items() if size > 1},
        "hosts_of_fabrics": target.hosts_of_fabrics,
        "micro_batches": plan.layout.num_micro,
        "remat": plan.remat,
        "fits": step.fits,
        "used_bytes": step.used_bytes,
        "limit_bytes": step.limit_bytes,
        "device_bytes": round(target.device.memory_gib * 2**30),
        "parts_bytes": parts,
        "gradients_bytes": step.gradient_bytes,
        "host_bytes_per_device": used.host_temporaries if used else None,
        "model_flops_per_step": plan.model_flops(),
        **_program_cost(step.program),
        **_duration(step, data, target),
        "num_parameters": plan.num_parameters,
        "num_trained": plan.num_trained,
        "checkpoint_bytes": num_bytes(plan.storage.shapes),
        "num_steps": data.num_steps,
        "notes": list(data.notes),
    }
    if searches:
        found["candidates"], is_complete = _search(stage, compiler, step, progress)
        if not is_complete:
            ended = f"the search ended after {_MOST_CPU_SECONDS:.0f} s of CPU time"
            found["notes"].append(ended)
    found["suggestions"] = []
    if not step.fits:
        fitting = [one for one in found.get("candidates", ()) if one["step_seconds"]]
        found["suggestions"] = fitting[:_NUM_SUGGESTED] or _suggest(stage, compiler, step, progress)
    return {**found, **_own_cost()}


def _search(
    stage: str, compiler: _Compiler, step: _Step, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """Return what was compiled, as overrides, the fastest first; and whether all was tried.

    Args:
        step: of the settings as they are, which is one of them.
    """
    config, target, plan = compiler.config, compiler.target, step.plan
    remats = _REMATS if _follows(compiler, {"remat": "full"}) else (None,)
    remat = compiler.data.recipe.model.get("config", {}).get("remat") or remats[0]
    given = {"num_model_shards": config.num_model_shards, "fsdp": config.fsdp, "remat": remat}
    as_it_is = Candidate(plan.mesh.shape[MODEL_AXIS], plan.mesh.shape[FSDP_AXIS], plan.remat)

    def attempt(candidate: Candidate) -> Trial:
        changes = {name: value for name, value in vars(candidate).items() if value is not None}
        if changes == {name: given[name] for name in changes}:
            return _trial(candidate, step, target)
        progress(f"trying {' '.join(_override(stage, *change) for change in changes.items())}")
        try:
            plan = compiler.plan(changes)
            if plan.bytes_per_device > compiler.limit_bytes:
                gib = f"{plan.bytes_per_device / 2**30:.1f} GiB"
                return Trial(candidate, refusal=f"parameters, gradients and optimizer alone: {gib}")
            return _trial(candidate, compiler.compile(plan), target)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return Trial(candidate, refusal=" ".join(str(error).split())[:_MOST_OF_REASON])

    rows = [_candidate_row([], _trial(as_it_is, step, target))]
    num_devices = target.num_devices // config.num_context_shards
    of_host = max(target.topology[-1] // config.num_context_shards, 1)
    is_complete = True
    for trial in search_mesh(num_devices, of_host, remats, attempt):
        changes = {name: value for name, value in vars(trial.candidate).items() if value}
        differing = [(name, value) for name, value in changes.items() if value != given[name]]
        if differing:
            rows.append(_candidate_row([_override(stage, *each) for each in differing], trial))
        if _cpu_seconds() > _MOST_CPU_SECONDS:
            is_complete = False
            break
    return sorted(rows, key=lambda row: row["step_seconds"] or math.inf), is_complete


def _trial(candidate: Candidate, step: _Step, target: Target) -> Trial:
    if not step.fits:
        return Trial(candidate, step.used_bytes)
    try:
        return Trial(candidate, step.used_bytes, _predicted(step, target).seconds)
    except NotPredicted as error:
        return Trial(candidate, step.used_bytes, refusal=f"step time not known: {error}")


def _candidate_row(overrides: list[str], trial: Trial) -> dict[str, Any]:
    return {
        "overrides": overrides,
        **vars(trial.candidate),
        "used_bytes": trial.used_bytes,
        "step_seconds": trial.seconds,
        "refusal": trial.refusal,
    }


def _follows(compiler: _Compiler, changes: Changes) -> bool:
    try:
        compiler.plan(changes)
    except ValueError:
        return False
    return True


def _suggest(
    stage: str, compiler: _Compiler, step: _Step, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return changes with which the step fits, as overrides, and the bytes that it uses then."""
    found: list[dict[str, Any]] = []
    enough: list[dict[str, Any]] = []
    num_left = _MOST_COMPILES[compiler.target.device.platform]
    for changes in _changes(compiler, step):
        # Settings that are `auto` are found by compiling, too.
        if len(found) == _NUM_SUGGESTED or not num_left or _cpu_seconds() > _MOST_CPU_SECONDS:
            break
        if any(dict(changes).items() >= one.items() for one in enough):
            continue  # a part of them is enough
        texts = [_override(stage, key, value) for key, value in changes.items()]
        progress(f"does not fit; trying {' '.join(texts)}")
        try:
            plan = compiler.plan(changes)
            if _bytes_per_device(plan.state) > step.limit_bytes:
                continue
            num_left -= 1
            tried = compiler.compile(plan)
        except (ValueError, jax.errors.JaxRuntimeError):  # the model or the devices cannot follow
            continue
        if tried.fits:
            enough.append(dict(changes))
            time = _duration(tried, compiler.data, compiler.target)["step_time"]
            found.append(
                {
                    "overrides": texts,
                    "used_bytes": tried.used_bytes,
                    "step_seconds": time and time["seconds"],
                }
            )
    return found


def _changes(compiler: _Compiler, step: _Step) -> Iterator[Changes]:
    """Yield changes to try: the nearest first, alone before together."""
    config, plan = compiler.config, step.plan
    fewer: Changes = {}
    if (rows := _rows_that_fit(step)) is not None:
        fewer = {"per_device_batch_size": rows}
    least: Changes = {"per_device_batch_size": 1} if step.rows > 1 else {}
    again: Changes = {}
    if compiler.data.recipe.model.get("config", {}).get("remat") in ("none", "dots", "minimal"):
        again = {"remat": "full"}
    data_shards = plan.deployer.num_data_shards
    split: Changes = {}
    if config.fsdp != "auto" and data_shards > config.fsdp:
        split = {"fsdp": data_shards}
    shards = [
        {"num_model_shards": config.num_model_shards * 2**power}
        for power in range(1, int(math.log2(data_shards)) + 1)
    ]
    # Factors beside parameters that nothing has trained are of no use.
    lora = {} if config.lora or config.freeze or not compiler.data.is_pretrained else _LORA
    tried: list[Changes] = []
    for together in (
        fewer, again, split, {**least, **again}, {**split, **again}, {**split, **least, **again},
        *shards, *({**one, **again} for one in shards), {**lora}, {**lora, **split},
        {**lora, **split, **least, **again},
    ):  # fmt: skip
        if together and together not in tried:
            tried.append(together)
            yield together


def _rows_that_fit(step: _Step) -> int | None:
    """Estimate how many rows at once fit; None where fewer do not help or are not possible."""
    fixed = _bytes_per_device(step.plan.state) + 2 * step.gradient_bytes
    room = _ROOM * step.limit_bytes - fixed
    each = max(step.used_bytes - fixed, 1) / step.rows
    smaller = [rows for rows in range(1, step.rows) if step.rows % rows == 0]
    fitting = [rows for rows in smaller if rows * each <= room]
    return max(fitting, default=min(smaller, default=None)) if smaller else None


def _override(stage: str, key: str, value: Any) -> str:
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


def _program_cost(program: Program | None) -> dict[str, Any]:
    """Return the products of a device's program, and how often kernels run that hide theirs."""
    try:
        flops = program.flops() if program else None
    except UnknownLoop:
        flops = None
    kernels = program.kernel_runs() if program else None
    return {"program_flops_per_device": flops, "kernel_runs_per_device": kernels}


def _predicted(step: _Step, target: Target) -> StepTime:
    if step.program is None:
        raise NotPredicted("the compiled program cannot be read")
    return predict_step_time(step.program, target.device, _hosts(step), target.fabrics)


def _traffic(step: _Step, target: Target) -> list[Traffic]:
    assert step.program is not None
    links = links_of(target.device, _hosts(step), target.fabrics)
    return find_traffic(step.program, links, step.plan.mesh.shape)


def _hosts(step: _Step) -> list[int]:
    return [device.process_index for device in step.plan.mesh.devices.flat]


def _duration(step: _Step, data: PlannedData, target: Target) -> dict[str, Any]:
    """Return how long a step takes, and what follows from it; or why that is not known."""
    try:
        time = _predicted(step, target)
        traffic = _traffic(step, target)
    except NotPredicted as error:
        unknown = {"step_time": None, "step_time_unknown": str(error)}
        return {**unknown, "device_facts": _facts(target, ["memory_gib"])}
    labels: tuple[int, ...] = getattr(data.widest_batch.get("labels"), "shape", ())
    rows = step.plan.layout.global_batch_size
    total = data.num_steps and data.num_steps * time.seconds
    found = {
        "seconds": time.seconds,
        "least_seconds": time.least,
        "most_seconds": time.most,
        "parts_seconds": time.parts,
        "traffic": [vars(one) for one in traffic],
        "rows_per_second": rows / time.seconds,
        "tokens_per_second": rows * labels[1] / time.seconds if len(labels) == 2 else None,
        "all_steps_seconds": total,
        "device_hours": total and total * target.num_devices / 3600,
    }
    return {"step_time": found, "device_facts": _facts(target, ["memory_gib", *time.facts])}


def _facts(target: Target, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return figures of the target's device, each with what it is from."""
    device = target.device
    given = {name: "profile" if name in device.described else "data sheet" for name in names}
    origins = given | {name: "measured" for name in names if name in device.measured}
    return {
        name: {"value": device.measured.get(name, getattr(device, name)), "origin": origin}
        for name, origin in origins.items()
    }


def _bytes_per_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _bytes_of_refusal(message: str) -> int:
    """Return what a TPU's compiler says that a program would use."""
    found = re.search(r"[Uu]sed (\d+(?:\.\d+)?)([KMG]) of", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def _own_cost() -> dict[str, Any]:
    """Return what planning took: CPU time, and this process' memory."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "planning_cpu_seconds": round(_cpu_seconds(), 1),
        "planning_memory_bytes": max(used.ru_maxrss, children.ru_maxrss) * 1024,
    }


def _cpu_seconds() -> float:
    """Return this process' CPU time, assemblers' included."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
