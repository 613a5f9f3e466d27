"""calibrate: the speed of a host's devices out: products, copies, exchanges."""

from __future__ import annotations

from dataclasses import asdict
from importlib import metadata

import jax

from redco_flow.engine.device_speed import Speed, figures_of, measure_speeds
from redco_flow.records import write_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.runtime.process_group import describe_devices
from redco_flow.stages.calibrate.config import SPEEDS_FILE, Config


def run(context: StageContext, config: Config) -> StageOutputs:
    """Time each operation at each size, and write all of them with the figures that follow."""
    context.report(phase="measuring", devices=describe_devices())
    devices = jax.local_devices()
    copies, exchanges = (
        [size * 2**20 for size in sizes] for sizes in (config.copy_mib, config.exchange_mib)
    )
    speeds: list[Speed] = []
    for speed in measure_speeds(devices, config.product_sizes, copies, exchanges):
        context.report(phase=f"measuring {speed.operation}")
        context.raise_if_stopped()
        speeds.append(speed)
    figures = figures_of(speeds)
    folder = context.work_dir / "speeds"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "figures": figures,
        "speeds": [asdict(speed) for speed in speeds],
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
    }
    write_json(folder / SPEEDS_FILE, record)
    return StageOutputs({"metrics": Output("metrics", folder)}, figures)
