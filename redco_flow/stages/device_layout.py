"""Whether a stage's settings can be laid out over a number of devices: for plans, without JAX.

The same rules as `engine.sharding.mesh` and `engine.data.order`, which check what JAX finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Found = Iterator[tuple[tuple[str, ...], str]]


def layout_problems(config: Any, num_devices: int, *, batch: str = "batch_size") -> Found:
    """Yield (path in the Config, message) of the first setting that does not divide.

    Args:
        config: with `num_model_shards`, `fsdp`, and for training `num_context_shards` and
            `per_device_batch_size`.
        num_devices: of all processes of the stage.
        batch: the field that says how many rows are worked on at once.
    """
    num_left, noun = num_devices, "devices of the stage"
    for name in ("num_model_shards", "num_context_shards"):
        value = getattr(config, name, 1)
        if num_left % value:
            yield (name,), _does_not_divide(value, num_left, noun)
            return
        num_left //= value
        noun = f"devices that {name.replace('_', ' ').removeprefix('num ')} leave"
    if isinstance(config.fsdp, int) and num_left % config.fsdp:
        yield ("fsdp",), _does_not_divide(config.fsdp, num_left, "data-parallel devices")
    per_device = getattr(config, "per_device_batch_size", None) or 1
    rows, unit = getattr(config, batch), num_left * per_device
    if rows % unit:
        below = rows - rows % unit
        nearest = ", ".join(str(size) for size in (below, below + unit) if size)
        yield (
            (batch,),
            f"{rows} is not a multiple of {unit} ({num_left} data-parallel devices x {per_device} "
            f"rows per device); nearest valid values: {nearest}",
        )


def _does_not_divide(value: int, count: int, noun: str) -> str:
    allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    counted = f"{count} {noun}" if count > 1 else f"1 {noun.replace('devices', 'device', 1)}"
    return f"{value} does not divide the {counted}; allowed: {allowed}"
