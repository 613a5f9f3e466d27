"""Compile a training's step for devices that need not be there, and say whether it fits them.

Bytes are the compiler's own sum. Where it does not fit, settings are looked for that do: the
nearest first, each compiled before it is named.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from redco_flow.engine.step.links import Figures, NotPredicted, Traffic, find_traffic
from redco_flow.engine.step.program import Program, UnknownLoop
from redco_flow.engine.step.step_time import links_of
from redco_flow.engine.targets import Target
from redco_flow.stages.train.compiled_steps import (
    MOST_CPU_SECONDS,
    Changes,
    CompiledStep,
    StepCompiler,
    bytes_per_device,
    cpu_seconds,
    estimated_bytes,
    override,
    predicted_time,
)
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.disk_space import num_bytes
from redco_flow.stages.train.mesh_trials import MeshTrials
from redco_flow.stages.train.planned_data import PlannedData

_NUM_SUGGESTED = 3
_MOST_COMPILES = {"cuda": 6, "tpu": 3}  # beyond the first; a TPU's takes a minute or more
_ROOM = 0.95
_LORA: Changes = {
    "lora": {"rank": 16, "alpha": 32.0, "targets": "all-linear"},
    "frozen_dtype": "bfloat16",
}


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
    is_auto = config.mesh is not None
    if (searches or is_auto) and target.device.platform != "cuda":
        raise NotPredicted(
            "a search of the mesh needs step times, which are predicted for GPUs alone."
        )
    devices = target.find_devices()
    compiler = StepCompiler(config, data, target, devices, target.device.limit_bytes(share_of_gpu))
    search = MeshTrials(stage, compiler, progress) if searches or is_auto else None
    progress(f"compiling the train step for {len(devices)} x {target.device.kind}")
    if search is None:
        step = compiler.compile(compiler.plan({}))
    else:
        step = search.run() if is_auto else search.compile_as_it_is()
    found = _figures(step, data, target, len(devices))
    chosen: Changes = {}
    if search is not None:
        if is_auto:
            found["chosen"] = chosen = search.chosen
            values = {**config.model_dump(mode="json"), **chosen}
            compiler = replace(compiler, config=Config.from_json(values))
        else:
            search.run()
        found["candidates"] = search.rows()
        found["search_notes"] = search.notes
    found["suggestions"] = []
    if not step.fits:
        fitting = [one for one in found.get("candidates", ()) if one["fits"]]
        found["suggestions"] = fitting[:_NUM_SUGGESTED] or _suggest(
            stage, compiler, step, chosen, progress
        )
    return {**found, **_own_cost()}


def _figures(
    step: CompiledStep, data: PlannedData, target: Target, num_devices: int
) -> dict[str, Any]:
    plan, used = step.plan, step.memory
    parts = {
        "parameters": bytes_per_device(plan.state["params"]),
        "optimizer_state": bytes_per_device(plan.state["opt_state"]),
        "batch": bytes_per_device(plan.micro_batches()),
    }
    if used is not None:
        parts["temporaries"] = used.temporaries
        parts["other"] = used.total - sum(parts.values())
    return {
        "device": target.device.kind,
        "reported": target.device.reported,
        "num_devices": num_devices,
        "mesh": {axis: size for axis, size in plan.mesh.shape.items() if size > 1},
        "hosts_of_fabrics": target.hosts_of_fabrics,
        "micro_batches": plan.layout.num_micro,
        "remat": plan.remat,
        "fits": step.fits,
        "used_bytes": step.used_bytes,
        "estimated_bytes": estimated_bytes(plan),
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
        "assumed": list(data.notes),
        "notes": list(data.notes),
    }


def _suggest(
    stage: str,
    compiler: StepCompiler,
    step: CompiledStep,
    chosen: Changes,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return changes with which the step fits, as overrides, and the bytes that it uses then.

    Args:
        chosen: the settings in place of `mesh: auto`, which each change needs too.
    """
    found: list[dict[str, Any]] = []
    enough: list[dict[str, Any]] = []
    num_compiles = _MOST_COMPILES[compiler.target.device.platform]
    for changes in _changes(compiler, step):
        # Settings that are `auto` are found by compiling, too.
        if len(found) == _NUM_SUGGESTED or not num_compiles or cpu_seconds() > MOST_CPU_SECONDS:
            break
        if any(dict(changes).items() >= one.items() for one in enough):
            continue  # a part of them is enough
        texts = [override(stage, *one) for one in {**chosen, **changes}.items()]
        progress(f"does not fit; trying {' '.join(texts)}")
        try:
            plan = compiler.plan(changes)
            tried = compiler.compile_if_it_may_fit(plan)
            num_compiles -= not tried.is_estimate
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


def _changes(compiler: StepCompiler, step: CompiledStep) -> Iterator[Changes]:
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


def _rows_that_fit(step: CompiledStep) -> int | None:
    """Estimate how many rows at once fit; None where fewer do not help or are not possible."""
    fixed = bytes_per_device(step.plan.state) + 2 * step.gradient_bytes
    room = _ROOM * step.limit_bytes - fixed
    each = max(step.used_bytes - fixed, 1) / step.rows
    smaller = [rows for rows in range(1, step.rows) if step.rows % rows == 0]
    fitting = [rows for rows in smaller if rows * each <= room]
    return max(fitting, default=min(smaller, default=None)) if smaller else None


def _program_cost(program: Program | None) -> dict[str, Any]:
    """Return the products of a device's program, and how often kernels run that hide theirs."""
    try:
        flops = program.flops() if program else None
    except UnknownLoop:
        flops = None
    kernels = program.kernel_runs() if program else None
    return {"program_flops_per_device": flops, "kernel_runs_per_device": kernels}


def _traffic(step: CompiledStep, target: Target) -> list[Traffic]:
    assert step.program is not None
    links = links_of(Figures(target.device), step.hosts, target.fabrics)
    return find_traffic(step.program, links, step.plan.mesh.shape)


def _duration(step: CompiledStep, data: PlannedData, target: Target) -> dict[str, Any]:
    """Return how long a step takes, and what follows from it; or why that is not known."""
    try:
        time = predicted_time(step, target)
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
    origins = {name: "profile" if name in device.described else "data sheet" for name in names}
    origins |= {name: "measured" for name in names if name in device.measured}
    return {
        name: {"value": device.measured.get(name, getattr(device, name)), "origin": origin}
        for name, origin in origins.items()
    }


def _own_cost() -> dict[str, Any]:
    """Return what planning took: CPU time, and this process' memory."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "planning_cpu_seconds": round(cpu_seconds(), 1),
        "planning_memory_bytes": max(used.ru_maxrss, children.ru_maxrss) * 1024,
    }
