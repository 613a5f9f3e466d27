"""Sample what a job uses of its first host into system_metrics.jsonl, in a process of its own.

`python -m redco_flow.launch.system_metrics ATTEMPT_DIRECTORY` runs until it is killed. The
supervisor starts it beside a worker that has run for a while: a GPU driver that hangs then holds up
neither of them, and a short stage costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import psutil
import pynvml

from redco_flow.launch.processes import processes_of
from redco_flow.records import open_no_link
from redco_flow.tracking.attempt import AttemptDirectory

if TYPE_CHECKING:
    from redco_flow.tracking.attempt import GpuSample, SystemSample

_SECONDS_BETWEEN_SAMPLES = 10.0
_SAMPLES_BEFORE_THEY_THIN_OUT = 1000  # a week then has 5,000 samples, of 200 bytes


class SystemMetrics:
    """Use of this host by the processes of an attempt.

    Args:
        environ: of the job: `CUDA_VISIBLE_DEVICES` hides GPUs.
    """

    def __init__(self, attempt: AttemptDirectory, environ: Mapping[str, str]) -> None:
        self._attempt = attempt
        self._gpus = dict(_find_gpus(environ.get("CUDA_VISIBLE_DEVICES")))
        self._cpu_seconds: dict[int, float] = {}
        self._read_at = time.monotonic()

    def sample(self) -> SystemSample:
        """Return the present use; of the CPUs, the mean since the sample before."""
        cpu_seconds: dict[int, float] = {}
        memory_bytes = 0
        for pid in processes_of(self._attempt.path):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_seconds[pid] = times.user + times.system
        used = sum(spent - self._cpu_seconds.get(pid, 0.0) for pid, spent in cpu_seconds.items())
        now = time.monotonic()
        cpu_cores = used / (now - self._read_at)
        self._cpu_seconds, self._read_at = cpu_seconds, now
        disk = os.statvfs(self._attempt.path)
        return {
            "time": time.time(),
            "cpu_cores": round(cpu_cores, 2),
            "memory_bytes": memory_bytes,
            "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            "gpus": [_sample_gpu(index, gpu) for index, gpu in self._gpus.items()],
        }


def _find_gpus(visible: str | None) -> Iterator[tuple[int, Any]]:
    """Yield index and handle of each NVIDIA GPU that the job may use; none without a driver."""
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(gpu)
            if names is None or any(
                name == str(index) or (name.startswith("GPU-") and uuid.startswith(name))
                for name in names
            ):
                yield index, gpu


def _sample_gpu(index: int, gpu: Any) -> GpuSample:
    sample: GpuSample = {"index": index}
    with contextlib.suppress(pynvml.NVMLError):  # not all drivers and parts of GPUs count both
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        sample["memory_used_bytes"] = int(memory.used)
        sample["memory_total_bytes"] = int(memory.total)
        sample["utilization_percent"] = int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
    return sample


def main(arguments: list[str]) -> None:
    """Append a sample to the attempt's file at each interval, until this process is killed."""
    attempt = AttemptDirectory(Path(arguments[0]))
    metrics = SystemMetrics(attempt, os.environ)
    started_at = time.monotonic()
    while True:
        elapsed = time.monotonic() - started_at
        time.sleep(max(_SECONDS_BETWEEN_SAMPLES, elapsed / _SAMPLES_BEFORE_THEY_THIN_OUT))
        with (
            contextlib.suppress(OSError),  # a full disk: a sample is not worth a job
            open(attempt.system_metrics_path, "ab", opener=open_no_link) as file,
        ):
            file.write(orjson.dumps(metrics.sample()) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
