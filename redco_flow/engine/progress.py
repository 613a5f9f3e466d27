"""Log the progress of training and prediction, and how well devices are used meanwhile.

One line per interval, evaluation and checkpoint. MFU, model FLOPs utilisation, is the model's
operations over what the devices could have computed in that time, so computing again what was not
kept makes it no better.

The lines go to the standard `logging` at level INFO, from the first process alone:
`logging.basicConfig(level=logging.INFO)` shows them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from redco_flow.engine.devices import peak_tflops

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_FIRST_INTERVAL_SECONDS = 5.0
_LAST_INTERVAL_SECONDS = 60.0
# An interval is this part of the time passed: 90 s give about 20 lines, ten minutes about 60.
_INTERVALS_PER_TIME_PASSED = 20


class LineInterval:
    """Decides when the next line is due: every 5 s at first, in the end once a minute."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._last = clock()

    def is_due(self) -> bool:
        """Whether a line is due now; then the next interval begins."""
        now = self._clock()
        interval = max(_FIRST_INTERVAL_SECONDS, (now - self._begun) / _INTERVALS_PER_TIME_PASSED)
        if now - self._last < min(interval, _LAST_INTERVAL_SECONDS):
            return False
        self._last = now
        return True


@dataclass
class _Sums:
    """Sums since the last progress line."""

    total: float = 0.0
    weight: float = 0.0
    timed_weight: float = 0.0
    timed_steps: int = 0
    seconds: float = 0.0
    flops: float | None = 0.0

    def add_time(self, weight: float, seconds: float, flops: float | None) -> None:
        self.timed_weight += weight
        self.timed_steps += 1
        self.seconds += seconds
        self.flops = None if self.flops is None or flops is None else self.flops + flops


@final
class TrainingLines:
    """The lines of one training; those of steps tell the mean loss since the last one.

    Args:
        total_steps: optimizer steps of the whole training.
        devices: that the steps are computed on.
    """

    def __init__(
        self,
        total_steps: int,
        clock: Clock = time.monotonic,
        *,
        devices: Sequence[jax.Device] = (),
    ) -> None:
        self._total_steps = total_steps
        self._devices = devices
        self._interval = LineInterval(clock)
        self._is_first = True
        self._sums = _Sums()
        self._times = _Sums()

    def hear_step(
        self,
        step: int,
        found: Mapping[str, Any],
        *,
        counts: bool,
        seconds: float | None,
        model_flops: float | None = None,
    ) -> None:
        """Take in a step's metrics; log a line after the first and the last step and if it is due.

        Args:
            counts: whether the step changed the parameters.
            seconds: what it took; None where that was not measured.
            model_flops: of all devices together; None where they are not known.
        """
        weight = float(found["weight"])
        if counts:
            self._sums.total += float(found["total"])
            self._sums.weight += weight
        if seconds is not None:
            self._sums.add_time(weight, seconds, model_flops)
            self._times.add_time(weight, seconds, model_flops)
        is_due = self._interval.is_due()
        if self._is_first or step == self._total_steps or is_due:
            self._is_first = False
            self._log(step, *self._of_steps(step, found))
            self._sums = _Sums()

    def hear_evaluation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Log the metrics of an evaluation on the validation rows."""
        shown = [f"val/{name} {value:.4g}" for name, value in metrics.items()]
        self._log(step, ", ".join(shown), f"took {duration(seconds)}")

    def hear_saved(self, step: int) -> None:
        """Log that a checkpoint is being written, in the background perhaps."""
        self._log(step, "checkpoint saved, to be committed")

    def hear_committed(self, step: int) -> None:
        """Log that a checkpoint is on the disk and verified: a restart resumes from it."""
        self._log(step, "checkpoint committed")

    def hear_restored(self, step: int) -> None:
        """Log the step from which training resumes."""
        self._log(step, "checkpoint restored; training resumes from it")

    def _of_steps(self, step: int, found: Mapping[str, Any]) -> list[str]:
        sums = self._sums
        parts = [f"loss {sums.total / sums.weight:.4g}" if sums.weight else "no loss: all skipped"]
        if "learning_rate" in found:
            parts.append(f"learning_rate {float(found['learning_rate']):.3g}")
        if sums.seconds > 0:
            parts.append(f"{sums.timed_weight / sums.seconds:,.0f} tokens/s")
        parts += self._of_devices()
        if self._times.timed_steps and step < self._total_steps:
            seconds_per_step = self._times.seconds / self._times.timed_steps
            parts.append(f"{duration(seconds_per_step * (self._total_steps - step))} left")
        return parts

    def _of_devices(self) -> Iterator[str]:
        sums = self._sums
        if sums.seconds > 0 and sums.flops and self._devices:
            found = utilization(sums.flops, sums.seconds, self._devices)
            yield f"{found['tflops_per_device']:.3g} TFLOP/s a device"
            if "mfu" in found:
                yield f"MFU {found['mfu']:.1%}"
        if (peak := peak_memory_bytes(self._devices)) is not None:
            yield f"peak memory {peak / 2**30:.1f} GiB"

    def _log(self, step: int, *parts: str) -> None:
        _log_line(f"step {step}/{self._total_steps}", *parts)


@final
class RowLines:
    """The lines of going over rows once: how many are done, at which rate.

    Args:
        verb: what is done with them: "predicted".
        num_rows: in all.
        tells_end: whether the last rows give a line though none is due.
    """

    def __init__(
        self, verb: str, num_rows: int, *, tells_end: bool = True, clock: Clock = time.monotonic
    ) -> None:
        self._verb = verb
        self._num_rows = num_rows
        self._tells_end = tells_end
        self._clock = clock
        self._interval = LineInterval(clock)
        self._begun = clock()

    def hear_rows(self, num_done: int) -> None:
        """Take in how many rows are done; log a line if it is due, and after the last one."""
        is_last = num_done >= self._num_rows
        if not (self._interval.is_due() or (is_last and self._tells_end)):
            return
        parts = [f"{self._verb} {num_done:,}/{self._num_rows:,} rows"]
        seconds = self._clock() - self._begun
        if seconds > 0:
            parts.append(f"{num_done / seconds:,.3g} rows/s")
            if not is_last:
                parts.append(f"{duration(seconds / num_done * (self._num_rows - num_done))} left")
        _log_line(*parts)


def duration(seconds: float) -> str:
    """Return a duration as a person reads it: 100.4 → "1 min 40 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _log_line(*parts: str) -> None:
    if jax.process_index() == 0:
        logger.info("%s", " · ".join(parts))


def utilization(
    model_flops: float, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
    """Return `tflops_per_device`, TFLOP/s, and `mfu`, from 0 to 1, of devices that are known.

    Args:
        model_flops: of all devices together, within these seconds.
    """
    tflops = model_flops / seconds / len(devices) / 1e12
    peaks = {peak_tflops(str(device.device_kind)) for device in devices}
    (peak, *others) = peaks
    if peak is None or others:
        return {"tflops_per_device": tflops}
    return {"tflops_per_device": tflops, "mfu": tflops / peak}


def peak_memory_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the most memory that one of this process' devices had in use; None if none tells."""
    process = jax.process_index()
    own = [device for device in devices if device.process_index == process]
    found: list[dict[str, Any]] = [device.memory_stats() or {} for device in own]
    return max((int(stats.get("peak_bytes_in_use") or 0) for stats in found), default=0) or None
